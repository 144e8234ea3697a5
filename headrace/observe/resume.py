"""One continuous history: what a killed run wrote after the checkpoint that it is resumed from is set aside."""

from __future__ import annotations

from itertools import repeat
from pathlib import Path

from headrace.observe.facts import CheckpointSaved
from headrace.observe.files import keep_lines
from headrace.observe.records import JOURNAL, METRICS, MetricsFact, StepRow, read_metrics


def rewind(run_dir: Path, step: int) -> list[MetricsFact]:
    """Cuts metrics and journal back to the checkpoint of `step` and returns the facts that stay.

    What was cut is kept beside them as `*.discarded`. With `step = 0` and no checkpoint the run starts over: all is cut.
    """
    facts = read_metrics(run_dir)
    kept = kept_of(facts, step)
    keep_lines(run_dir / METRICS, kept)
    stay = [fact for fact, keep in zip(facts, kept, strict=True) if keep]
    # One journal line per StepTrained line, in the same order; the journal is written first, so it may hold one more.
    keep_lines(run_dir / JOURNAL, repeat(True, sum(isinstance(fact, StepRow) for fact in stay)))
    return stay


def kept_of(facts: list[MetricsFact], step: int) -> list[bool]:
    """Which facts belong to the history before the checkpoint of `step`.

    A checkpoint's content is the state at its beginning (`t - seconds`); generation went on while it was written, and
    those tickets are drawn again. A kill between the checkpoint and its fact leaves no such line: then everything before
    the first later step stays.
    """
    saved = [
        index
        for index, fact in enumerate(facts)
        if isinstance(fact, CheckpointSaved) and fact.step == step and not fact.error
    ]
    if saved:
        at = facts[saved[-1]]
        assert isinstance(at, CheckpointSaved)
        snapshot = at.t - at.seconds
        return [i == saved[-1] or (i < saved[-1] and fact.t <= snapshot) for i, fact in enumerate(facts)]
    if step == 0:
        return [False] * len(facts)
    later = (i for i, fact in enumerate(facts) if isinstance(fact, StepRow) and fact.report.step >= step)
    end = next(later, len(facts))
    return [i < end for i in range(len(facts))]
