"""Files that stay valid after a kill at any byte and on a full disk: lines that are appended, and files that are replaced."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from headrace.core.errors import HeadraceError

# --- Files that somebody else has named
# A pipe under such a name would be waited for without end, and a device has no end.


def open_regular(path: Path) -> BufferedReader:
    """Opens a file to read it, without waiting for a writer. Raises OSError if it cannot be opened or is not a regular file."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is not a regular file")
        return open(handle, "rb")  # noqa: PTH123
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: Path, most: int) -> bytes:
    """Returns the content of a file. Raises OSError as `open_regular`, and ValueError for more than `most` bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most} bytes")
    return content


# --- atomic files ------------------------------------------------------------


FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def full_disk_as_error(place: Path) -> Iterator[None]:
    """Turns the `OSError` of a full disk into a `HeadraceError` with a remedy. `place`: the path to name if the error has none."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise write_error(Path(error.filename or place), error) from error


class AppendFile:
    """A file that is only appended to. When a call returns, the operating system has the data: a kill of this process loses nothing."""

    def __init__(self, path: Path, whole: Callable[[Path], int] | None = None) -> None:
        """`whole` returns how many bytes of the file are valid; the rest is cut off. By default: all complete lines."""
        self.path = path
        try:
            if path.is_file():
                os.truncate(path, (whole or whole_lines)(path))
            self._file = path.open("ab", buffering=0)
            self._size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise write_error(self.path, error) from error

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    def write(self, line: bytes) -> None:
        """Appends `line` and a newline. Raises `HeadraceError`, which names the file, if the disk cannot be written."""
        self.append(line + b"\n")

    def append(self, data: bytes) -> None:
        """Appends all of the data or nothing. Raises `HeadraceError`, which names the file, if the disk cannot be written."""
        try:
            _write(self._file, data)
        except OSError as error:
            with suppress(OSError):  # else the next line would be appended to half a line
                self._file.truncate(self._size)
            raise write_error(self.path, error) from error
        self._size += len(data)

    def check(self) -> None:
        """Raises `HeadraceError` if the path now names another file, or none, or if somebody else has cut or written to it: what is written would be
        lost, or lie elsewhere than is noted."""
        try:
            there = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            there = None
        if there is None or not os.path.samestat(there, os.fstat(self._file.fileno())):
            raise HeadraceError(
                f"{self.path} was deleted, moved or replaced while it was written to. Put its directory back (if it was deleted, its "
                "contents are lost) and resume with --resume, or start the run again"
            )
        if there.st_size != self._size:
            raise HeadraceError(
                f"{self.path} has {there.st_size} bytes, and {self._size} were written to it: another program has changed it. Keep that from doing so, and "
                "resume with --resume, which says what is lost"
            )

    def flush(self) -> None:
        """Flushes to the disk, so that a loss of power loses nothing. Raises `HeadraceError` if that fails."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise write_error(self.path, error) from error

    def close(self) -> None:
        self._file.close()


@contextmanager
def replacing(path: Path, flush: bool = True) -> Iterator[Callable[[bytes], None]]:
    """Yields a function that writes. When the block ends, everything it wrote replaces `path` in one step.

    After a kill or an exception, either the old file or the new one exists, complete. `flush`: this holds after a loss of power too.
    Raises `HeadraceError`, which names the file, if the disk cannot be written."""
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
"""The suffix of a file that will replace another. Such a file that is found was left by a kill."""


def remove_parts(directory: Path) -> None:
    """Removes the unfinished files that a kill left."""
    for part in directory.glob(f".*{PART}"):
        part.unlink(missing_ok=True)


def replace_file(path: Path, data: bytes, flush: bool = True) -> None:
    """Replaces `path` by `data`, as `replacing` does."""
    with replacing(path, flush) as write:
        write(data)


_drawing = threading.Lock()


def kept_id(path: Path) -> str:
    """Returns 16 hexadecimal digits that are drawn once and kept in this file, with its place: whoever finds the file in a copy of its directory draws
    others. Threads of one process that ask at once get the same."""
    place = str(path.resolve())
    with _drawing:
        known, _, of = path.read_text(encoding="utf-8").partition("\n") if path.is_file() else ("", "", "")
        if not known or of != place:
            known = secrets.token_hex(8)
            replace_file(path, f"{known}\n{place}".encode())
    return known


def sync_to_disk(path: Path) -> None:
    """Flushes a file's data, or a directory's names, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_error(path: Path, error: OSError) -> HeadraceError:
    remedy = "Free space on that disk" if error.errno in FULL else "Make it writable"
    return HeadraceError(f"could not write {path}: {error.strerror}. {remedy}; then resume the run with --resume")


def _write(file: Any, data: bytes) -> None:
    """Writes all data to a raw file, which may accept less than it is given."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def read_lines(path: Path, start: int = 0) -> Iterator[bytes]:
    """The complete lines behind the first `start` bytes, without their newlines. A last line that a kill cut off is left out."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if line.endswith(b"\n"):
                yield line[:-1]


def whole_lines(path: Path) -> int:
    """Number of bytes up to the end of the last complete line."""
    with path.open("rb") as file:
        position, tail = file.seek(0, os.SEEK_END), b""
        while position and b"\n" not in tail:
            step = min(position, 1 << 16)
            position -= step
            file.seek(position)
            tail = file.read(step)
        return position + tail.rfind(b"\n") + 1


def keep_lines(path: Path, kept: Sequence[bool], start: int = 0) -> None:
    """Keeps the lines marked True, and moves the others (also those beyond the end of `kept`) to `*.discarded`. `kept` begins behind the first
    `start` bytes, which stay. What is before the first line that goes is neither read nor written.

    If it is killed in the middle, it can be repeated: lines go when they were written to the other file and flushed. Lines that stay and lie behind one that
    goes are written over it in one step; after a kill before the rest was cut off, they are there twice.
    """
    if not path.is_file():
        return
    moved, staying, place, cut = bytearray(), bytearray(), start, -1
    marks = iter(kept)
    for line in read_lines(path, start):
        stays = next(marks, False)
        if not stays and cut < 0:
            cut = place
        place += len(line) + 1
        if cut >= 0:
            (staying if stays else moved).extend(line + b"\n")
    if cut < 0:
        return
    discarded = AppendFile(path.with_name(path.name + ".discarded"))
    try:
        discarded.append(bytes(moved))
        discarded.flush()
    finally:
        discarded.close()
    _replace_end(path, cut, bytes(staying))


def _replace_end(path: Path, place: int, data: bytes) -> None:
    try:
        with path.open("r+b", buffering=0) as file:
            if len(data) <= AT_ONCE:
                file.seek(place)
                _write(file, data)
                file.truncate(place + len(data))
                os.fsync(file.fileno())
                return
            with replacing(path) as keep:
                while chunk := file.read(min(AT_ONCE, place - file.tell())):
                    keep(chunk)
                keep(data)
    except OSError as error:
        raise write_error(path, error) from error


AT_ONCE = 1 << 20
"""Bytes that are written in one step; more replace their file."""
