"""The data of the report, read from a run's directory: facts, some rollouts, config."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from headrace.durable.journal import Damage, JournalStep, count_steps, read_steps
from headrace.facts.facts import Evaluated, GroupEnded, Warned
from headrace.facts.group_numbers import NO_CONTRAST, Tally
from headrace.facts.health import Standing
from headrace.facts.index_file import INDEX, IndexReader
from headrace.facts.kept_settings import resolved_config, settings_by_step
from headrace.facts.number_tables import Numbers, StepColumns
from headrace.facts.records import METRICS, MetricsFact, StepRow, read_metrics
from headrace.facts.rollout_view import Pieces, RolloutView, trimmed_below, view_rollout
from headrace.facts.run_state import RunState
from headrace.facts.run_totals import Window

MAX_BINS = 200
"""Points of a curve at most. Curves of longer runs show means over several steps, and a note says so."""
SAMPLED_STEPS = 8
"""Steps of which rollouts are shown."""


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """Everything that the page needs."""

    run_dir: Path
    state: RunState
    samples: tuple[RolloutView, ...]
    config: str
    bins: tuple[Bin, ...]
    rewards: tuple[float, ...] = ()
    """The smallest and the largest reward of a rollout."""
    columns: StepColumns | None = None
    """Its numbers by step."""
    groups: np.ndarray | None = None
    """Rows of the numbers of its groups (`number_tables.ROW`), by ticket."""
    standing: Standing | None = None
    """The state of its process; None where only the files are known."""

    @property
    def range_of_rewards(self) -> tuple[float, float]:
        """Smallest and largest reward of rollouts and held-out prompts; no band and no axis extends beyond them."""
        means = [evaluation.reward_mean for evaluation in self.state.evals if math.isfinite(evaluation.reward_mean)]
        seen = [*self.rewards, *means]
        return (min(seen), max(seen)) if seen else (-math.inf, math.inf)


class Ended(Tally):
    """The groups whose generation and scoring ended between one step and the next, trained or not."""

    completions: int = 0
    tokens: int = 0

    def end(self, fact: GroupEnded, first: bool) -> None:
        """Counts the end of a group. `first`: whether it is the group's first outcome; a ready group may still be dropped."""
        if first:
            self.add(fact)
            self.completions += len(fact.lengths)
            self.tokens += sum(fact.lengths)
        else:
            self.no_contrast += fact.reason == NO_CONTRAST
            self.dropped += fact.outcome == "dropped" and fact.reason != NO_CONTRAST

    @staticmethod
    def join(parts: Sequence[Ended]) -> Ended:
        total = Ended()
        for part in parts:
            for name in part.__struct_fields__:
                setattr(total, name, getattr(total, name) + getattr(part, name))
        return total


@dataclass(frozen=True)
class Bin:
    """One or several neighbouring steps."""

    rows: tuple[StepRow, ...]
    ended: Ended = field(default_factory=Ended)
    """Groups that ended since the step before the first one of these."""
    began: tuple[float, ...] = ()
    """The time at which each row began: the end of the step before, or the resumption of training, in the seconds of `row.t`."""

    @property
    def x(self) -> float:
        """Steps done after this step; the middle of several steps."""
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

    @property
    def spans(self) -> list[tuple[float, float]]:
        """Start and end of each step, in seconds."""
        return [(start, row.t) for start, row in zip(self.began, self.rows, strict=True)]

    def mean(self, value: Callable[[StepRow], float]) -> float:
        """Returns the mean over the steps whose value is finite."""
        finite = [number for row in self.rows if math.isfinite(number := value(row))]
        return sum(finite) / len(finite) if finite else math.nan

    def most(self, value: Callable[[StepRow], float]) -> float:
        return max((number for row in self.rows if math.isfinite(number := value(row))), default=math.nan)

    def lags(self) -> dict[int, int]:
        total: dict[int, int] = {}
        for row in self.rows:
            for lag, count in row.lags.items():
                total[lag] = total.get(lag, 0) + count
        return total


