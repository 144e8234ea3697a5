"""Calls of the native engine on tiny models: requests in, answers out, beside what Hugging Face says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from headrace.core.steps import PromptScores, TokenDetails
from headrace.core.types import Request, RoutingTrace, Sampling
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import NativeEngine
from headrace.engine.native.runners.skeleton import parameters_from_dir
from headrace.engine.request_book import scoring
from headrace.testing.makers import update
from support.tiny_models import make

EOS = 258


BYTES = {"vocab_size": 260, "bos_token_id": 257, "eos_token_id": EOS, "pad_token_id": 259}
"""What the byte tokenizer asks of a model's config."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and four special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens(
        {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}  # 256 to 259
    )
    assert len(fast) == 260 and fast.eos_token_id == EOS
    return fast


TOKENIZER = make_tokenizer()


def encode(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def save_model(directory: Path, name: str, seed: int = 0, **changes) -> Path:
    model = make(name, seed, **{**BYTES, **changes})
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[..., Path]:
    """Models by name, made once."""
    made: dict[tuple, Path] = {}

    def get(name: str = "llama", seed: int = 0) -> Path:
        if (name, seed) not in made:
            made[name, seed] = save_model(tmp_path_factory.mktemp(name), name, seed)
        return made[name, seed]

    return get


def put(engine: NativeEngine, model_dir: Path, version: int) -> None:
    written = max(file.stat().st_mtime_ns for file in model_dir.glob("*.safetensors"))
    tensors = {name: tensor.clone() for name, tensor in _parameters(model_dir, written).items()}
    engine.swap(engine.prepare(update(version), tensors))


@lru_cache(maxsize=8)
def _parameters(model_dir: Path, written: int) -> dict[str, torch.Tensor]:
    """Those of a file, by the time at which it was written. Transformers takes 20 ms to read the smallest model."""
    return parameters_from_dir(model_dir, torch.float32)


def make_engine(model_dir: Path, live: bool = True, **config) -> NativeEngine:
    defaults = {
        "dtype": "float32",
        "device": "cpu",
        "kv_gib": 0.05,
        "max_running": 4,
        "context_length": 96,
        "prefill_chunk": 16,
    }
    engine = NativeEngine(model_dir, EngineConfig(**{**defaults, **config}))
    if live:
        put(engine, model_dir, 0)
    return engine


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kv_versions: list[int] = field(default_factory=list)
    stop: str = ""
    error: str = ""
    scores: PromptScores | None = None
    details: list[TokenDetails] = field(default_factory=list)
    routing: RoutingTrace | None = None


def step(engine: NativeEngine, answers: dict[str, Answer]) -> None:
    output = engine.step()
    columns = zip(output.request_ids, output.tokens, output.logprobs, output.kv_versions, strict=True)
    for request_id, token, logprob, kv_version in columns:
        answer = answers.setdefault(request_id, Answer())
        assert not answer.stop, "nothing comes after the end"
        answer.tokens.append(token)
        answer.logprobs.append(logprob)
        answer.versions.append(output.version)
        answer.kv_versions.append(kv_version)
    for details in output.details:
        answers[details.request_id].details.append(details)
    for scores in output.scores:
        answers.setdefault(scores.request_id, Answer()).scores = scores
    for finished in output.finished:
        answer = answers.setdefault(finished.request_id, Answer())
        assert not answer.stop, "a request ends once"
        answer.stop, answer.error, answer.routing = finished.stop, finished.error, finished.routing
    engine.integrity()


def run(engine: NativeEngine, requests: Iterable[Request] = (), answers: dict[str, Answer] | None = None):
    for request in requests:
        engine.add(request)
    answers = {} if answers is None else answers
    for _ in range(2000):
        if not engine.has_work():
            return answers
        step(engine, answers)
    raise AssertionError("the engine does not come to an end")


def score(engine: NativeEngine, tokens: Iterable[int]) -> tuple[float, ...]:
    """Log-probs of a text, beside whatever else is going on."""
    engine.add(scoring("score", tuple(tokens)))
    for _ in range(1000):
        output = engine.step()
        assert not output.request_ids, "tell others' tokens to their own answers"
        for scores in output.scores:
            return scores.logprobs
    raise AssertionError("the text was not scored")


def greedy(name: str, prompt: tuple[int, ...], tokens: int = 12, **options) -> Request:
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return Request(name, prompt, sampling, **options)


def drawn(name: str, prompt: tuple[int, ...], seed: int, tokens: int = 12, **sampling) -> Request:
    return Request(name, prompt, Sampling(max_tokens=tokens, seed=seed, ignore_eos=True, **sampling))


def prompts(*lengths: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [tuple(torch.randint(0, 256, (length,), generator=generator).tolist()) for length in lengths]


def reference(model_dir: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def teacher_forced(model, prompt, tokens, temperature: float = 1.0) -> torch.Tensor:
    """[T, V] log-probs before each of `tokens`."""
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].float() / temperature
    return logits.log_softmax(-1)[len(prompt) - 1 : -1]
