"""Deadlines for other processes and threads, in seconds in which they could run.

On a busy machine a process may be ready to run and have no core for most of a second. With a deadline by the clock it would seem to
hang. So the time in which it had to wait for a core does not count; an endless loop, a sleep and a wait for the network reach their
deadline as early as on an idle machine. Only Linux reports how long a thread waited for a core; elsewhere deadlines are by the clock.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

T = TypeVar("T")


class Waitable(Protocol):
    """A child process: `subprocess.Popen`, or one that was forked (`processes/launch/local.py`)."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout: float | None = None) -> int: ...


Waited = Callable[[int], float]

LITTLE = 1 << 18
"""Bytes that a process may read in a second without loading anything: messages, and files of its own."""


def waited_for_a_core(thread: int) -> float:
    """Returns the seconds since its start in which the thread (given a process: its main thread) was ready to run and had no core;
    0 if unknown."""
    try:
        return int(Path(f"/proc/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class Patience:
    """The rest of `seconds` for the thread `asked`, on whose answer this thread waits."""

    def __init__(
        self,
        asked: int,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        waited: Waited = waited_for_a_core,
    ) -> None:
        self._clock, self._waited = clock, waited
        self._threads = {asked, threading.get_native_id()}
        self._until = clock() + seconds
        self._before = {thread: waited(thread) for thread in self._threads}

    @property
    def left(self) -> float:
        """Seconds that are left; negative after the deadline."""
        kept = max(self._waited(thread) - self._before[thread] for thread in self._threads)
        return self._until + max(0.0, kept) - self._clock()


class Starvation:
    """Measures how long processes are ready and have no core."""

    def __init__(self, waited: Waited = waited_for_a_core) -> None:
        self._waited = waited
        self._before: dict[int, float] = {}

    def since_last(self, pids: Iterable[int]) -> float:
        """Seconds since the last call that the one of `pids` that was kept waiting the longest was kept waiting. For a process that
        the last call did not have, seconds since it was started."""
        now = {pid: self._waited(pid) for pid in pids}
        longest = max((seconds - self._before.get(pid, 0.0) for pid, seconds in now.items()), default=0.0)
        self._before = now
        return max(0.0, longest)


def bytes_read(pid: int) -> int:
    """Returns the bytes of files that a process has read since its start, those of mapped files included that came from a disk; 0 if unknown."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar:", "read_bytes:")))
    except (OSError, ValueError, IndexError):
        return 0


class Reading:
    """Notices that processes read files, as those do that load a model. Only Linux says so."""

    def __init__(self, read: Callable[[int], int] = bytes_read) -> None:
        self._read = read
        self._before: dict[int, int] = {}

    def since_last(self, pids: Iterable[int]) -> bool:
        """Whether one of `pids` has read more than `LITTLE` since the last call, which had it too."""
        now = {pid: self._read(pid) for pid in pids}
        reads = any(count - self._before.get(pid, count) > LITTLE for pid, count in now.items())
        self._before = now
        return reads


async def within(asked: int, seconds: float, answer: Awaitable[T], waited: Waited = waited_for_a_core) -> T:
    """Returns the answer. Raises TimeoutError if the thread `asked` did not give it within `seconds` in which it could run; `answer` is
    then cancelled and not awaited."""
    import asyncio  # not loaded by processes without an event loop

    task = asyncio.ensure_future(answer)
    patience = Patience(asked, seconds, asyncio.get_running_loop().time, waited)
    try:
        while not task.done():
            if (left := patience.left) <= 0:
                raise TimeoutError
            await asyncio.wait({task}, timeout=left)
        return task.result()
    finally:
        task.cancel()


def wait(process: Waitable, seconds: float) -> int:
    """Returns the exit code. Raises subprocess.TimeoutExpired as `Popen.wait` does. Blocks."""
    patience = Patience(process.pid, seconds)
    while True:
        try:
            return process.wait(max(patience.left, 0.0))
        except subprocess.TimeoutExpired:
            if patience.left <= 0:
                raise


def communicate(process: subprocess.Popen[bytes], seconds: float) -> tuple[bytes, bytes]:
    """Returns standard output and standard error of the process once it has ended. Raises subprocess.TimeoutExpired as `Popen.communicate` does. Blocks."""
    patience = Patience(process.pid, seconds)
    while True:
        try:
            return process.communicate(timeout=max(patience.left, 0.0))
        except subprocess.TimeoutExpired:
            if patience.left <= 0:
                raise
