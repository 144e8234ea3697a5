"""What `auto` measures before a run on a GPU: rates of a piece of 135m by sequences, tokens of a pass and of a microbatch, scaled to the whole model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.device.entry import Entry, Figure, Line
from benchmarks.device.loads import Bench
from benchmarks.device.predictions import TRAINED, always, decoding, trained
from headrace.run.auto.gpu_probe import CONTEXT, measure_gpu
from headrace.run.auto.gpu_rates import GpuRequest

TINY: dict[str, Any] = {"rows": (2, 3), "passes": (9,), "microbatches": (22,), "compile": False, "path": "fused"}
LARGER = 16_384
"""Tokens of a microbatch that was never measured eagerly: as fast as one of 2,048 if a token takes what it took then (an assumption)."""


def measure(bench: Bench) -> Iterator[Figure]:
    config = json.loads((bench.model("135m") / "config.json").read_text(encoding="utf-8"))
    request = GpuRequest(config=config, **(TINY if bench.tiny else {}))
    found = measure_gpu(request, torch.device(bench.device))
    whole = all(map(len, (found.rows, found.passes, found.microbatches))) and bool(found.compiled or bench.tiny)
    yield Figure("sizes are measured", whole and not found.problem, note=found.problem or found.words)
    yield Figure("seconds of the measurement", found.seconds)
    for name, rates, size, rehearsed in (
        ("64 sequences", found.rows, 64, 2),
        ("microbatches of 2,048", found.microbatches, 2048, 22),
        ("microbatches of 16,384", found.microbatches, LARGER, 22),
    ):
        yield Figure(name, rates.get(bench.size(size, rehearsed)), note="no room")


ENTRY = Entry(
    name="sizes",
    about="what `auto` measures before a run: a piece of 135m in sizes of work, scaled to the whole model; tokens/s",
    limit=180,
    lines=(
        Line(
            name="sizes are measured",
            unit="check",
            formula="sequences, passes, microbatches and compiled layers have rates (`run/auto/gpu_probe.py`)",
        ),
        Line(name="seconds of the measurement", unit="s", predicted=always(90), formula="one minute for compiled layers, half of one for the rest (assumed)"),
        Line(
            name="64 sequences",
            predicted=decoding("135m", 64, context=CONTEXT),
            formula="as for *135m, 1* of decoding, with 480 tokens in each cache; draws are not in it, and the head is",
        ),
        Line(name="microbatches of 2,048", predicted=trained("135m", 558), formula=TRAINED),
        Line(name="microbatches of 16,384", predicted=trained("135m", 558), formula=f"{TRAINED}: no faster than small ones (assumed)"),
    ),
    measure=measure,
)  # fmt: skip
