"""Engine and trainer compute one forward pass: at equal weights log-probs are equal, bit by bit, whatever a batch or a
pack is made of."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from tiny_models import make
from torch import Tensor

from headrace.algo.loss.aggregate import token_mean
from headrace.batches import Row
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import NativeEngine
from headrace.models.resolve import resolve_model
from headrace.native.arithmetic import arithmetic
from headrace.packing import Pack, pack_rows
from headrace.steps import Transcript, write_down
from headrace.trainer.forward.forward import Forward, choose_forward
from headrace.trainer.forward.fused_model import fuse
from headrace.trainer.kernels import binding
from headrace.trainer.model.causal_lm import enable_checkpointing, load_model
from headrace.types import Request, Sampling
from headrace.weights import WeightUpdate


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


DTYPES = [
    dtype for dtype in (torch.bfloat16, torch.float32) if arithmetic("llama", name_of(dtype), binding.tier() or "")
]
"""Those in which it is claimed for this machine."""
CONTEXT = 160

# Sizes that fit no block of 32, so that every edge is padded somewhere.
ODD = {"hidden_size": 84, "intermediate_size": 112, "vocab_size": 100, "num_attention_heads": 6}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-tied-biased": {"head_dim": 16},
    "llama3-rope": {"head_dim": 32},
    "mistral-sliding": {"head_dim": 48},
    "qwen2": {"head_dim": 16, "num_attention_heads": 4},
    "qwen3": {"head_dim": 64, "num_key_value_heads": 1},
    "gemma3_text": {"head_dim": 32, "num_key_value_heads": 2},
}

_saved = TemporaryDirectory(prefix="headrace-equal-")


@cache
def saved(name: str) -> Path:
    make(name, **{**ODD, **FAMILIES[name]}).save_pretrained(directory := Path(_saved.name) / name)
    return directory


def trainer_of(name: str, seed: int = 0) -> Forward:
    """Its weights are float32 numbers that bfloat16 does not hold: what is published is rounded."""
    forward = choose_forward(load_model(saved(name), torch.device("cpu")))
    assert "layers" in fuse(forward)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in forward.model.parameters():
            parameter.mul_(1 + 0.01 * torch.randn_like(parameter))
    return forward


def sampled(name: str, model: Any, requests: Sequence[Request], dtype: torch.dtype, **options: Any) -> list[Row]:
    return sampled_from(saved(name), model, requests, dtype, **options)


def sampled_from(
    directory: Path, model: Any, requests: Sequence[Request], dtype: torch.dtype, **options: Any
) -> list[Row]:
    settings = {"kv_gib": 0.01, "max_running": 5, "prefill_chunk": 16, "context_length": CONTEXT, **options}
    engine = NativeEngine(directory, EngineConfig(dtype=name_of(dtype), device="cpu", path="kernels", **settings))
    update = WeightUpdate(version=0, kind="full", fingerprint="", nbytes=0, seconds=0.0)
    engine.swap(engine.prepare(update, {key: p.detach().to(dtype) for key, p in model.named_parameters()}))
    transcripts = {request.id: Transcript(request=request) for request in requests}
    rows = []
    for request in requests:
        engine.add(request)
    while engine.has_work():
        output = engine.step()
        write_down(output, transcripts.get)
        for end in output.finished:
            transcript = transcripts[end.request_id]
            done, count = transcript.completion(end), len(transcript.tokens)
            rows.append(
                Row(
                    transcript.request.prompt, done.tokens, done.logprobs, (1.0,) * count, (True,) * count, (0,) * count
                )
            )
    assert len(rows) == len(requests)
    return rows


def requests_of(seed: int, temperature: float) -> list[Request]:
    """Groups of one prompt, of which some share a beginning; lengths from one token to several blocks."""
    numbers = random.Random(seed)
    shared = [numbers.randrange(3, ODD["vocab_size"]) for _ in range(45)]
    found = []
    for group in range(5):
        own = [numbers.randrange(3, ODD["vocab_size"]) for _ in range(numbers.choice([1, 7, 33]))]
        prompt = tuple(shared[: numbers.choice([0, 31, 32, 45])] + own)
        for sample in range(3):
            sampling = Sampling(
                max_tokens=numbers.choice([1, 2, 20, 60]), temperature=temperature, seed=len(found), ignore_eos=True
            )
            found.append(Request(f"{group}/{sample}", prompt, sampling))
    return found


def scored(forward: Forward, pack: Pack, temperature: float, dtype: torch.dtype) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        return forward.logprobs(pack, temperature, dtype).logprob


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_any_pack_of_any_batch(name, temperature, dtype):
    forward = trainer_of(name)
    rows = sampled(name, forward.model, requests_of(3, temperature), dtype)
    for budget, share in ((4096, True), (150, True), (150, False)):
        packs = pack_rows(rows, token_mean, constant=0, budget=budget, step=0, share=share).packs
        assert share is False or max(len(pack.segments) for pack in packs) > 3
        for pack in packs:
            assert torch.equal(scored(forward, pack, temperature, dtype), pack.sampled)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_and_other_sequences_change_nothing(dtype):
    forward = trainer_of("qwen3", seed=1)
    requests = requests_of(5, 1.0)
    for options in ({"prefill_chunk": 5, "max_running": 1}, {"prefill_chunk": 200, "max_running": 15}):
        (pack,) = pack_rows(
            sampled("qwen3", forward.model, requests, dtype, **options), token_mean, constant=0, budget=10_000, step=0
        ).packs
        assert torch.equal(scored(forward, pack, 1.0, dtype), pack.sampled)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_and_checkpointing_change_nothing(dtype):
    forward = trainer_of("qwen2")
    (pack,) = pack_rows(
        sampled("qwen2", forward.model, requests_of(7, 1.0), dtype), token_mean, constant=0, budget=10_000, step=0
    ).packs
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(scored(forward, pack, 1.0, dtype), pack.sampled)
    finally:
        torch.set_num_threads(before)
    enable_checkpointing(forward.model)
    assert torch.equal(scored(forward, pack, 1.0, dtype), pack.sampled)


@pytest.mark.parametrize("place", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_weight_that_differs_shows(place, dtype):
    forward = trainer_of("llama3-rope")
    (pack,) = pack_rows(
        sampled("llama3-rope", forward.model, requests_of(3, 1.0), dtype), token_mean, constant=0, budget=10_000, step=0
    ).packs
    with torch.no_grad():
        forward.model.get_parameter(place).flatten()[3] += 0.1
    assert not torch.equal(scored(forward, pack, 1.0, dtype), pack.sampled)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype == torch.bfloat16])
def test_the_head_is_packed_once_for_each_of_its_values(dtype):
    forward = trainer_of("llama3-rope")
    head = forward.model.get_output_embeddings()
    (pack,) = pack_rows(
        sampled("llama3-rope", forward.model, requests_of(3, 1.0), dtype), token_mean, constant=0, budget=10_000, step=0
    ).packs
    found = []
    for _ in range(3):
        scored(forward, pack, 1.0, dtype)
        assert head.packed._packed_from == (head.weight.data_ptr(), head.weight._version)
        found.append(head.packed._packed[0].clone())
        with torch.no_grad():
            head.weight.mul_(1.5)
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_real_model(dtype):
    """Its residual stream has numbers of thousands, beside which sums round more than those of tiny models."""
    directory = resolve_model("smollm2-135m-instruct")
    forward = choose_forward(load_model(directory, torch.device("cpu")))
    assert "layers" in fuse(forward)
    rows = sampled_from(directory, forward.model, requests_of(3, 1.0), dtype, kv_gib=0.1)
    (pack,) = pack_rows(rows, token_mean, constant=0, budget=10_000, step=0).packs
    assert torch.equal(scored(forward, pack, 1.0, dtype), pack.sampled)
