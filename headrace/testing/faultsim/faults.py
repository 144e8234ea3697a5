"""The faults of a simulated run, and a disk that has them: it is killed between any two operations or in the middle of a write, is full,
loses power, or changes a byte that was written. The event loop here ends with its disk."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import random
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from headrace.core.types import Struct
from headrace.durable.segments import read_segment, segments_of
from headrace.loop.world.virtual_time import VirtualTimeLoop

Kind = Literal[
    "kill", "power", "full", "interrupt", "jump",  # controller, machine, disk, clock
    "kill_at_removal",  # the controller, while it removes files
    "unsaved",  # a checkpoint, because of a quota, say
    "rot", "change",  # while nothing runs: on the disk, of the settings
    "engine_dies", "engine_lost", "engine_hangs", "engine_slow",
    "trainer_dies", "trainer_hangs", "trainer_slow",
    "repeat", "lose",  # a message
    "scorer_hangs", "service_fails",
]  # fmt: skip


class Fault(Struct, frozen=True):
    """One fault in the `life`-th process of a run."""

    kind: Kind
    life: int
    at: int
    """kill, power, full: operations of the disk before it. kill_at_removal: files that have been removed before it. engine, trainer: turns of the
    worker. repeat, lose: messages. scorer: calls. service: requests. interrupt, jump, engine_lost (for good): hundredths of a second. unsaved:
    checkpoints. rot, change: none, they come before the life."""
    share: float = 0.0
    """A number in [0, 1) that sets the details of the fault: the part of a torn write that is written; the part of each file that
    a loss of power takes; how long a disk is full; which message; which engine is lost; where in its work a worker dies; which file rots; how a service fails."""


def some_faults(rng: random.Random, size: int) -> tuple[Fault, ...]:
    """Draws faults. `size`: approximate number of disk operations of a run."""
    lives, found = rng.choice([0, 1, 1, 2, 3, 5]), []
    for life in range(lives):
        found.append(Fault("kill" if rng.random() < 0.6 else "power", life, _early(rng, size), rng.random()))
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
    for life in range(1, lives + 1):
        if rng.random() < 0.2:
            found.append(Fault(rng.choice(["rot", "rot", "change"]), life, 0, rng.random()))
    if rng.random() < 0.2:
        found.append(Fault("unsaved", rng.randint(0, lives), rng.randint(0, 2)))
    if rng.random() < 0.3:
        found.append(Fault("engine_lost", rng.randint(0, lives), _early(rng, 3000)))
    if rng.random() < 0.15:  # what a loss of power left is met again after the next kill
        found += [Fault("power", 0, _early(rng, size // 2), rng.random()), Fault("kill", 1, _early(rng, size))]
    return tuple(found)


def kill_at_a_removal(rng: random.Random, lives: int) -> Fault:
    """Draws a kill that meets the few operations in which a checkpoint is removed. `lives`: of the other kills."""
    return Fault("kill_at_removal", rng.randint(0, lives), rng.randrange(12))


def every_engine_lost(rng: random.Random, lives: int, engines: int) -> Iterator[Fault]:
    """Draws the loss of all engines of a life, one soon after the other, which chance brings together too seldom."""
    life, first = rng.randint(0, lives), rng.randrange(400)
    for number in range(engines):
        yield Fault("engine_lost", life, first + rng.randrange(40), number / engines)


def faults_of_service(rng: random.Random, lives: int, size: int) -> tuple[Fault, ...]:
    """Draws faults of single requests. `size`: approximate number of requests of a run."""
    return tuple(Fault("service_fails", rng.randrange(lives), rng.randrange(size), rng.random()) for _ in range(4))


def _early(rng: random.Random, size: int) -> int:
    """Draws a position: half of them anywhere, half of them early."""
    return int(rng.randrange(size) * (1.0 if rng.random() < 0.5 else rng.random() ** 3))


class Killed(SystemExit):
    """kill -9 of the controller: asyncio passes it on, and no code catches it."""


class Disk:
    """The operations of one process on the files under `root`, one after the other.

    A kill changes nothing on the disk except that later writes are missing, so trying all operations tries all kills."""

    def __init__(self, root: Path, faults: Sequence[Fault] = (), kill: Callable[[], None] | None = None) -> None:
        """`kill`: called at the fault of this name; by default it raises `Killed`."""
        self.root, self.operations = str(root), 0
        self.dead = self.was_full = False
        self._kill_at_removal = {fault.at for fault in faults if fault.kind == "kill_at_removal"}
        self._removals = 0
        self._kill_at = min(
            ((fault.at, fault.share, fault.kind) for fault in faults if fault.kind in ("kill", "power")),
            default=(-1, 0.0, "kill"),
        )
        self._flushed: dict[int, int] = {}
        """Bytes that survive a loss of power, by inode. All that an earlier process wrote has reached the disk by now."""
        self.lost_power = False
        self._full = [(fault.at, fault.at + 1 + int(fault.share * 6)) for fault in faults if fault.kind == "full"]
        self._unsaved = {fault.at for fault in faults if fault.kind == "unsaved"}
        self._checkpoints = 0
        self._kill = kill or self._die

    def operation(self, data: Any = b"", write: Callable[[Any], Any] | None = None) -> None:
        """Precedes every operation, in which `write` would write `data`. Raises the fault that happens instead, if any."""
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

    def removal(self) -> None:
        """Precedes every removal of a file."""
        number, self._removals = self._removals, self._removals + 1
        if number in self._kill_at_removal:
            self._kill()

    def checkpoint(self) -> None:
        """Precedes the start of every checkpoint."""
        number, self._checkpoints = self._checkpoints, self._checkpoints + 1
        if number in self._unsaved:
            self.was_full = True
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    def _die(self) -> None:
        self.dead = True
        self.lost_power = self._kill_at[2] == "power"
        raise Killed

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in sorted(Path(self.root).rglob("*")):
            if path.is_file():
                yield path, path.stat()

    def lose(self) -> None:
        """Removes unflushed data if the power was lost: of each file all, nothing or a part. Called when nothing is mounted."""
        for path, known in self._files() if self.lost_power else ():
            rng = random.Random(f"{self._kill_at[1]}/{path.name}")
            flushed = min(self._flushed.get(known.st_ino, 0), known.st_size)
            kept = rng.choice([0.0, 1.0, rng.random()])
            if (size := flushed + int((known.st_size - flushed) * kept)) < known.st_size:
                os.truncate(path, size)

    def _fsync(self, fd: int) -> None:
        if not self.dead:
            known = os.fstat(fd)
            self._flushed[known.st_ino] = known.st_size

    def owns(self, path: Any) -> bool:
        """Returns whether the path is on this disk. A relative name is one inside a directory that is being removed."""
        name = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        return name.startswith(self.root) or not name.startswith("/")

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        """Yields the root as a path whose files append through this disk."""
        global _mounted
        _listen()
        before, _mounted = _mounted, self
        self._flushed = {known.st_ino: known.st_size for _, known in self._files()}
        fsync, os.fsync = os.fsync, self._fsync  # type: ignore[assignment]
        try:
            yield _Root(self.root)
        finally:
            _mounted, os.fsync = before, fsync


_mounted: Disk | None = None
_listening = False


def _listen() -> None:
    """Installs the audit hook once. Python calls it before every file is opened, renamed or removed; a hook cannot be removed."""
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
        if event == "os.remove":
            disk.removal()
        if event == "os.mkdir" and ".writing-" in os.fsdecode(args[0]):
            disk.checkpoint()


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return not mode.startswith("r") or "+" in mode
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


class _Root(type(Path())):  # type: ignore[misc]
    """A path whose files append through the mounted disk."""

    def open(self, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        if not _mounted or not (mode == "ab" or (mode == "wb" and buffering == 0)):
            return super().open(mode, buffering, *args, **kwargs)
        raw = _Appending(super().open(mode, 0), _mounted)
        return raw if buffering == 0 else io.BufferedWriter(raw)


class _Appending(io.RawIOBase):
    """The raw file that `AppendFile` and `replace_file` write to."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self._disk.dead:
            return len(data)
        self._disk.operation(data, self._file.write)
        written: int = self._file.write(data)
        return written

    def truncate(self, size: int | None = None) -> int:
        return 0 if self._disk.dead else self._file.truncate(size)

    def fileno(self) -> int:
        number: int = self._file.fileno()
        return number

    def close(self) -> None:
        self._file.close()
        super().close()


