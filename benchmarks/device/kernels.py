"""Where the time goes: the kernels of a decoding pass and of a step, and how long the GPU waits between them, by torch's profiler.

Of decoding and training the load is profiled that came out worst on this card (the smallest share of the peak among the results that are kept), or where there are none the first
of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.device import loads, training
from benchmarks.device.entry import Entry, Figure, Line, Result, all_results
from benchmarks.device.loads import Bench
from benchmarks.device.predictions import always

GRAPH = 1.7 / 3.53
"""Share of a pass of 64 sequences in which the replayed graph ran on the H100 of November."""
PASS_KERNELS, STEP_KERNELS = 30 * 25 + 20, 5 * 30 * 250
"""Thirty layers of 25 kernels, and sampling; five microbatches of thirty layers, forward and backward (assumed)."""
SHOWN = 8


def measure(bench: Bench) -> Iterator[Figure]:
    model, count = _worst(bench, "decode", "sequences", ("135m", 64))
    core = loads.engine(bench, model, bench.size(count, 2), context_length=bench.size(512, 64))
    begins = loads.prompts(bench.size(count, 2), bench.size(32, 5))
    loads.sample(core, begins, bench.size(64, 4))
    with profile(activities=_activities(bench)) as traced:
        loads.sample(core, begins, bench.size(24, 4))
    passes = bench.size(24, 4)
    yield from _told("decoding", f"{model}, {count:,}", bench, traced, passes)
    del core
    bench.forget()
    load = next(load for load in training.LOADS if load.name == _worst_load(bench))
    learner = loads.trainer(
        bench, load.model, microbatch_tokens=training.MICROBATCH.get(load.model, loads.TRAIN["microbatch_tokens"])
    )
    shape = {"groups": load.groups, "rollouts": load.rollouts, "prompt": load.prompt, "tokens": load.tokens}
    loads.train(bench, learner, steps=2, **shape)
    with profile(activities=_activities(bench)) as traced:
        loads.train(bench, learner, steps=1, **shape)
    yield from _told("training", load.name, bench, traced, 1)


def _mine(bench: Bench, entry: str) -> list[Result]:
    return [result for result in all_results() if result.entry == entry and bench.chip and result.chip == bench.chip]


def _worst(bench: Bench, entry: str, what: str, otherwise: tuple[str, Any]) -> tuple[str, Any]:
    found = [
        (figure.share, figure.rates["model"], figure.rates[what])
        for result in _mine(bench, entry)[-1:]
        for figure in result.figures
        if figure.share is not None and figure.rates
    ]
    return min(found)[1:] if found else otherwise  # type: ignore[return-value]


def _worst_load(bench: Bench) -> str:
    found = [
        (figure.share, figure.name)
        for result in _mine(bench, "training")[-1:]
        for figure in result.figures
        if figure.share is not None
    ]
    return min(found)[1] if found else training.LOADS[1].name


def _activities(bench: Bench) -> list[ProfilerActivity]:
    return [ProfilerActivity.CUDA] if bench.device == "cuda" else [ProfilerActivity.CPU]


def _told(what: str, load: str, bench: Bench, traced: Any, times: int) -> Iterator[Figure]:
    kind = DeviceType.CUDA if bench.device == "cuda" else DeviceType.CPU
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in traced.events()
        if event.device_type == kind
    )
    assert spans, "the profiler has seen no kernel"
    busy, ends, longest = 0.0, spans[0][0], 0.0
    for start, end, _ in spans:
        longest = max(longest, start - ends) if busy else 0.0
        busy += max(0.0, end - max(start, ends))
        ends = max(ends, end)
    whole = ends - spans[0][0]
    by_name = Counter[str]()
    for start, end, name in spans:
        by_name[name] += end - start
    total = sum(by_name.values())
    table = "; ".join(
        f"{name[:60]} {micro / 1e3 / times:.2f} ms ({micro / total:.0%})" for name, micro in by_name.most_common(SHOWN)
    )
    yield Figure(
        f"{what}: the GPU works",
        busy / whole,
        note=f"{load}; {whole / 1e3 / times:.2f} ms each, longest wait {longest / 1e3:.2f} ms",
    )
    yield Figure(f"{what}: kernels", len(spans) / times, note=table)


ENTRY = Entry(
    name="kernels",
    about="share of the time in which a kernel runs, and how many run, in a pass and in a step; the worst loads of the entries before",
    limit=120,
    lines=(
        Line(name="decoding: the GPU works", unit="of 1", predicted=always(GRAPH), formula="1.7 ms of a replayed graph in a pass of 3.5 ms, in November"),
        Line(name="decoding: kernels", unit="a pass", predicted=always(PASS_KERNELS), formula="30 layers × 25, and sampling"),
        Line(name="training: the GPU works", unit="of 1", predicted=always(0.8), formula="an assumption"),
        Line(name="training: kernels", unit="a step", predicted=always(STEP_KERNELS), formula="5 microbatches × 30 layers × 250 (assumed)"),
    ),
    measure=measure,
)  # fmt: skip
