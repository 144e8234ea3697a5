"""A file of lines to which processes of several machines append, one at a time.

Each line begins with a checksum and is flushed to the disk before the lock is released. A process that is killed while it writes leaves
half a line: the next one that writes cuts it off. A line in the middle whose checksum is wrong (a page that a loss of power took) is
left out and counted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.durable.atomic_files import AppendFile, replace_file, sync_to_disk


class NewLines(NamedTuple):
    lines: list[bytes]
    anew: bool
    """Whether they begin at the start of the file: it was replaced, or is read for the first time."""


class LineFile:
    """All methods but `locked` are called while the lock is held."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, path.with_suffix(".lock")
        self._head, self._read = b"", 0
        """The first line of the file that was read last, and the number of its bytes that were read."""
        self.damaged = 0
        """Lines that were left out."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock among all machines that share the directory (`flock`, which NFS passes on). The kernel frees the lock of a process
        that dies."""
        handle = os.open(self._lock, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def new(self) -> NewLines:
        """Returns the whole lines since the last call."""
        try:
            with self._path.open("rb") as file:
                if anew := (head := file.readline()) != self._head:
                    self._head, self._read = head, len(head)
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return NewLines([], False)
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        lines = whole.splitlines()
        sound = [line[9:] for line in lines if _checked(line[9:]) == line + b"\n"]
        self.damaged += len(lines) - len(sound)
        return NewLines(sound, anew)

    def append(self, lines: Sequence[bytes]) -> None:
        """Returns when the lines are on the disk. Raises HeadraceError."""
        is_new = not self._path.exists()
        file = AppendFile(self._path)  # cuts half a line off
        try:
            file.append((b"" if self._path.stat().st_size else _head()) + b"".join(map(_checked, lines)))
            file.flush()
        finally:
            file.close()
        if is_new:
            sync_to_disk(self._path.parent)

    def replace(self, lines: Sequence[bytes]) -> None:
        """Replaces the content of the file. Others notice by the first line."""
        replace_file(self._path, _head() + b"".join(map(_checked, lines)))

    @property
    def read(self) -> int:
        """Bytes of the file that were read."""
        return self._read


def _checked(line: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(line), line)


def _head() -> bytes:
    """A first line that no other file has: inodes are used again."""
    return b"%s\n" % secrets.token_hex(8).encode()