def rot(directory: Path, share: float) -> None:
    """Changes one byte of a checkpoint, while nothing runs."""
    files = sorted(path for path in directory.iterdir() if path.name != "files.json")
    _spoil(file := files[int(share * len(files))], file.stat().st_size // 2)


def rot_journal(directory: Path, share: float, first: int) -> bool:
    """Changes one byte of a run's journal after its first records. Returns whether there is such a record."""
    frames = [
        (path, frame.place)
        for path in segments_of(directory)
        for frame in read_segment(path).frames
        if frame.place.number >= first
    ]
    if not frames:
        return False
    place = share * len(frames)
    path, chosen = frames[int(place)]
    _spoil(path, chosen.offset + int(place % 1 * chosen.length))  # in its head, or in its body
    return True


def _spoil(path: Path, at: int) -> None:
    """Changes a digit to the next digit, which only a checksum can detect, and any other byte to its neighbour. Doing so twice at one
    place is no repair: a run may rot between two lives that both end before they begin."""
    data = bytearray(path.read_bytes())
    digit = data[at] - ord("0")
    data[at] = ord("0") + (digit + 1) % 10 if 0 <= digit <= 9 else (data[at] + 1) % 256
    path.write_bytes(data)


ENDLESS = 40_000
"""Turns of the loop in one life at most. Without a bug a life takes a tenth of that."""


class _Loop(VirtualTimeLoop):
    def __init__(self, disk: Disk) -> None:
        super().__init__()
        self._disk, self._turns = disk, 0

    def _run_once(self) -> None:
        if self._disk.dead:  # otherwise a task group would still clean up
            raise Killed
        self._turns += 1
        assert self._turns < ENDLESS, "C6: the loop turns and turns, and nothing comes of it"
        super()._run_once()  # type: ignore[misc]


def until_done(main: Coroutine[Any, Any, None], disk: Disk) -> None:
    """Runs like `virtual_time.run`, but a kill leaves everything as it is: nothing is cancelled or closed."""
    loop = _Loop(disk)
    lost: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: lost.append(context))
    task = loop.create_task(main)
    try:
        loop.run_until_complete(task)
    finally:
        forget(loop)
    assert not lost, f"C6: nobody heard of {lost[0]}"


def forget(loop: VirtualTimeLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        for _ in range(3):  # a task that awaits in its clean-up does not end at the first close
            with contextlib.suppress(BaseException):
                task.get_coro().close()
    loop.close()
