"""How a run writes its index and its digest: a block whenever its metrics have grown by a MiB, and one at its end."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.durable.atomic_files import AppendFile
from headrace.facts.facts import GroupEnded
from headrace.facts.index.digest import DIGEST, Digest, digest_of, write_digest
from headrace.facts.index.index_file import INDEX, become_another, block_of, framed, has_block, header
from headrace.facts.index.numbers import Numbers
from headrace.facts.numbers.state import RunState
from headrace.facts.records import METRICS, MetricsFact, StepRow

EVERY = 1 << 20
"""Bytes of metrics for a block. Of a long run the board lacks at most these until it has read the metrics itself."""


SHARE = 8
"""Bytes of metrics for each byte of a digest, at least; it is written anew each time."""


class NumbersIndex:
    """A sink. A process of a run goes on behind the block up to which it knows the numbers of the one before, or begins the file anew: a resume may
    have cut the metrics."""

    def __init__(self, run_dir: Path, every: int = EVERY) -> None:
        self._run_dir, self._every = run_dir, every
        self._numbers = Numbers()
        self._written: dict[str, int] = {}
        self._changed: set[int] = set()
        self._file: AppendFile | None = None
        self._failed = self._stepped = False
        self._state: RunState | None = None
        self._lines = self._digested = self._digest_bytes = 0
        self._block = (0, 0)
        """Start and end of the last block."""

    def go_on(self, digest: Digest) -> bool:
        """Goes on from the numbers that an earlier process wrote. Returns whether they are there."""
        if not has_block(self._run_dir / INDEX, digest.block, digest.size, digest.mark):
            return False
        self._block, self._lines, self._state = digest.block, digest.lines, digest.state
        self._numbers.begin_at(digest.size, digest.state, digest.groups, digest.reasons)
        return True

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

    def digest(self) -> bytes:
        """Writes a block of what is new, and returns a digest of all facts so far; empty if the disk cannot be written."""
        self._write()
        return b"" if self._failed or self._numbers.size != self._size() else self._sums()

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
        """Appends a block. A disk that is full costs the speed of the board and of the next resume, never the run: the file ends with its last whole
        block."""
        size = self._size()
        if self._failed or size <= self._numbers.size:
            return
        self._failed = True
        with suppress(OSError, HeadraceError):
            self._file = self._file or self._opened(self._run_dir / INDEX)
            self._numbers.size, start = size, self._file.size
            self._file.append(framed(block_of(self._run_dir, self._numbers, self._written, self._changed)))
            self._block = start, self._file.size
            self._written = {name: len(values) for name, (_, values) in self._numbers.columns.items()}
            self._changed.clear()
            self._failed = False
            self._digest(size, last)

    def _opened(self, path: Path) -> AppendFile:
        _, end = self._block
        if not end:
            path.unlink(missing_ok=True)
        elif path.stat().st_size > end:
            become_another(path)  # it loses blocks
        file = AppendFile(path, whole=lambda path: end)
        if not end:
            file.append(header())
        return file

    def _digest(self, size: int, last: bool) -> None:
        """Writes the digest after its block, so that the index always has the block up to which a digest counts."""
        if last or size - self._digested >= SHARE * self._digest_bytes:
            data = self._sums()
            write_digest(self._run_dir / DIGEST, data)
            self._digested, self._digest_bytes = size, len(data)

    def _sums(self) -> bytes:
        assert self._state is not None
        return digest_of(self._run_dir, self._state, self._numbers, lines=self._lines, block=self._block)
