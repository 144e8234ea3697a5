"""Is what the device computes right? Kernels compile, engine and trainer give the CPU's numbers, exactness holds, graphs survive new weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from threading import Event, Thread

import numpy as np
import torch

from benchmarks.device import loads
from benchmarks.device.entry import Entry, Figure, Line
from benchmarks.device.loads import Bench
from benchmarks.device.predictions import always
from headrace.core.errors import ConfigError
from headrace.engine.native.draws import DrawDetails, Settings
from headrace.engine.native.sampler import PendingDraw, sample
from headrace.native.cuda_ops import varlen_kernel

SEEN = "as on the H100 of November"
ROUNDING = "sums in another order, by 30 layers: about 1e-6 each, amplified by about 30 (assumed)"
CHECKS = {
    "Triton compiles": "a kernel of three lines",
    "torch.compile compiles": "a function of two operations, with its gradient",
    "varlen attention": "torch's kernel passes the trial of `native/cuda_ops.py`, gradients included",
    "attention reads pages": "the engine's kernel passes its trial; else keys and values are copied for every pass",
    "exact: alone and among eight": "the same tokens and log-probs, bit for bit",
    "filters keep what the CPU keeps": "top-k, top-p and min-p of 64 rows of 49,152 logits: the same sets and tokens",
    "passes asked for ahead": "eight sequences get the tokens that they get in the order of before",
    "graphs captured while weights arrive": "32 sizes, another thread copies and verifies weights all the time",
}
NATS = {
    "engine, bfloat16": (0.005, 0.5, SEEN),
    "engine, float32": (3e-5, 1e-3, ROUNDING),
    "trainer, bfloat16": (0.005, 0.5, "as the engine's on the H100 of November"),
    "trainer, float32": (3e-5, 1e-3, ROUNDING),
}
"""Largest difference of a log-prob from the CPU's in float32: predicted, most, and why."""


def _triton(bench: Bench) -> None:
    from benchmarks.device.triton_kernel import doubled

    x = torch.arange(64, device=bench.device, dtype=torch.float32)
    assert torch.equal(doubled(x), 2 * x), "a Triton kernel computes something else"


def _compiled(bench: Bench) -> None:
    x = torch.randn(64, 64, device=bench.device, requires_grad=True)
    out = torch.compile(lambda x: torch.nn.functional.silu(x) * x)(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    expected = torch.autograd.grad((torch.nn.functional.silu(x) * x).sum(), x)[0]
    assert torch.allclose(gradient, expected, atol=1e-4), "a compiled function has another gradient"


def _varlen(bench: Bench) -> None:
    assert varlen_kernel(torch.device(bench.device), torch.bfloat16, 64), "it fails its trial: the slow paths are taken"


def _pages(bench: Bench) -> None:
    core = loads.engine(bench, "135m", 2)
    assert core._runner._cache.kernel is not None, "no kernel: the engine's log says why"


def _exact(bench: Bench) -> None:
    core = loads.engine(bench, "135m", 8, exact=True)
    begins = loads.prompts(8, bench.size(24, 5))
    alone, among = (loads.sample(core, some, bench.size(24, 4), temperature=1.0) for some in (begins[:1], begins))
    assert alone.tokens["0"] == among.tokens["0"], "a sequence gets other tokens beside others"
    assert alone.logprobs["0"] == among.logprobs["0"], "a sequence gets other log-probs beside others"


def _filters(bench: Bench) -> None:
    rows, vocabulary = bench.size(64, 4), bench.size(49_152, 3000)
    logits = 2 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0))
    kinds = np.arange(rows) % 4
    settings = Settings(
        temperature=np.where(kinds == 3, 0.0, 0.8),
        top_k=np.where(kinds == 1, 20, 0),
        top_p=np.where(kinds < 2, 0.9, 1.0),
        min_p=np.where(kinds == 2, 0.05, 0.0),
        seed=np.arange(rows, dtype=np.uint64),
        counter=np.zeros(rows, np.int64),
    )
    wanted = DrawDetails(masks=np.ones(rows, bool), tops=np.zeros(rows, np.int64))
    found, _ = PendingDraw(logits.to(bench.device), settings, wanted).result()
    expected = sample(logits, settings, wanted.masks)
    assert found.mask is not None and expected.mask is not None
    assert (found.mask.offsets == expected.mask.offsets).all(), "other numbers of tokens are kept"
    assert (found.mask.token_ids == expected.mask.token_ids).all(), "other tokens are kept"
    assert (found.tokens == expected.tokens).all(), "other tokens are drawn"


