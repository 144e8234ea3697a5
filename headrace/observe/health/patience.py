"""Deadlines of what other processes and threads do, in seconds in which they could run.

On a busy machine most of a second may pass while a process is ready to run and has no core. A deadline by the clock then says "it
hangs" of what is only kept waiting. So the time that it had to wait for a core does not count; an endless loop, a sleep and a wait
for the network end at the same age as on a quiet machine. How long a thread was kept waiting is known on Linux alone; elsewhere
deadlines are by the clock.
"""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Waited = Callable[[int], float]


def waited_for_a_core(thread: int) -> float:
    """Seconds since its start in which the thread (a process: its main thread) was ready to run and did not. 0 where unknown."""
    try:
        return int(Path(f"/proc/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class Patience:
    """Seconds that are left of `seconds` for the thread `asked`, to which this thread listens."""

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
        kept = max(self._waited(thread) - self._before[thread] for thread in self._threads)
        return self._until + max(0.0, kept) - self._clock()


class Starvation:
    """How long processes are ready and have no core."""

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


async def within(asked: int, seconds: float, answer: Awaitable[T], waited: Waited = waited_for_a_core) -> T:
    """The answer. Raises TimeoutError where the thread `asked` did not give it within `seconds` in which it could run; `answer` is
    then cancelled and not waited for."""
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


def wait(process: subprocess.Popen[Any], seconds: float) -> int:
    """The exit code. Raises subprocess.TimeoutExpired as `Popen.wait` does. Blocks."""
    patience = Patience(process.pid, seconds)
    while True:
        try:
            return process.wait(max(patience.left, 0.0))
        except subprocess.TimeoutExpired:
            if patience.left <= 0:
                raise


def communicate(process: subprocess.Popen[bytes], seconds: float) -> tuple[bytes, bytes]:
    """What it wrote, once it has ended. Raises subprocess.TimeoutExpired as `Popen.communicate` does. Blocks."""
    patience = Patience(process.pid, seconds)
    while True:
        try:
            return process.communicate(timeout=max(patience.left, 0.0))
        except subprocess.TimeoutExpired:
            if patience.left <= 0:
                raise
