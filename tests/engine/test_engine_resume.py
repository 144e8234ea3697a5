"""A request that was interrupted goes on from its prefix: with the very tokens and log-probs that it would have had.

Bit for bit wherever the engine is exact (`engine.exact = true`, or the kernels, which always are): this is what makes a run that
was killed and resumed the same run. On real, tiny models; what must be equal is compared without tolerance.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.steps import Transcript, write_down
from headrace.core.types import Request, Sampling
from headrace.core.weights import AdapterSpec, WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import NativeEngine
from headrace.engine.native.kernels import binding
from headrace.engine.native.runners.adapter_tensors import PREFIX
from headrace.engine.native.runners.skeleton import parameters_from_dir
from support.tiny_models import make

WIDE = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 32, "intermediate_size": 112}
"""What the kernels serve, and more than one block of 32 in every product."""
EXACT = [
    ("fused", "llama", "float32"),
    ("fused", "qwen3_moe", "bfloat16"),
    ("fused", "mistral-sliding", "bfloat16"),
    ("hf", "gpt_neox", "float32"),
    ("hf", "llama", "bfloat16"),
    *(
        pytest.param("kernels", name, "bfloat16", marks=pytest.mark.skipif(not binding.library(), reason="no compiler"))
        for name in ("llama", "olmoe")
    ),
]


@cache
def saved(name: str) -> Path:
    directory = Path(mkdtemp(prefix=f"headrace-resume-{name}-"))
    make(name, **WIDE).save_pretrained(directory)
    return directory


@cache
def parameters(name: str, dtype: str) -> dict[str, torch.Tensor]:
    return parameters_from_dir(saved(name), getattr(torch, dtype))


def renew(engine: NativeEngine, name: str, dtype: str) -> None:
    """The same weights under another version: what is cached is for nobody any more, as in a process that was started anew."""
    version = engine.stats().version + 1
    tensors = parameters(name, dtype)
    engine.swap(
        engine.prepare(WeightUpdate(version=version, kind="full", fingerprint="", nbytes=0, seconds=0.0), tensors)
    )


@cache
def engine_of(path: Any, name: str, dtype: str, exact: bool = True, adapters: int = 0) -> NativeEngine:
    """One for all examples: what is left in its prefix cache makes the next ones different."""
    config = EngineConfig(
        path=path, dtype=dtype, device="cpu", kv_gib=0.01, max_running=5, context_length=160, prefill_chunk=32,
        exact=exact and path != "kernels", check=True, max_adapters=adapters,
    )  # fmt: skip
    engine = NativeEngine(saved(name), config)
    renew(engine, name, dtype)
    if adapters:
        spec = AdapterSpec("north", 4, 8.0)
        engine.swap(
            engine.prepare(
                WeightUpdate(version=0, kind="adapter", fingerprint="", nbytes=0, seconds=0.0, adapter=spec),
                adapter_of(name),
            )
        )
    return engine


def adapter_of(name: str) -> dict[str, torch.Tensor]:
    generator, tensors = torch.Generator().manual_seed(0), {}
    for key, weight in parameters(name, "float32").items():
        if key.endswith("_proj.weight"):
            out, into = weight.shape
            module = PREFIX + key.removesuffix(".weight")
            tensors[f"{module}.lora_A.weight"] = torch.randn(4, into, generator=generator) * 0.3
            tensors[f"{module}.lora_B.weight"] = torch.randn(out, 4, generator=generator) * 0.3
    return tensors


class Interruptions:
    """Requests that are aborted and issued again, again and again, beside others that come and go."""

    def __init__(self, engine: NativeEngine, rng: random.Random, forget: Callable[[], None]) -> None:
        """`forget`: makes the engine lose what it has cached."""
        self.engine, self.rng, self.forget = engine, rng, forget
        self.whole: dict[str, Transcript] = {}
        """As one uninterrupted request would tell it: what came before every interruption, and after."""
        self.stops: dict[str, str] = {}
        self.aborted = 0

    def add(self, request: Request) -> None:
        self.whole[request.id] = Transcript(request=request)
        self.engine.add(request)

    def step(self) -> None:
        output = self.engine.step()
        write_down(output, self.whole.get)
        for end in output.finished:
            if end.stop == "interrupted" and end.request_id in self.whole:
                self.go_on(end.request_id)
            else:
                self.stops[end.request_id] = end.stop

    def go_on(self, name: str) -> None:
        self.aborted += 1
        whole = self.whole[name]
        self.engine.add(msgspec.structs.replace(whole.request, prefix=tuple(whole.tokens)))

    def run(self) -> None:
        mates = 0
        while len(self.stops.keys() & self.whole.keys()) < len(self.whole):
            if self.rng.random() < 0.08:
                self.engine.abort()
                if self.rng.random() < 0.7:
                    self.forget()
            if self.rng.random() < 0.1:
                mates += 1
                mate = Request(
                    f"mate {mates}", prompt(self.rng), Sampling(max_tokens=self.rng.randint(1, 9), seed=mates)
                )
                self.engine.add(mate)
            self.step()
        self.engine.abort()
        self.engine.step()


def prompt(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randrange(3, 96) for _ in range(rng.choice([1, 7, 31, 32, 33, 70])))


def sampling(rng: random.Random, seed: int) -> Sampling:
    return Sampling(
        max_tokens=rng.choice([3, 20, 35]),
        temperature=rng.choice([1.0, 1.0, 0.7, 0.0]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        top_k=rng.choice([0, 0, 10]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        seed=seed,
        ignore_eos=True,
    )


def alone(engine: NativeEngine, requests: list[Request]) -> Mapping[str, Transcript]:
    """One after the other, never interrupted."""
    told = {}
    for request in requests:
        transcript = told[request.id] = Transcript(request=request)
        engine.add(request)
        while engine.has_work():
            write_down(engine.step(), {request.id: transcript}.get)
    return told


@pytest.mark.slow
@pytest.mark.parametrize(("path", "name", "dtype"), EXACT)
@settings(max_examples=2)
@given(seed=st.integers(0, 2**32))
def test_going_on_from_a_prefix_changes_no_bit(path: str, name: str, dtype: str, seed: int) -> None:
    engine, rng = engine_of(path, name, dtype), random.Random(seed)
    shared = prompt(rng)
    requests = [
        Request(f"r{i}", rng.choice([shared, prompt(rng)]), sampling(rng, seed + i), return_mask=True, top_logprobs=2)
        for i in range(3)
    ]
    wanted = alone(engine, requests)
    with_interruptions = Interruptions(engine, rng, lambda: renew(engine, name, dtype))
    for request in requests:
        with_interruptions.add(request)
    with_interruptions.run()
    for one, found in with_interruptions.whole.items():
        assert found.tokens == wanted[one].tokens and found.logprobs == wanted[one].logprobs
        assert found.details == wanted[one].details, "masks and most probable tokens too"


@pytest.mark.slow
@pytest.mark.parametrize(("path", "name", "dtype"), EXACT)
def test_every_single_token_can_be_the_one_to_go_on_from(path: str, name: str, dtype: str) -> None:
    engine, rng = engine_of(path, name, dtype), random.Random(1)
    request = Request("whole", prompt(random.Random(3)), Sampling(max_tokens=41, top_p=0.95, seed=5, ignore_eos=True))
    whole = alone(engine, [request])["whole"]
    points = [1, 31, 32, 33, rng.randrange(3, 40)]
    for point in points:
        renew(engine, name, dtype)
        go_on = msgspec.structs.replace(request, id="rest", prefix=tuple(whole.tokens[:point]))
        rest = alone(engine, [go_on])["rest"]
        assert rest.tokens == whole.tokens[point:] and rest.logprobs == whole.logprobs[point:]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "name", "dtype"), [EXACT[0], EXACT[-2]])
def test_under_an_adapter_too_and_beside_requests_without(path: str, name: str, dtype: str) -> None:
    engine, rng = engine_of(path, name, dtype, adapters=1), random.Random(2)
    wish = Sampling(max_tokens=50, top_k=20, seed=3, ignore_eos=True)
    request = Request("whole", prompt(random.Random(3)), wish, adapter="north")
    whole = alone(engine, [request])["whole"]
    plain = alone(engine, [msgspec.structs.replace(request, id="plain", adapter="")])["plain"]
    assert whole.logprobs != plain.logprobs
    for point in (1, 32, 45):
        renew(engine, name, dtype)
        for i in range(3):
            engine.add(Request(f"mate {i}", prompt(rng), wish, adapter=rng.choice(["", "north"])))
        rest = alone(engine, [msgspec.structs.replace(request, id="rest", prefix=tuple(whole.tokens[:point]))])["rest"]
        assert rest.tokens == whole.tokens[point:] and rest.logprobs == whole.logprobs[point:]


@pytest.mark.parametrize("path", ["fused", "hf"])
def test_an_engine_that_is_not_exact_says_so_and_goes_on_nearly_alike(path: str) -> None:
    """What a chunk of a prompt rounds, one token after the other rounds otherwise."""
    engine = engine_of(path, "llama", "float32", exact=False)
    assert not engine.capabilities.exact and engine_of(path, "llama", "float32").capabilities.exact
    greedy = Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)
    request = Request("whole", prompt(random.Random(3)), greedy)
    whole = alone(engine, [request])["whole"]
    renew(engine, "llama", "float32")
    rest = alone(engine, [msgspec.structs.replace(request, id="rest", prefix=tuple(whole.tokens[:33]))])["rest"]
    assert rest.tokens == whole.tokens[33:] and rest.logprobs == pytest.approx(whole.logprobs[33:], abs=1e-4)
