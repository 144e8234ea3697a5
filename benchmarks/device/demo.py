"""Whole runs: the demo with engine and trainer on one GPU, in turns, over `cuda_ipc` and under kills; and the bits of `cuda_ipc` between two processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.device import ipc, runs
from benchmarks.device.entry import Entry, Figure, Line
from benchmarks.device.loads import Bench
from benchmarks.device.predictions import always
from benchmarks.device.runs import STEPS, Case

AT_ONCE = 3

CASES = (
    Case(name="in turns", sets=("orchestration.placement=shared",), formula="six steps"),
    Case(
        name="cuda_ipc, optimizer on the host",
        sets=("weight_sync.kind=cuda_ipc", "train.offload_optimizer=true"),
        formula="six steps",
        gpu=True,
    ),
    Case(
        name="cuda_ipc, engine killed",
        sets=("weight_sync.kind=cuda_ipc",),
        formula="six steps, the engine killed at the third: another opens the trainer's memory",
        gpu=True,
        kills="engine",
    ),
    Case(
        name="killed and resumed, bfloat16 weights",
        sets=("train.weights=bfloat16", "train.dtype=bfloat16", "checkpoint.every=2"),
        formula="six steps, all killed at the third, the rest after `--resume`",
        kills="run",
    ),
    Case(name="LoRA 16", sets=("lora.rank=16",), formula="six steps", package="peft"),
)


def measure(bench: Bench) -> Iterator[Figure]:
    found = ipc.exchange(bench.device, bench.tiny)
    yield Figure("cuda_ipc: equal bit for bit, a flipped bit refused", found.refused)
    yield Figure("cuda_ipc: 273 MB copied", found.copied)
    yield Figure("cuda_ipc: 273 MB verified", found.verified)
    recipe, words = runs.recipe(bench)
    yield from _whole(bench, recipe, words)
    with ThreadPoolExecutor(bench.size(AT_ONCE, 1)) as pool:
        waiting = {case.name: pool.submit(runs.checked, bench, recipe, case) for case in CASES}
        for name, checked in waiting.items():
            passed, note = checked.result()
            yield Figure(name, passed, note)


def _whole(bench: Bench, recipe: Path, words: str) -> Iterator[Figure]:
    began = time.perf_counter()
    run = runs.start(bench, recipe, "whole", runs.sets(bench, bench.size(STEPS, 3)))
    code, said = runs.ended(bench, run, "whole")
    seconds, steps = time.perf_counter() - began, runs.steps(bench, "whole")
    yield Figure(
        "the demo: 40 steps, from the command to its end", seconds if code == 0 else None, note=said if code else words
    )
    yield Figure(
        "the demo: reward of its last five steps",
        sum(row.reward_drawn for row in steps[-5:]) / max(1, len(steps[-5:])),
        note=words,
    )
    yield Figure("the demo", code == 0 and len(steps) == bench.size(STEPS, 3), note=said if code else "")


SEEN = "as on the H100 of November"
ENTRY = Entry(
    name="demo",
    about="whole runs of the demo's recipe on one GPU, and `cuda_ipc` between two processes",
    limit=180,
    lines=(
        Line(name="cuda_ipc: equal bit for bit, a flipped bit refused", unit="check", formula=SEEN),
        Line(name="cuda_ipc: 273 MB copied", unit="ms", predicted=always(1.1), formula=SEEN),
        Line(name="cuda_ipc: 273 MB verified", unit="ms", predicted=always(85.0), formula=SEEN),
        Line(
            name="the demo: 40 steps, from the command to its end",
            unit="s",
            predicted=always(86 * STEPS / 52 + 10),
            formula="86 s for about 52 steps in November, and 10 s for the last evaluation (assumed)",
        ),
        Line(
            name="the demo: reward of its last five steps",
            unit="of 1",
            predicted=always(0.9),
            formula="0.93 from step 48 in November",
        ),
        Line(name="the demo", unit="check", formula="it ends by itself with all its steps"),
        *(Line(name=case.name, unit="check", formula=case.formula) for case in CASES),
    ),
    measure=measure,
)