def _ahead(bench: Bench) -> None:
    begins, found = loads.prompts(8, bench.size(24, 5)), []
    for ahead in (True, False):
        core = loads.engine(bench, "135m", 8, ahead=ahead)
        found.append(loads.sample(core, begins, bench.size(64, 6), temperature=1.0, top_p=0.95))
        del core
    for name, tokens in found[0].tokens.items():
        assert tokens == found[1].tokens[name], "a sequence gets other tokens"
        worst = _worst(found[0].logprobs[name], found[1].logprobs[name])
        assert worst < 1e-6, f"log-probs differ by {worst:.1e}"


def _beside_weights(bench: Bench) -> None:
    """A capture that another thread could break would end the engine's process."""
    core, served = loads.engine(bench, "135m", 32), bench.weights("135m")
    over, errors = Event(), list[Exception]()

    def arrive() -> None:
        try:
            while not over.is_set():
                core.prepare(loads.update(), served)
                for tensor in served.values():
                    tensor.to(bench.device).cpu()
        except Exception as error:
            errors.append(error)

    thread = Thread(target=arrive)
    thread.start()
    try:
        for count in range(1, bench.size(33, 3)):
            loads.sample(core, loads.prompts(count, 8), 4)
    finally:
        over.set()
        thread.join()
    assert not errors, errors[0]


ON_GPU = ("Triton compiles", "torch.compile compiles", "varlen attention", "attention reads pages")
"""What a CPU need not have."""
TRIED: dict[str, Callable[[Bench], None]] = {
    "Triton compiles": _triton,
    "torch.compile compiles": _compiled,
    "varlen attention": _varlen,
    "attention reads pages": _pages,
    "exact: alone and among eight": _exact,
    "filters keep what the CPU keeps": _filters,
    "passes asked for ahead": _ahead,
    "graphs captured while weights arrive": _beside_weights,
}
"""A kernel more is one line here and one in CHECKS."""


def measure(bench: Bench) -> Iterator[Figure]:
    for name, attempt in TRIED.items():
        if name in ON_GPU and bench.device == "cpu":
            yield Figure(name, None, "needs a GPU")
        else:
            yield _tried(name, attempt, bench)
        bench.free()
    yield from _numbers(bench)


def _tried(name: str, attempt: Callable[[Bench], None], bench: Bench) -> Figure:
    try:
        attempt(bench)
    except ConfigError as error:  # a refusal with its reason is no wrong number
        return Figure(name, None, f"refused: {error}")
    except Exception as error:
        return Figure(name, False, f"{type(error).__name__}: {error}"[:300])
    return Figure(name, True)


def _numbers(bench: Bench) -> Iterator[Figure]:
    tokens = [random.Random(1).randrange(3, 500) for _ in range(bench.size(100, 12))]
    reference = loads.engine(bench, "135m", 8, device="cpu", dtype="float32")
    expected, greedy = loads.score(reference, tokens), _greedy(bench, reference)
    for dtype in ("bfloat16", "float32"):
        core = loads.engine(bench, "135m", 8, dtype=dtype)
        yield Figure(f"engine, {dtype}", _worst(loads.score(core, tokens), expected))
        if dtype == "bfloat16":
            same = sum(a == b for a, b in zip(_greedy(bench, core), greedy, strict=True))
            yield Figure("greedy tokens as the CPU's", same / len(greedy))
        del core
    norms = []
    for device, dtype in ((bench.device, "bfloat16"), (bench.device, "float32"), ("cpu", "float32")):
        learner = loads.trainer(bench, "135m", device=device, dtype=dtype, path="torch")
        if device == bench.device and len(norms) < 2:
            yield Figure(f"trainer, {dtype}", _worst(learner.score(tokens), expected))
        rows = loads.batch(bench, 0, groups=2, rollouts=2, prompt=16, tokens=32)
        norms.append(learner.step(rows).grad_norm)
        del learner
        bench.free()
    yield Figure("gradient's norm, float32", abs(norms[1] / norms[2] - 1))


def _greedy(bench: Bench, core: loads.Core) -> list[int]:
    return loads.sample(core, loads.prompts(1, bench.size(32, 5)), bench.size(32, 4), temperature=0.0).tokens["0"]


def _worst(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


ENTRY = Entry(
    name="smoke",
    about="right or wrong; 135m with random weights, against the CPU in float32",
    limit=150,
    lines=(
        *(Line(name=name, unit="check", formula=words) for name, words in CHECKS.items()),
        *(
            Line(name=name, unit="nats", predicted=always(near), most=most, formula=why)
            for name, (near, most, why) in NATS.items()
        ),
        Line(name="greedy tokens as the CPU's", unit="of 1", predicted=always(1.0), formula=SEEN),
        Line(
            name="gradient's norm, float32",
            unit="nats",
            predicted=always(1e-5),
            most=1e-3,
            formula="share of the CPU's by which it differs; sums in another order (assumed)",
        ),
    ),
    measure=measure,
)
