"""What the report shows, read from a run's directory: facts, sampled rollouts, config."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.observe.journal import JournalStep, count_steps, read_steps
from headrace.observe.looks import Look, Pieces, look, settings_of, trimmed_below
from headrace.observe.records import StepRow, read_metrics
from headrace.observe.state import RunState

MAX_BINS = 200
"""Points of a curve. Longer runs show means of equal runs of steps, and say so."""
SAMPLED_STEPS = 8


@dataclass(frozen=True)
class ReportData:
    run_dir: Path
    state: RunState
    samples: tuple[Look, ...]
    config: str
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class Bin:
    """One or several neighbouring steps."""

    rows: tuple[StepRow, ...]

    @property
    def x(self) -> float:
        """Steps done after it; the middle of several."""
        return (self.first + self.last) / 2

    @property
    def first(self) -> int:
        return self.rows[0].report.step + 1

    @property
    def last(self) -> int:
        return self.rows[-1].report.step + 1

    @property
    def name(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"

    def mean(self, value: Callable[[StepRow], float]) -> float:
        """Over the steps whose value is finite."""
        finite = [one for row in self.rows if math.isfinite(one := value(row))]
        return sum(finite) / len(finite) if finite else math.nan

    def most(self, value: Callable[[StepRow], float]) -> float:
        return max((one for row in self.rows if math.isfinite(one := value(row))), default=math.nan)

    def lags(self) -> dict[int, int]:
        total: dict[int, int] = {}
        for row in self.rows:
            for lag, count in row.lags.items():
                total[lag] = total.get(lag, 0) + count
        return total


def load(run_dir: Path, pieces: Pieces | None = None) -> ReportData:
    """`pieces`: tokens as text. Raises `HeadraceError` when a whole line of the run's files cannot be read."""
    state = RunState()
    for fact in read_metrics(run_dir):
        state.fold(fact)
    config = run_dir / "config.toml"
    return ReportData(
        run_dir,
        state,
        tuple(sampled(run_dir, pieces)),
        config.read_text() if config.exists() else "",
        tuple(bins(state.rows)),
    )


def bins(rows: Sequence[StepRow], most: int = MAX_BINS) -> list[Bin]:
    per = max(1, math.ceil(len(rows) / most))
    return [Bin(tuple(rows[i : i + per])) for i in range(0, len(rows), per)]


def sampled(run_dir: Path, pieces: Pieces | None = None) -> list[Look]:
    """From steps spread evenly over the journal: the best and the worst rollout of one group of each."""
    count = count_steps(run_dir)
    if not count:
        return []
    settings = settings_of(run_dir)
    wanted = min(count, SAMPLED_STEPS)
    picked = {round(i * (count - 1) / max(1, wanted - 1)) for i in range(wanted)}
    return [
        one for step in read_steps(run_dir, picked) for one in _two_of(step, pieces, trimmed_below(settings, step.step))
    ]


def _two_of(step: JournalStep, pieces: Pieces | None, oldest: int | None) -> list[Look]:
    groups = [group for group in step.groups if group.scored]
    if not groups:
        return []
    group = groups[step.step % len(groups)]
    order = sorted(range(len(group.scored)), key=lambda i: -group.scored[i].reward)
    return [look(step, group, index, pieces, oldest) for index in dict.fromkeys((order[0], order[-1]))]