def load(
    run_dir: Path, pieces: Pieces | None = None, standing: Standing | None = None, until: int | None = None
) -> ReportData:
    """Reads a run. `pieces`: returns tokens as text. `standing`: the state of its process. `until`: the number of optimizer steps after which nothing
    counts; None: all does. Unreadable parts of the files are left out, with a warning."""
    state, ended, numbers, index = RunState(), [Ended()], Numbers(), IndexReader(run_dir / INDEX, run_dir)
    index.catch_up()
    indexed = (
        until is None and (run_dir / METRICS).is_file() and index.numbers.size == (run_dir / METRICS).stat().st_size
    )
    seen: list[float] = []
    facts = read_metrics(run_dir)
    for fact in facts if until is None else _until(facts, until):
        if isinstance(fact, GroupEnded):
            ended[-1].end(fact, fact.ticket not in state.tickets.ready)
            seen += [reward for reward in fact.rewards if math.isfinite(reward)]
            seen = [min(seen), max(seen)] if seen else []
        elif isinstance(fact, StepRow):
            ended.append(Ended())
        state.fold(fact)
        if not indexed:
            numbers.take(fact, state)
    damage, known = Damage(), index.numbers if indexed else numbers
    samples = tuple(sampled(run_dir, pieces, damage))
    if damage:
        state.fold(Warned(state.now, f"of the journal cannot be read: {damage}"))
    return ReportData(
        run_dir=run_dir,
        state=state,
        samples=samples,
        config=resolved_config(run_dir),
        bins=tuple(bins(state, ended)),
        rewards=tuple(seen),
        columns=known.columns,
        groups=known.groups.rows.view,
        standing=standing,
    )


def _until(facts: Iterable[MetricsFact], step: int) -> Iterator[MetricsFact]:
    """Yields what a run that ended after `step` optimizer steps would have recorded. An evaluation may be there after later steps."""
    later = False
    for fact in facts:
        later = later or (isinstance(fact, StepRow) and fact.report.version > step)
        if not later or (isinstance(fact, Evaluated) and fact.step <= step):
            yield fact


def bins(state: RunState, ended: Sequence[Ended] = (), most: int = MAX_BINS) -> list[Bin]:
    """Returns the bins of a run. `ended`: the groups that ended before each row of the state."""
    rows = state.rows if state.whole else state.spread
    per = max(1, math.ceil(len(rows) / most))
    began = [_began(state.windows, rows, place) for place in range(len(rows))]
    return [
        Bin(tuple(rows[i : i + per]), Ended.join(ended[i : i + per]), tuple(began[i : i + per]))
        for i in range(0, len(rows), per)
    ]


def _began(windows: Sequence[Window], rows: Sequence[StepRow], place: int) -> float:
    row = rows[place]
    opened = max((start for start, _ in windows if start <= row.t), default=0.0)
    return max(opened, rows[place - 1].t) if place else opened


def sampled(run_dir: Path, pieces: Pieces | None = None, damage: Damage | None = None) -> list[RolloutView]:
    """Returns the best and the worst rollout of one group, for each of some steps that are spread evenly over the journal."""
    count = count_steps(run_dir)
    if not count:
        return []
    settings = settings_by_step(run_dir)
    wanted = min(count, SAMPLED_STEPS)
    picked = {round(i * (count - 1) / max(1, wanted - 1)) for i in range(wanted)}
    return [
        view
        for step in read_steps(run_dir, picked, damage)
        for view in _two_of(step, pieces, trimmed_below(settings(step.step), step.step))
    ]


def _two_of(step: JournalStep, pieces: Pieces | None, oldest: int | None) -> list[RolloutView]:
    groups = [group for group in step.groups if group.scored]
    if not groups:
        return []
    group = groups[step.step % len(groups)]
    order = sorted(range(len(group.scored)), key=lambda i: -group.scored[i].reward)
    return [
        view_rollout(step, group, index, pieces=pieces, oldest=oldest) for index in dict.fromkeys((order[0], order[-1]))
    ]
