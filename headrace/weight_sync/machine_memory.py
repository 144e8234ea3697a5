"""One copy of new weights for all processes of a machine that load the same ones: the workers of a vLLM with several GPUs.

    each worker      holds a lock while it looks into the book, and fetches what is not there yet into memory that the others map
    the book         a small file: which process has the memory open under which number, and the versions in its two slots
    a slot's lock    held by every worker that reads the slot, until it is told of a further version

The kernel gives the locks of a killed process back. What it was fetching has no fingerprint in the book, and the next worker fetches it again. The
memory itself has no name and goes with the last process that maps it. A worker never waits for one that still reads: it makes memory anew, and
that which is read stays. Every worker compares the fingerprint of what it is given, whoever has fetched it.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import xxhash

from headrace.core.printing import echo
from headrace.core.weights import WeightUpdate
from headrace.weight_sync.fetching import RelayingReceiver
from headrace.weight_sync.slots import Manifests, anonymous_memory

if TYPE_CHECKING:
    import torch

R = TypeVar("R", bound=RelayingReceiver)

PATIENCE = 600.0
"""Seconds for which a worker waits for another one that fetches. Then it fetches for itself."""
LOOK = 0.02
"""Seconds between two looks whether a lock is free."""
LONGEST = 1 << 16
"""Bytes of a book."""
OLD = 7 * 24 * 3600
"""Seconds without a version after which a book counts as left behind by workers that were killed."""


class _Book(msgspec.Struct):
    process: int
    fd: int
    inode: int
    """The number of the memory's file: numbers of processes are used again."""
    marks: list[str]
    """Fingerprints of what the slots hold; empty while one is filled."""
    newest: int


class MachineMemory:
    """The place where workers of this user on this machine meet. Workers in other containers, or where the place is not this user's, share nothing."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or Path(tempfile.gettempdir()) / f"headrace-weights-{os.geteuid()}"

    def shared(self, receiver: R, what: str) -> R | SharingReceiver:
        """Returns a receiver of the same weights, whose memory is shared. `what`: known to those alone that load the same (a token is in it)."""
        with suppress(OSError):
            self._directory.mkdir(mode=0o700, exist_ok=True)
            found = self._directory.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
                for book in self._directory.iterdir():
                    if not book.suffix and book.stat().st_mtime < time.time() - OLD:
                        _delete(book)
                return SharingReceiver(receiver, self._directory / xxhash.xxh3_128_hexdigest(what))
        return receiver


class SharingReceiver:
    """Protocol `WeightReceiver`. The tensors of an update can be read until the next one is received."""

    def __init__(self, receiver: RelayingReceiver, place: Path) -> None:
        """`place`: the path of the book, and the beginning of those of locks. Raises OSError if it cannot be written."""
        self._receiver, self._place = receiver, place
        self._book = _opened(place)
        self._slots = [_opened(place.with_suffix(f".{number}")) for number in range(2)]

    @property
    def received(self) -> int:
        """Bytes that this process has fetched."""
        return self._receiver.received

    @property
    def manifests(self) -> Manifests:
        return self._receiver.manifests

    def receive(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        """Raises IdentityError if the bytes cannot be had, or are not those that were published."""
        for lock in self._slots:
            fcntl.flock(lock, fcntl.LOCK_UN)
        with self._alone() as alone:
            if not alone:
                echo(
                    f"version {update.version} is fetched by this worker for itself: another one has been fetching for {PATIENCE:.0f} s",
                    err=True,
                )
                self._receiver.go_on(anonymous_memory(), ["", ""], 0)
                return self._receiver.receive(update)
            self._go_on()
            if update.fingerprint not in self._receiver.held.marks:
                return self._fetched(update)
            fcntl.flock(self._slots[self._receiver.held.marks.index(update.fingerprint)], fcntl.LOCK_SH)
        return self._receiver.receive(update)  # compares only, beside the other workers

    def close(self) -> None:
        """Deletes the files, unless another worker fetches now. A worker that comes later makes them anew."""
        with suppress(OSError):
            fcntl.flock(self._book, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _delete(self._place)
        for file in (self._book, *self._slots):
            os.close(file)
        self._receiver.close()

    def _fetched(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        slot = self._slots[self._receiver.held.free]
        try:
            fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a worker still reads it: it keeps that memory
            self._receiver.go_on(anonymous_memory(), ["", ""], 0)
            slot = self._slots[self._receiver.held.free]
        self._write(self._receiver.held.free)
        try:
            return self._receiver.receive(update)
        finally:
            self._write()
            fcntl.flock(slot, fcntl.LOCK_SH)

    def _go_on(self) -> None:
        """Goes on with the memory of the book, if there is any."""
        try:
            book = msgspec.json.decode(os.pread(self._book, LONGEST, 0), type=_Book)
        except ValueError:  # nothing is in it, or a worker was killed while it wrote it
            return
        fd, own = self._receiver.memory, os.fstat(self._receiver.memory)
        if own.st_ino != book.inode:
            try:
                fd = os.open(f"/proc/{book.process}/fd/{book.fd}", os.O_RDWR | os.O_CLOEXEC)
            except OSError:  # that process has ended, or this one may not look into it
                return
            found = os.fstat(fd)
            if (found.st_ino, found.st_dev, found.st_size) != (book.inode, own.st_dev, own.st_size):
                os.close(fd)
                return
        self._receiver.go_on(fd, book.marks, book.newest)

    def _write(self, fills: int | None = None) -> None:
        """Writes what this process has into the book. `fills`: the slot that it writes to."""
        held = self._receiver.held
        marks = ["" if number == fills else mark for number, mark in enumerate(held.marks)]
        memory = self._receiver.memory
        book = msgspec.json.encode(_Book(os.getpid(), memory, os.fstat(memory).st_ino, marks, held.newest))
        os.ftruncate(self._book, 0)
        os.pwrite(self._book, book, 0)

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """The context in which no other worker looks into the book; not so (False) if one has done nothing else for PATIENCE."""
        deadline, alone = time.monotonic() + PATIENCE, False
        while not alone and time.monotonic() < deadline:
            with suppress(BlockingIOError):
                fcntl.flock(self._book, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            if not alone:
                time.sleep(LOOK)
        try:
            yield alone
        finally:
            if alone:
                fcntl.flock(self._book, fcntl.LOCK_UN)


def _delete(book: Path) -> None:
    """Whoever has these files open goes on with them, and those that come later make others: they share nothing, and harm nothing."""
    for path in book.parent.glob(f"{book.name}*"):
        path.unlink(missing_ok=True)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
