"""Everything that curves and sample browser need to know of a run, counted from its facts."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.facts.facts import GroupEnded
from headrace.facts.index.group_table import GroupTable
from headrace.facts.index.step_columns import MINUTES, TOKENS, StepColumns
from headrace.facts.numbers.state import RunState
from headrace.facts.records import MetricsFact, StepRow
from headrace.facts.scalars import scalars


class Numbers:
    def __init__(self) -> None:
        self.columns, self.groups = StepColumns(), GroupTable()
        self.size = 0
        """Bytes of `metrics.jsonl` that they were counted from; set by whoever reads or writes that file."""
        self._tokens = 0

    def go_on(self) -> None:
        """Prepares numbers that were read from an index for further facts."""
        self._tokens = int(self.columns.last(TOKENS) or 0)

    def begin_at(self, size: int, state: RunState, groups: int, reasons: Sequence[str]) -> None:
        """Prepares empty numbers for the facts behind `size` bytes, without those before. `state` counts the facts before; `groups`: rows of the
        groups until then; `reasons`: of their outcomes."""
        self.size, self._tokens = size, state.totals.tokens
        self.groups.begin_at(groups, reasons, state.fates.ready.values())

    def take(self, fact: MetricsFact, state: RunState) -> None:
        """Counts a fact. `state` already includes it."""
        step, values = scalars(fact, state)
        if isinstance(fact, GroupEnded):
            self.groups.end(fact)
        elif isinstance(fact, StepRow):
            self._tokens += fact.report.loss_tokens
            values |= {MINUTES: fact.t / 60, TOKENS: float(self._tokens)}
            self.groups.train(fact.tickets, fact.report.step + 1)
        if values:
            self.columns.add(step, values)
