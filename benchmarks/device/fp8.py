"""Decoding with linear layers in FP8, beside the same in bfloat16, and whether the products are what a CPU makes of the same codes."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import get_args

from benchmarks.device import loads
from benchmarks.device.entry import Entry, Figure, Line
from benchmarks.device.loads import SHAPES, Bench, Gpu
from benchmarks.device.predictions import CONTEXT, OVERHEAD, READS, Prediction, always, decoding, overhead, pass_floor
from headrace.core.errors import ConfigError

LOADS = (("1.5b", 1), ("1.5b", 64), ("1.5b", 256), ("7b", 64))
PROMPT, TOKENS = 32, 128
CODING = 2e-6
"""Seconds of the kernel that makes codes of a product's rows, four to a layer. An assumption."""
EMULATED = 0.03
"""Nats between two orders of the sums: where a sum falls on the other side of a code's border, its neighbour is taken. An assumption."""
RANDOM = 0.08
"""Nats: int8 has 0.01 to 0.046 with random weights of this shape, and FP8 2.5 times as much as int8 in SmolLM2-135M-Instruct (docs/quantised.md)."""


def _coded(name: str, sequences: int) -> Prediction:
    model = SHAPES[name]

    def predicted(chip: Gpu) -> float:
        saved = (model.parameters - model.outer) / chip.bandwidth
        floor = pass_floor(chip, model, sequences, CONTEXT) - saved
        return sequences / (overhead(sequences, model.layers) + 4 * model.layers * CODING + floor / READS)

    return predicted


def measure(bench: Bench) -> Iterator[Figure]:
    yield from _numbers(bench)
    for number, (model, count) in enumerate(LOADS):
        if number and LOADS[number - 1][0] != model:
            bench.forget()
        for weights in ("published", "fp8"):
            yield _decoded(bench, model, count, weights)
    bench.forget()


def _numbers(bench: Bench) -> Iterator[Figure]:
    (text,) = loads.prompts(1, bench.size(400, 24), seed=3)
    scored, kinds = {}, get_args(loads.Weights)
    for weights in kinds:
        try:
            core = loads.engine(bench, "135m", 1, weights=weights, context_length=bench.size(512, 64))
        except ConfigError as error:
            yield Figure("135m: FP8 is served", False, str(error))
            return
        scored[weights] = loads.score(core, text)
        del core
        bench.free()
    bench.forget()

    def apart(one: str, other: str) -> float:
        return fmean(abs(a - b) for a, b in zip(scored[one], scored[other], strict=True))

    yield Figure("135m: FP8 is served", True)
    yield Figure("135m: as the same codes in float32", apart("fp8", "emulated"))
    yield Figure("135m: from bfloat16", apart("fp8", "published"))


def _decoded(bench: Bench, model: str, count: int, weights: loads.Weights) -> Figure:
    sequences, tokens = bench.size(count, min(count, 4)), bench.size(TOKENS, 6)
    core = loads.engine(bench, model, sequences, weights=weights)
    begins = loads.prompts(sequences, bench.size(PROMPT, 5))
    for _ in range(bench.size(2, 1)):  # the first one captures
        found = loads.sample(core, begins, tokens)
    del core
    bench.free()
    return Figure(
        f"{model}, {count}, {_words(weights)}", sequences / found.seconds, f"{found.overall:,.0f} tokens/s with prompts"
    )


def _words(weights: str) -> str:
    return "bfloat16" if weights == "published" else weights


def _lines() -> Iterator[Line]:
    yield Line(
        name="135m: FP8 is served",
        unit="check",
        formula="the products pass the trial of `engine/native/runners/fp8.py`",
    )
    yield Line(
        name="135m: as the same codes in float32",
        unit="nats",
        predicted=always(EMULATED),
        most=0.1,
        formula="mean over 400 tokens; another order of sums (assumed)",
    )
    yield Line(
        name="135m: from bfloat16",
        unit="nats",
        predicted=always(RANDOM),
        formula="2.5 times what int8 has with random weights, as with SmolLM2-135M-Instruct",
    )
    for model, count in LOADS:
        yield Line(
            name=f"{model}, {count}, bfloat16",
            predicted=decoding(model, count),
            formula=f"n / ({OVERHEAD} + roofline / 80 %)",
        )
        yield Line(
            name=f"{model}, {count}, fp8",
            predicted=_coded(model, count),
            formula="the same with a byte less for each weight of a linear layer, and four kernels of 2 µs more a layer (assumed)",
        )


ENTRY = Entry(
    name="fp8",
    about='`engine.weights = "fp8"`: tokens/s while all sequences decode, beside bfloat16; random weights, prompts of 32 tokens, 128 sampled',
    limit=180,
    lines=tuple(_lines()),
    measure=measure,
)
