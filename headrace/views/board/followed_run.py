"""A run that is read while it is written: its state, its numbers by step and its groups, from `metrics.jsonl` alone."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from headrace.facts.index_file import DIGEST, INDEX, IndexReader, digest_of, read_digest, save, saved_at, write_digest
from headrace.facts.number_tables import Numbers
from headrace.facts.records import METRICS, MetricsFact
from headrace.processes.health.live_status import Follower, end_before

AT_ONCE = 2 << 20
"""Bytes that are read before others get their turn."""
SHORT = 8 << 20
"""Bytes of facts that are read rather than taken from a digest: all that a chart can show of them is then there."""
WORTH_SAVING = 32 << 20
"""Bytes of a file whose numbers are saved; a smaller one is read within a second or two."""


class FollowedRun(Follower):
    """Reads a run and what is added to it. What a long run's files say at their place is not read: its numbers and its sums come from the
    index and the digest that the run writes, or from those that were saved at the last visit. Several threads may ask."""

    def __init__(self, run_dir: Path, saves: Path | None = None) -> None:
        """`saves`: the directory of the indexes of runs that wrote none."""
        self._saved_at, self._lock = saved_at(saves, run_dir) if saves else None, threading.RLock()
        places = [(run_dir / INDEX, run_dir / DIGEST)]
        places += [(self._saved_at, self._saved_at.with_suffix(".digest"))] if self._saved_at else []
        self._indexes = [(IndexReader(index, run_dir), digest) for index, digest in places]
        self._indexed = 0
        super().__init__(run_dir)
        self._read_indexes()

    def _restart(self) -> None:
        if getattr(self, "_offset", 0):  # the file was cut or replaced
            for index, _ in self._indexes:
                index.restart()
        super()._restart()
        self._own, self._begun = Numbers(), False

    def _read_indexes(self) -> None:
        for index, digest in self._indexes:
            if self.unread > SHORT:
                self._begin_at(index, digest)
            if self.unread > (SHORT if self._begun else 0):
                index.catch_up()
                self._indexed = max(self._indexed, index.numbers.size)
            elif index.numbers.size:
                index.restart()  # frees its memory

    def _begin_at(self, index: IndexReader, path: Path) -> None:
        """Goes on from a digest, and from the numbers of the index up to its place."""
        digest = read_digest(path, self.run_dir)
        if digest is None or digest.size <= self._offset:
            return
        index.catch_up(until=digest.size)
        if index.numbers.size != digest.size:
            return
        with (self.run_dir / METRICS).open("rb") as file:
            self._seen = end_before(file, digest.size)
        self.state, self._offset, self._lines = digest.state, digest.size, digest.lines
        self._own, self._indexed = index.numbers, max(self._indexed, digest.size)
        self._own.go_on()
        self._unreadable, self._begun = [], True
        index.restart()

    @property
    def numbers(self) -> Numbers:
        """The newest numbers that are known."""
        return max((self._own, *(index.numbers for index, _ in self._indexes)), key=lambda one: one.size)

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
                self._own.size = self._offset
            if not more and self._saved_at and self._offset > max(WORTH_SAVING, 1.1 * self._indexed):
                self._indexed = self._offset
                save(self._saved_at, self.run_dir, self._own)
                saved = self._saved_at.with_suffix(".digest")
                write_digest(saved, digest_of(self.run_dir, self.state, self._own, lines=self._lines))
            self._read_indexes()
        return more

    def _take(self, fact: MetricsFact) -> None:
        super()._take(fact)
        self._own.take(fact, self.state)
