"""Files that survive a kill at any byte and a full disk: those of lines that are only appended to, and those that are replaced."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def full_disk_as_error(place: Path) -> Iterator[None]:
    """Whatever a full disk ends ends with a sentence: `HeadraceError` instead of `OSError`. `place`: where it wrote to, in case the
    error does not know."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise write_error(Path(error.filename or place), error) from error


class AppendFile:
    """What is appended is in the operating system's hands when a call returns: a kill of this process loses none."""

    def __init__(self, path: Path, whole: Callable[[Path], int] | None = None) -> None:
        """`whole`: how many bytes of the file are whole, what is behind them is cut off; of lines if not given."""
        self.path = path
        try:
            if path.is_file():
                os.truncate(path, (whole or whole_lines)(path))
            self._file = path.open("ab", buffering=0)
            self._size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise write_error(self.path, error) from error

    def write(self, line: bytes) -> None:
        """Appends `line` and a newline. Raises `HeadraceError` naming the file when the disk does not take it."""
        self.append(line + b"\n")

    def append(self, data: bytes) -> None:
        """All of it or nothing. Raises `HeadraceError` naming the file when the disk does not take it."""
        try:
            _write(self._file, data)
        except OSError as error:
            with suppress(OSError):  # half a line must not glue itself to the next one
                self._file.truncate(self._size)
            raise write_error(self.path, error) from error
        self._size += len(data)

    def check(self) -> None:
        """Raises `HeadraceError` where the file is no more what goes by its name: what is written to it is lost with it."""
        try:
            there = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            there = None
        if there is None or not os.path.samestat(there, os.fstat(self._file.fileno())):
            raise HeadraceError(
                f"{self.path} was deleted, moved or replaced while it was written to. Put its directory back (what was written "
                "until then is lost where it was deleted), and go on with --resume, or start the run again"
            )

    def flush(self) -> None:
        """What was appended is on the disk: a loss of power does not lose it. Raises `HeadraceError` where it is not."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise write_error(self.path, error) from error

    def close(self) -> None:
        self._file.close()


@contextmanager
def replacing(path: Path, flush: bool = True) -> Iterator[Callable[[bytes], None]]:
    """Gives a function that writes; what it wrote takes the place of `path` at once, when the block ends.

    Killed anywhere, and whatever is raised, the old file or the new one is there, and whole. `flush`: so it is after a loss of
    power. Raises `HeadraceError` naming the file when the disk does not take it."""
    part = path.with_name(f".{path.name}{PART}")
    try:
        with part.open("wb", buffering=0) as file:
            yield lambda data: _write(file, data)
            if flush:
                os.fsync(file.fileno())
        os.replace(part, path)
        if flush:
            sync_to_disk(path.parent)
    except BaseException as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise write_error(path, error) from error
        raise


PART = ".part"
"""End of the name of a file that is to replace another one. One that is found was left by a kill."""


def remove_parts(directory: Path) -> None:
    """Those that a kill left in it."""
    for part in directory.glob(f".*{PART}"):
        part.unlink(missing_ok=True)


def replace_file(path: Path, data: bytes, flush: bool = True) -> None:
    """As `replacing`, all at once."""
    with replacing(path, flush) as write:
        write(data)


def sync_to_disk(path: Path) -> None:
    """What a file holds, or which names there are in a directory, outlives a loss of power from here on."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_error(path: Path, error: OSError) -> HeadraceError:
    remedy = "Make room on that disk" if error.errno in FULL else "See that it can be written"
    return HeadraceError(f"could not write {path}: {error.strerror}. {remedy}; a run goes on with --resume")


def _write(file: Any, data: bytes) -> None:
    """`file`: a raw one, which may take less than it is given."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def read_lines(path: Path) -> Iterator[bytes]:
    """Complete lines without their newline; a last line without one was torn by a kill and is left out."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line[:-1]


def whole_lines(path: Path) -> int:
    """Bytes up to the end of the last complete line."""
    with path.open("rb") as file:
        position, tail = file.seek(0, os.SEEK_END), b""
        while position and b"\n" not in tail:
            step = min(position, 1 << 16)
            position -= step
            file.seek(position)
            tail = file.read(step)
        return position + tail.rfind(b"\n") + 1


def keep_lines(path: Path, kept: Iterable[bool]) -> None:
    """Keeps the lines marked True, in order, and moves the others (those past the end of `kept` too) to `*.discarded`.

    Killed in the middle, it can be done again: the file is replaced at once, and only after the others are safe.
    """
    if not path.is_file():
        return
    marks = iter(kept)
    discarded = AppendFile(path.with_name(path.name + ".discarded"))
    try:
        with replacing(path) as keep:
            for chosen, lines in groupby(read_lines(path), lambda _: next(marks, False)):
                for chunk in _chunks(lines):
                    (keep if chosen else discarded.append)(chunk)
            discarded.flush()
    finally:
        discarded.close()


def _chunks(lines: Iterable[bytes]) -> Iterator[bytes]:
    """With their newlines again, many in one write."""
    chunk = bytearray()
    for line in lines:
        chunk += line + b"\n"
        if len(chunk) > 1 << 20:
            yield bytes(chunk)
            chunk.clear()
    yield bytes(chunk)
