"""A run that is read while it is written: its state, its numbers by step and its groups, from `metrics.jsonl` alone."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from headrace.observe.board.group_table import GroupTable
from headrace.observe.board.saved_numbers import Numbers, read_saved, save
from headrace.observe.board.step_columns import MINUTES, TOKENS, StepColumns
from headrace.observe.facts import GroupEnded
from headrace.observe.health.live_status import Follower
from headrace.observe.records import METRICS, MetricsFact, StepRow
from headrace.observe.sinks.scalars import scalars

AT_ONCE = 2 << 20
"""Bytes that are read before others get their turn."""
WORTH_SAVING = 32 << 20
"""Bytes of a file whose numbers are saved; a smaller one is read within a second or two."""


class FollowedRun(Follower):
    """Reads a run and what is added to it. Its numbers come from the last visit, where they were saved, until the file has been read up
    to there again. Several threads may ask."""

    def __init__(self, run_dir: Path, saves: Path | None = None) -> None:
        """`saves`: the directory of saved numbers."""
        self._saves, self._lock = saves, threading.RLock()
        self._saved: Numbers | None = read_saved(saves, run_dir) if saves else None
        super().__init__(run_dir)

    def _restart(self, inode: int) -> None:
        if getattr(self, "_offset", 0):  # the file was cut or replaced: what was saved of it is no longer so
            self._saved = None
        super()._restart(inode)
        self._own = Numbers(StepColumns(), GroupTable())
        self._tokens = 0

    @property
    def numbers(self) -> Numbers:
        """The newest numbers that are known."""
        if self._saved and self._saved.size > self._offset:
            return self._saved
        return self._own

    @property
    def size(self) -> int:
        try:
            return (self.run_dir / METRICS).stat().st_size
        except OSError:
            return 0

    @property
    def unread(self) -> int:
        """Bytes whose facts are not in `state` yet."""
        return self.size - self._offset

    @property
    def read_share(self) -> float:
        """The share of the file whose facts are in `state`, 0 to 1."""
        return self._offset / self.size if self._offset < self.size else 1.0

    @property
    def version(self) -> int:
        """A number that changes when the numbers do."""
        return max(self._offset, self.numbers.size)

    def catch_up(self, seconds: float) -> bool:
        """Reads for about `seconds`. Returns whether there is more."""
        end = time.monotonic() + seconds
        with self._lock:
            more = True
            while more and time.monotonic() < end:
                more = self.read(AT_ONCE)
            if not more and self._saves and self._offset > WORTH_SAVING and self._offset > self._known_size:
                self._own.size = self._offset
                save(self._saves, self.run_dir, self._own)
        return more

    @property
    def _known_size(self) -> int:
        """Bytes from which it is worth saving anew: a tenth more than is saved."""
        return int(1.1 * max(self._own.size, self._saved.size if self._saved else 0))

    def _take(self, fact: MetricsFact) -> None:
        super()._take(fact)
        step, values = scalars(fact, self.state)
        if isinstance(fact, GroupEnded):
            self._own.groups.end(fact)
        elif isinstance(fact, StepRow):
            self._tokens += fact.report.loss_tokens
            values |= {MINUTES: fact.t / 60, TOKENS: float(self._tokens)}
            self._own.groups.train(fact.tickets, fact.report.step + 1)
        if values:
            self._own.columns.add(step, values)
