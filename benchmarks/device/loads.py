"""Models with random weights, engines and trainers of the entries, and the batches and requests that they are given.

**A setting that makes GPUs faster is one line in `ENGINE` or `TRAIN`**: every entry takes its engines and trainers from here.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.device.predictions import pass_floor
from headrace.algo.config import AlgoConfig
from headrace.commands.plan.rates.hardware import Gpu
from headrace.commands.plan.rates.shapes import SHAPES
from headrace.core.batches import Batch, Group, Row
from headrace.core.steps import PromptScores
from headrace.core.types import Prompt, Request, Sampling
from headrace.core.weights import WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import Core
from headrace.engine.native.model_loading import read_model
from headrace.engine.native.runners.decoder import FusedRunner
from headrace.engine.native.runners.fp8 import EMULATED
from headrace.engine.request_book import scoring
from headrace.models.lora import LoraConfig
from headrace.trainer.config import TrainConfig
from headrace.trainer.forward.compiled import BACKEND, compiled
from headrace.trainer.step.learner import Assignment
from headrace.trainer.step.trainer import TorchTrainer

ENGINE: dict[str, Any] = {"path": "fused", "prefill_chunk": 8192}
"""Settings of every engine."""
TRAIN: dict[str, Any] = {"microbatch_tokens": 16_384}
"""Settings of every trainer."""

Device = Literal["cpu", "cuda"]
Weights = Literal["published", "emulated", "fp8"]
MODELS: dict[str, dict[str, Any]] = {
    "135m": {"model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
             "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    "1.5b": {"model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "7b": {"model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
           "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False},
    "mixture": {"model_type": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 16,
                "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 64, "num_experts_per_tok": 8,
                "moe_intermediate_size": 512, "norm_topk_prob": True, "tie_word_embeddings": True},
}  # fmt: skip
"""Settings of transformers' configs; all but the mixture are shapes of published models."""
TINY: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2}  # fmt: skip
TINY_MIXTURE: dict[str, Any] = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where an entry runs."""

    device: Device
    folder: Path
    """For what it writes; it is deleted afterwards."""
    chip: Gpu | None = None
    """None for a card without a data sheet, as a CPU is: then nothing is predicted and no share computed."""
    tiny: bool = False
    """A rehearsal."""

    def size(self, real: int, rehearsed: int) -> int:
        return rehearsed if self.tiny else real

    def model(self, name: str) -> Path:
        """Returns a directory with random weights of this shape in bfloat16, made once."""
        directory = self.folder / name
        if directory.is_dir():
            return directory
        settings = {**MODELS[name], "max_position_embeddings": 262_144, "eos_token_id": 2, "bos_token_id": 1}
        if self.tiny:
            settings |= TINY | (TINY_MIXTURE if name == "mixture" else {})
        torch.manual_seed(0)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.bfloat16)
        model.save_pretrained(directory)
        del model
        self.free()
        return directory

    @cached_property
    def _weights(self) -> dict[str, dict[str, torch.Tensor]]:
        return {}

    def weights(self, name: str, device: Device | None = None) -> dict[str, torch.Tensor]:
        """Returns the parameters of a model, tied ones once."""
        key = f"{name} {device or self.device}"
        if key not in self._weights:
            read = AutoModelForCausalLM.from_pretrained(self.model(name), dtype=torch.bfloat16)
            self._weights[key] = {
                tensor_name: tensor.detach().to(device or self.device)
                for tensor_name, tensor in read.named_parameters()
            }
        return self._weights[key]

    def forget(self) -> None:
        """Lets go of all weights that were read."""
        self._weights.clear()
        self.free()

    def free(self) -> None:
        """Gives back the memory of engines and trainers that are no longer used."""
        if self.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    @contextmanager
    def most_memory(self) -> Iterator[Callable[[], float]]:
        """Yields a function that returns the most gigabytes of the device that were held since."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        yield lambda: torch.cuda.max_memory_allocated() / 1e9 if self.device == "cuda" else 0.0


# --- the engine ----------------------------------------------------------------------------------------------------------------


def update(version: int = 0, **more: Any) -> WeightUpdate:
    return WeightUpdate(**{"kind": "full", "fingerprint": "", "nbytes": 0, "seconds": 0.0, "version": version, **more})


def engine(
    bench: Bench,
    model: str,
    running: int,
    *,
    graphs: bool = True,
    ahead: bool | None = None,
    device: Device | None = None,
    weights: Weights = "published",
    **more: Any,
) -> Core:
    """An engine with its weights. `weights`: as they are, in FP8 by the device, or by its codes multiplied in float32, as always on a CPU. `graphs`: CUDA graphs where the engine uses them; off, it decodes without, as for comparison. `ahead`: whether a
    pass is asked for before the tokens of the one before are known; by default where the engine does it."""
    on = device or bench.device
    settings = {
        **ENGINE,
        "device": on,
        "dtype": "bfloat16",
        "max_running": running,
        "context_length": bench.size(256, 64),
        "kv_gib": bench.size(8, 1) if on == "cuda" else 0.05,
        **more,
    }
    multiplied = weights == "fp8" and on == "cuda"
    config = EngineConfig(**settings, weights="fp8" if multiplied else "published")
    read = read_model(bench.model(model), config)
    if weights != "published" and not multiplied:
        assert isinstance(read.runner, FusedRunner)
        read.runner._fp8 = EMULATED
    if not graphs:
        assert isinstance(read.runner, FusedRunner)
        read.runner.replay_with(None)
    if ahead is not None:
        read.runner.feeds = ahead
    core = Core(read, config)
    served = {name: tensor.to(getattr(torch, config.dtype)) for name, tensor in bench.weights(model, on).items()}
    core.swap(core.prepare(update(), served))
    return core


