"""One continuous history: a resumed run goes on with that of the process before, or with the part before a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.observe.facts import CheckpointSaved
from headrace.observe.files import keep_lines
from headrace.observe.records import METRICS, MetricsFact, StepRow, read_metrics


@dataclass(frozen=True)
class Resume:
    step: int
    """Optimizer steps that are done: of the checkpoint, and of the journal behind it where the run goes on with that."""
    rewinds: bool = False
    """What came after the checkpoint is set aside: the settings have changed, or the journal is damaged."""


def rewind(run_dir: Path, step: int) -> None:
    """Cuts the metrics back to the checkpoint of `step`; what was cut is kept beside them as `*.discarded`.

    With `step = 0` and no checkpoint the run starts over: all is cut.
    """
    keep_lines(run_dir / METRICS, kept_of(read_metrics(run_dir), step))


def kept_of(facts: list[MetricsFact], step: int) -> list[bool]:
    """Which facts belong to the history before the checkpoint of `step`.

    A checkpoint's content is the state at its beginning (`t - seconds`); generation went on while it was written. A kill
    between the checkpoint and its fact leaves no such line: then everything before the first later step stays.
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
