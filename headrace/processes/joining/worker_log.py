"""The words of a worker elsewhere, as they arrive from its witness."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from headrace.processes.joining.greeting import WordsSaid

KEPT, TAIL = 8 << 20, 1 << 14
"""Bytes of one worker that are written as they come, and that are kept of the rest: its last ones."""

LINES, LONGEST = 3, 300
"""Limits of what is repeated of them when the worker is lost: lines, characters."""


class WorkerLog:
    """Writes the log of one worker behind those of the seat's earlier ones. Words that come before `begin` are kept until then."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._next = self._written = 0
        """The place of the next byte among all the worker's, and the bytes of the log."""
        self._early: list[bytes] = []
        self._tail = self._recent = b""
        """The end of what it has said, and of what it has said since its last sign of life."""
        self._left_out = 0
        self.ended = asyncio.Event()
        """Set when the worker's process has ended, and its last words are here."""

    def begin(self, file: Path, title: str) -> None:
        self._file = file
        self._append([f"--- {title} ---\n".encode(), *self._early])
        self._early.clear()

    def take(self, words: WordsSaid) -> None:
        """Repeated words are ignored. Missing ones are counted in the log: the witness had no room for them."""
        if words.at + len(words.data) > self._next:
            new = words.data[max(0, self._next - words.at) :]
            if missing := max(0, words.at - self._next):
                self._put(f"\n--- {missing} bytes were cut here: the run did not take them in time ---\n".encode())
            self._next = words.at + len(words.data)
            self._put(new)
        if words.over and not self.ended.is_set():
            self._end()
            self.ended.set()

    def lives(self) -> None:
        """Notes a sign of life: the worker has not ended of what it said before."""
        self._recent = b""

    def _end(self) -> None:
        """Writes the last words of a log that has become too long."""
        if self._file is None or not self._left_out:
            return
        tail = self._tail[-self._left_out :]
        note = f"\n--- {self._left_out - len(tail)} bytes were left out here: a log has at most {KEPT >> 20} MiB ---\n"
        self._append([note.encode(), tail])
        self._left_out = 0

    @property
    def last_lines(self) -> str:
        """Returns the end of what the worker said itself since its last sign of life, on one line; without headrace's own notes."""
        lines = self._recent.decode(errors="replace").splitlines()
        own = [line.strip() for line in lines if line.strip() and not line.startswith("headrace: ")]
        return " | ".join(own[-LINES:])[-LONGEST:]

    def _put(self, data: bytes) -> None:
        self._tail, self._recent = (self._tail + data)[-TAIL:], (self._recent + data)[-TAIL:]
        room = max(0, KEPT - self._written)
        self._written += len(data[:room])
        self._left_out += len(data) - len(data[:room])
        if self._file is None:
            self._early.append(data[:room])
        else:
            self._append([data[:room]])

    def _append(self, pieces: Sequence[bytes]) -> None:
        assert self._file is not None
        with contextlib.suppress(OSError), self._file.open("ab") as file:  # a full disk must not end the run
            file.write(b"".join(pieces))
