"""What the report shows, read from a run's directory: facts, sampled rollouts, config."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.observe.journal import JournalStep, count_steps, read_steps
from headrace.observe.records import Sample, StepRow, read_metrics, sample_of
from headrace.observe.state import RunState
from headrace.types import Group, Row

MAX_BINS = 200
"""Points of a curve. Longer runs show means of equal runs of steps, and say so."""
SAMPLED_STEPS = 8


@dataclass(frozen=True)
class ReportData:
    run_dir: Path
    state: RunState
    samples: tuple[tuple[Sample, float, int], ...]
    """Rollout, its advantage (mean over tokens; NaN when it was not trained), its greatest lag."""
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


def load(run_dir: Path) -> ReportData:
    """Raises `HeadraceError` when a whole line of the run's files cannot be read."""
    state = RunState()
    for fact in read_metrics(run_dir):
        state.fold(fact)
    config = run_dir / "config.toml"
    return ReportData(
        run_dir,
        state,
        tuple(_samples(run_dir)),
        config.read_text() if config.exists() else "",
        tuple(bins(state.rows)),
    )


def bins(rows: Sequence[StepRow], most: int = MAX_BINS) -> list[Bin]:
    per = max(1, math.ceil(len(rows) / most))
    return [Bin(tuple(rows[i : i + per])) for i in range(0, len(rows), per)]


def _samples(run_dir: Path) -> list[tuple[Sample, float, int]]:
    """From steps spread evenly over the journal: the best and the worst rollout of one group of each."""
    count = count_steps(run_dir)
    if not count:
        return []
    wanted = min(count, SAMPLED_STEPS)
    picked = {round(i * (count - 1) / max(1, wanted - 1)) for i in range(wanted)}
    return [one for step in read_steps(run_dir, picked) for one in _two_of(step)]


def _two_of(step: JournalStep) -> list[tuple[Sample, float, int]]:
    groups = [group for group in step.groups if group.scored]
    if not groups:
        return []
    group = groups[step.step % len(groups)]
    order = sorted(range(len(group.scored)), key=lambda i: -group.scored[i].reward)
    chosen = [order[0], order[-1]] if len(order) > 1 else order
    found = []
    for index in chosen:
        sample = sample_of(step.step, group, index)
        row = _row_of(group, index)
        advantage = sum(row.advantages) / len(row.advantages) if row and row.advantages else math.nan
        found.append((sample, advantage, step.step - sample.first_version))
    return found


def _row_of(group: Group, index: int) -> Row | None:
    """The training row that ends with a rollout's last completion. Rows of single-turn rollouts have their order."""
    done = group.scored[index].episode.last
    count = len(done.tokens)
    candidates = [group.rows[index]] if len(group.rows) == len(group.scored) else list(group.rows)
    for row in candidates:
        if (row.tokens[-count:], row.logprobs[-count:]) == (done.tokens, done.logprobs):
            return row
    return None
