"""Faults of a simulated run, and a disk that has them: killed between any two of its operations, in the middle of a write, full."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from headrace.types import Struct

Kind = Literal[
    "kill", "full", "interrupt", "jump",  # controller, disk, clock
    "engine_dies", "engine_hangs", "engine_slow",
    "trainer_dies", "trainer_hangs", "trainer_slow",
    "repeat", "lose",  # a message
    "scorer_hangs",
]  # fmt: skip


class Fault(Struct, frozen=True):
    """Something goes wrong in the `life`-th process of a run."""

    kind: Kind
    life: int
    at: int
    """kill, full: operations of the disk before it. engine, trainer: turns of the worker. repeat, lose: messages. scorer: calls.
    interrupt, jump: hundredths of a second."""
    share: float = 0.0
    """In [0, 1): of a write that is torn; how long a disk is full; which message; where in its work a worker dies."""


def some_faults(rng: random.Random, size: int) -> tuple[Fault, ...]:
    """`size`: about how many operations of the disk a run has."""
    lives, found = rng.choice([0, 1, 1, 2, 3, 5]), []
    for life in range(lives):
        found.append(Fault("kill", life, _early(rng, size), rng.random()))
    kinds: list[Kind] = [
        "full", "interrupt", "jump", "engine_dies", "engine_dies", "engine_dies", "engine_hangs", "engine_slow", "trainer_dies",
        "trainer_dies", "trainer_hangs", "trainer_slow", "repeat", "repeat", "lose", "scorer_hangs",
    ]  # fmt: skip
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        kind = rng.choice(kinds)
        at = _early(rng, size if kind in ("full", "interrupt", "jump") else size // 4)
        found.append(Fault(kind, rng.randint(0, lives), at, rng.random()))
    if rng.random() < 0.1:  # two checkpoints of one step, perhaps
        found += [Fault("interrupt", life, _early(rng, 300)) for life in (0, 1)]
    return tuple(found)


def _early(rng: random.Random, size: int) -> int:
    """Half of them anywhere, half of them soon."""
    return int(rng.randrange(size) * (1.0 if rng.random() < 0.5 else rng.random() ** 3))


class Killed(SystemExit):
    """kill -9 of the controller: asyncio lets it through, nobody catches it."""


class Disk:
    """What one process does to the files under `root`, one operation after the other.

    A kill changes nothing on the disk but what is written behind it: whoever tries all operations has tried all kills."""

    def __init__(self, root: Path, faults: Sequence[Fault] = (), kill: Callable[[], None] | None = None) -> None:
        """`kill`: what to do at the fault of this name; raise `Killed` if not given."""
        self.root, self.operations = str(root), 0
        self.dead = self.was_full = False
        self._kill_at = min(((one.at, one.share) for one in faults if one.kind == "kill"), default=(-1, 0.0))
        self._full = [(one.at, one.at + 1 + int(one.share * 6)) for one in faults if one.kind == "full"]
        self._kill = kill or self._die

    def operation(self, data: Any = b"", write: Callable[[Any], Any] | None = None) -> None:
        """Something is about to be done; `data` would be written by `write`. Raises what happens instead."""
        if self.dead:
            raise Killed
        number, self.operations = self.operations, self.operations + 1
        if number == self._kill_at[0]:
            if write:
                write(data[: int(len(data) * self._kill_at[1])])
            self._kill()
        if any(first <= number < last for first, last in self._full):
            self.was_full = True
            if write:
                write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _die(self) -> None:
        self.dead = True
        raise Killed

    def owns(self, path: Any) -> bool:
        """A name alone is one inside a directory that is removed."""
        name = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        return name.startswith(self.root) or not name.startswith("/")

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        """Its root, as a path that appends through it."""
        global _mounted
        _listen()
        before, _mounted = _mounted, self
        try:
            yield _Root(self.root)
        finally:
            _mounted = before


_mounted: Disk | None = None
_listening = False


def _listen() -> None:
    """Python tells its audit hooks of every file that is opened, renamed or removed, before it is; a hook cannot be removed."""
    global _listening
    if not _listening:
        _listening = True
        sys.addaudithook(_heard)


_CHANGES = frozenset(("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"))


def _heard(event: str, args: tuple[Any, ...]) -> None:
    disk = _mounted
    if disk is None or (event != "open" and event not in _CHANGES):
        return
    if event == "open" and not _writes(args[1], args[2]):
        return
    if disk.owns(args[0]):
        disk.operation()


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return not mode.startswith("r") or "+" in mode
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


class _Root(type(Path())):  # type: ignore[misc]
    """A path whose files append through the disk that is mounted."""

    def open(self, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        file = super().open(mode, buffering, *args, **kwargs)
        return _Appending(file, _mounted) if mode in ("ab", "wb") and buffering == 0 and _mounted else file


class _Appending:
    """The raw file that an `AppendFile`, or what replaces a file, writes to."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> int:
        if self._disk.dead:
            return len(data)
        self._disk.operation(data, self._file.write)
        return self._file.write(data)

    def truncate(self, size: int) -> None:
        if not self._disk.dead:
            self._file.truncate(size)

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> _Appending:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
