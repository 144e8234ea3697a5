"""How a run writes its index and its digest: a block whenever its metrics have grown by a MiB, and one at its end."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from headrace.durable.atomic_files import AppendFile
from headrace.errors import HeadraceError
from headrace.observe.facts import GroupEnded
from headrace.observe.index.digest import DIGEST, write_digest
from headrace.observe.index.index_file import INDEX, block_of, framed, header
from headrace.observe.index.numbers import Numbers
from headrace.observe.numbers.state import RunState
from headrace.observe.records import METRICS, MetricsFact, StepRow

EVERY = 1 << 20
"""Bytes of metrics for a block. Of a long run the board lacks at most these until it has read the metrics itself."""


SHARE = 8
"""Bytes of metrics for each byte of a digest, at least; it is written anew each time."""


class NumbersIndex:
    """A sink. Each process of a run begins the file anew, because a resume may have cut the metrics."""

    def __init__(self, run_dir: Path, every: int = EVERY) -> None:
        self._run_dir, self._every = run_dir, every
        self._numbers = Numbers()
        self._written: dict[str, int] = {}
        self._changed: set[int] = set()
        self._file: AppendFile | None = None
        self._failed = self._stepped = False
        self._state: RunState | None = None
        self._lines = self._digested = self._digest_bytes = 0

    def recall(self, fact: MetricsFact, state: RunState) -> None:
        """Takes a fact of an earlier process of the run."""
        self._numbers.take(fact, state)
        self._state, self._lines = state, self._lines + 1
        if isinstance(fact, GroupEnded):
            self._changed.add(fact.ticket)
        elif isinstance(fact, StepRow):
            self._changed.update(fact.tickets)

    def record(self, fact: MetricsFact, state: RunState) -> None:
        self.recall(fact, state)
        if isinstance(fact, StepRow):
            self._stepped = True
            if self._size() - self._numbers.size >= self._every:
                self._write()

    def close(self) -> None:
        if self._stepped:  # a resume that was refused leaves every file as it was
            self._write(last=True)
        if self._file:
            self._file.close()

    def _size(self) -> int:
        try:
            return (self._run_dir / METRICS).stat().st_size
        except OSError:
            return 0

    def _write(self, last: bool = False) -> None:
        """Appends a block. A disk that is full costs the board's speed, never the run: the file ends with its last whole block."""
        size = self._size()
        if self._failed or size <= self._numbers.size:
            return
        self._failed = True
        with suppress(OSError, HeadraceError):
            if self._file is None:
                (self._run_dir / INDEX).unlink(missing_ok=True)
                self._file = AppendFile(self._run_dir / INDEX, whole=lambda path: 0)
                self._file.append(header())
            self._numbers.size = size
            self._file.append(framed(block_of(self._run_dir, self._numbers, self._written, self._changed)))
            self._written = {name: len(values) for name, (_, values) in self._numbers.columns.items()}
            self._changed.clear()
            self._failed = False
            self._digest(size, last)

    def _digest(self, size: int, last: bool) -> None:
        """Writes the digest after its block, so that the index always has the block up to which a digest counts."""
        assert self._state is not None
        if last or size - self._digested >= SHARE * self._digest_bytes:
            path = self._run_dir / DIGEST
            self._digest_bytes = write_digest(path, self._run_dir, self._state, size=size, lines=self._lines)
            self._digested = size
