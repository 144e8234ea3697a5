"""The facts of some steps of a long run, read from their place in `metrics.jsonl`."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO, NamedTuple

from headrace.facts.facts import RunStarted
from headrace.facts.records import METRICS, MetricsFact, decode_metrics
from headrace.facts.run_state import RunState

MOST = 6 << 20
"""Bytes of facts that are read for one window."""
NEAR = 1 << 16
"""Bytes within which a place is looked for line by line."""
_STEP = re.compile(rb'\{"fact":"StepTrained","t":[^,]+,"report":\{"step":(\d+)')
_KIND = re.compile(rb'\{"fact":"(\w+)"')
OF_POOLS = (
    b"StepTrained",
    b"EngineSample",
    b"WeightsLive",
    b"Evaluated",
    b"CheckpointSaved",
    b"WorkerLost",
    b"Slept",
    b"Woke",
)
"""Facts from which the chart of the pools is drawn."""


class FactsRead(NamedTuple):
    """The facts from the end of the step before the first to the end of the last."""

    facts: list[MetricsFact]
    last: int
    """The last step whose fact was read."""
    cut: bool
    """Whether the last steps that were asked for are left out, because there would be too much to read."""
    whole: bool
    """Whether the file ends with them."""


class StepWindow(NamedTuple):
    """Some steps, counted from 1, both ends included."""

    state: RunState
    """The facts from the end of the step before the first to the end of the last."""
    first: int
    last: int
    cut: bool
    """Whether the last steps that were asked for are left out, because there would be too much to read."""


def read_window(
    run_dir: Path,
    started: RunStarted | None,
    first: int,
    last: int,
    *,
    kinds: Collection[bytes] = (),
    most: int = MOST,
) -> StepWindow:
    """Reads the facts of steps `first` to `last`. `started`: the facts' run. `kinds`: the facts that are wanted; all by default. Raises
    OSError if the file cannot be read."""
    read = read_facts(run_dir, first, last, kinds=kinds, most=most)
    state = RunState()
    state.started = started
    for fact in read.facts:
        state.fold(fact)
    return StepWindow(state, first, read.last, read.cut)


def read_facts(run_dir: Path, first: int, last: int, *, kinds: Collection[bytes] = (), most: int = MOST) -> FactsRead:
    """Reads as `read_window` does."""
    facts: list[MetricsFact] = []
    done, size, whole = first - 1, 0, True
    with (run_dir / METRICS).open("rb") as file:
        file.seek(place_after(file, first - 1))
        for line in file:
            kind = _KIND.match(line)
            size += len(line)
            if not line.endswith(b"\n"):
                break
            if size > most:
                whole = False
                break
            if kind and (not kinds or kind[1] in kinds) and (fact := decode_metrics(line[:-1])):
                facts.append(fact)
            if step := _STEP.match(line):
                done = int(step[1]) + 1
                if done >= last:
                    whole = False
                    break
    return FactsRead(facts, done, done < last and size > most, whole)


def place_after(file: BinaryIO, step: int) -> int:
    """Returns the place behind the fact of a step, counted from 1; 0 if there is none before. Steps rise along the file, so their places
    are found by halving it."""
    low, high = 0, file.seek(0, 2)
    while high - low > NEAR:
        middle = (low + high) // 2
        found = _next_step(file, middle, high)
        if found is None or found[0] > step:
            high = middle
        else:
            low = found[1]
    while (found := _next_step(file, low, high + NEAR)) and found[0] <= step:
        low = found[1]
    return low


def _next_step(file: BinaryIO, start: int, end: int) -> tuple[int, int] | None:
    """Returns the number of the first step whose fact begins in a line behind `start`, and the place behind it; None if there is none
    before `end`."""
    file.seek(start - 1 if start else 0)
    if start:
        file.readline()  # the rest of a line
    place = file.tell()
    for line in file:
        if place >= end:
            return None
        place += len(line)
        if step := _STEP.match(line):
            return int(step[1]) + 1, place
    return None