def prompts(count: int, tokens: int, seed: int = 0) -> list[tuple[int, ...]]:
    numbers = random.Random(seed)
    return [tuple(numbers.randrange(3, 500) for _ in range(tokens)) for _ in range(count)]


@dataclass(frozen=True)
class Sampled:
    seconds: float
    """Of the median pass in which every sequence got a token."""
    overall: float
    """Tokens per second, prompts included."""
    tokens: dict[str, list[int]]
    logprobs: dict[str, list[float]]


def sample(
    core: Core,
    begins: Sequence[tuple[int, ...]],
    tokens: int,
    *,
    beside: Callable[[Core, int], None] | None = None,
    request: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> Sampled:
    """Samples `tokens` after each prompt. `beside`: called before every pass with the number of passes, to add further requests."""
    names = {str(number): prompt for number, prompt in enumerate(begins)}
    drawn: dict[str, list[int]] = {name: [] for name in names}
    scores: dict[str, list[float]] = {name: [] for name in names}
    passes: list[float] = []
    for number, (name, prompt) in enumerate(names.items()):
        asked = Sampling(**{"max_tokens": tokens, "ignore_eos": True, "seed": number, **sampling})
        core.add(Request(name, prompt, asked, **(request or {})))
    started = time.perf_counter()
    while core.has_work():
        if beside and all(drawn.values()) and min(map(len, drawn.values())) < tokens:
            beside(core, len(passes))
        before = time.perf_counter()
        step = core.step()
        if len(names.keys() & set(step.request_ids)) == len(names):
            passes.append(time.perf_counter() - before)
        for name, token, logprob in zip(step.request_ids, step.tokens, step.logprobs, strict=True):
            if name in names:
                drawn[name].append(token)
                scores[name].append(logprob)
    assert passes, f"{len(names)} sequences never decoded at once: engine.kv_gib or max_running is too small"
    count = sum(map(len, drawn.values()))
    assert count == len(names) * tokens, f"{count} tokens of {len(names)} × {tokens} were sampled"
    return Sampled(statistics.median(passes), count / (time.perf_counter() - started), drawn, scores)


def score(core: Core, tokens: Sequence[int]) -> list[float]:
    """Returns the engine's log-probs of all tokens but the first."""
    core.add(scoring("score", tokens))
    found: list[PromptScores] = []
    while core.has_work():
        found += core.step().scores
    return list(found[0].logprobs)


def share_of_roofline(bench: Bench, model: str, sequences: int, context: float, seconds: float) -> float | None:
    return (
        pass_floor(bench.chip, SHAPES[model], sequences, context) / seconds if bench.chip and model in SHAPES else None
    )


# --- the trainer ---------------------------------------------------------------------------------------------------------------


def batch(
    bench: Bench, step: int, *, groups: int, rollouts: int, prompt: int, tokens: int, vocabulary: int = 500
) -> Batch:
    """Groups of random rows. In a rehearsal two groups of two short ones."""
    if bench.tiny:
        groups, rollouts, prompt, tokens = min(groups, 2), min(rollouts, 2), 6, 10
    numbers = random.Random(step)

    def row(begin: tuple[int, ...], sign: float) -> Row:
        drawn = tuple(numbers.randrange(3, vocabulary) for _ in range(tokens))
        return Row(begin, drawn, (-6.0,) * tokens, (sign,) * tokens, (True,) * tokens, (step,) * tokens)

    made = []
    for ticket in range(groups):
        begin = tuple(numbers.randrange(3, vocabulary) for _ in range(prompt))
        made.append(
            Group(ticket, Prompt(str(ticket), "", begin), (), tuple(row(begin, (-1.0) ** j) for j in range(rollouts)))
        )
    return Batch(step, tuple(made))


def trainer(
    bench: Bench, model: str, *, lora: LoraConfig | None = None, keep_routing: bool = False, **more: Any
) -> TorchTrainer:
    """A trainer of all weights, or of an adapter. `more`: settings of `[train]`."""
    config = TrainConfig(**{**TRAIN, "device": bench.device, **more})
    adapters = {"": Assignment(config, AlgoConfig(), lora)} if lora else None
    return TorchTrainer(bench.model(model), config, AlgoConfig(), 0, adapters=adapters, keep_routing=keep_routing)


def compile_layers(bench: Bench, learner: TorchTrainer) -> str:
    """Compiles an eager trainer's layers, as `train.compile` does. Returns the reason why not. A rehearsal traces them without writing kernels, for
    which it has no time."""
    backend = "eager" if bench.tiny else BACKEND
    there = learner._placement
    largest = None if there.plain else there.largest
    found = compiled(learner._forward, learner._dtype, learner._copies_of_step, backend, largest)
    learner._forward, learner._compilation = found.forward, found
    return found.why_not


@dataclass(frozen=True)
class Trained:
    tokens: int
    """Forwarded in the step."""
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def train(bench: Bench, learner: TorchTrainer, steps: int = 3, **shape: int) -> Trained:
    """Makes some steps, of which the last is measured."""
    for _ in range(bench.size(steps, 1)):
        report = learner.step(batch(bench, learner.version, **shape))
        assert not report.skipped, report.skipped
    return Trained(report.forward_tokens, report.seconds)


def share_of_peak(bench: Bench, model: str, rate: float) -> float | None:
    """6 × parameters × tokens/s of the data sheet's operations (MFU, without those of attention)."""
    return 6 * SHAPES[model].active * rate / bench.chip.compute if bench.chip and model in SHAPES else None
