"""A trainer's model, rows that the engine's kernels sample from its weights, and the log-probs that the trainer gives them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from headrace.algo.objective import token_mean
from headrace.core.batches import Row
from headrace.core.steps import Transcript, write_down
from headrace.core.types import Request, Sampling
from headrace.core.weights import AdapterSpec, WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import NativeEngine
from headrace.native.arithmetic import arithmetic
from headrace.trainer.forward.forward import Forward, choose_forward
from headrace.trainer.forward.fused_model import fuse
from headrace.trainer.kernels import binding
from headrace.trainer.model.causal_lm import load_model
from headrace.trainer.packing import Pack, StepRows, pack_rows
from support.tiny_models import make


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


DTYPES = [
    dtype for dtype in (torch.bfloat16, torch.float32) if arithmetic("llama", name_of(dtype), binding.tier() or "")
]
"""Those in which it is claimed for this machine."""
DTYPES_AND_TEMPERATURES = [
    pytest.param(dtype, temperature, marks=() if (dtype == torch.bfloat16) == (temperature < 1) else pytest.mark.slow)
    for dtype in DTYPES
    for temperature in (1.0, 0.7)
]
"""Each with one temperature, the others in `make test-slow`."""
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
    "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 48},
    "qwen3_moe-mixed": {"head_dim": 16, "moe_intermediate_size": 80},
    "mixtral": {"head_dim": 48},
    "olmoe": {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3},  # a norm over all heads
}
MIXTURES = [name for name in FAMILIES if "moe" in name or name == "mixtral"]

_saved = TemporaryDirectory(prefix="headrace-equal-")


@cache
def saved(name: str) -> Path:
    make(name, **{**ODD, **FAMILIES[name]}).save_pretrained(directory := Path(_saved.name) / name)
    return directory


def trainer_of(name: str, seed: int = 0) -> Forward:
    """Its weights are float32 numbers that bfloat16 does not hold: what is published is rounded."""
    forward = choose_forward(load_model(saved(name), torch.device("cpu")))
    assert {"layers", "attention", *(["mixtures"] if name in MIXTURES else [])} <= set(fuse(forward))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in forward.model.parameters():
            parameter.mul_(1 + 0.01 * torch.randn_like(parameter))
    return forward


Weights = Mapping[str, Tensor]
Adapters = Mapping[str, tuple[AdapterSpec, Weights]]
"""Adapters by name, with their tensors."""


def engine_of(
    directory: Path,
    weights: Weights,
    dtype: torch.dtype,
    adapters: Adapters | None = None,
    version: int = 0,
    **options: Any,
) -> NativeEngine:
    """An engine that serves what a trainer publishes."""
    settings = {"kv_gib": 0.01, "max_running": 5, "prefill_chunk": 16, "context_length": CONTEXT, **options}
    settings["max_adapters"] = len(adapters or {})
    engine = NativeEngine(directory, EngineConfig(dtype=name_of(dtype), device="cpu", path="kernels", **settings))
    update = WeightUpdate(version=version, kind="full", fingerprint="", nbytes=0, seconds=0.0)
    engine.swap(engine.prepare(update, published(weights, dtype)))
    for spec, tensors in (adapters or {}).values():
        put = replace(update, kind="adapter", adapter=spec)
        engine.swap(engine.prepare(put, published(tensors, dtype)))
    return engine


def published(weights: Weights, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: weight.detach().to(dtype) for name, weight in weights.items()}


def sampled(
    name: str, weights: Weights, requests: Sequence[Request], dtype: torch.dtype, **options: Any
) -> dict[str, list[Row]]:
    """By the adapter that requests name, `""` for none; in the order of their ends."""
    return sampled_by(engine_of(saved(name), weights, dtype, **options), requests)


def sampled_by(engine: NativeEngine, requests: Sequence[Request]) -> dict[str, list[Row]]:
    transcripts = {request.id: Transcript(request=request) for request in requests}
    rows: dict[str, list[Row]] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        output = engine.step()
        write_down(output, transcripts.get)
        for end in output.finished:
            transcript = transcripts[end.request_id]
            done, count = transcript.completion(end), len(transcript.tokens)
            row = Row(
                prompt=transcript.request.prompt,
                tokens=done.tokens,
                logprobs=done.logprobs,
                advantages=(1.0,) * count,
                mask=(True,) * count,
                versions=tuple(done.versions()),
                kv_versions=tuple(done.kv_versions()),
                sampling_mask=done.mask,
                routing=done.routing,
            )
            rows.setdefault(transcript.request.adapter, []).append(row)
    assert sum(map(len, rows.values())) == len(requests)
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


def packs_of(rows: Sequence[Row], budget: int = 10_000, share: bool = True) -> Sequence[Pack]:
    return pack_rows(StepRows(rows, token_mean, constant=0, budget=budget, step=0, share=share)).packs


PACKINGS = ((4096, True), (150, True), (150, False))
"""Budgets of a microbatch, and whether prefixes are shared."""


def scored(forward: Forward, pack: Pack, temperature: float, dtype: torch.dtype) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        return forward.logprobs(pack, temperature, dtype).logprob
