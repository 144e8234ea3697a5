"""An asyncio loop in virtual time: the real pipeline runs thousands of schedules in seconds.

`sleep` and timeouts advance a counter instead of the clock. When nothing is ready and no timer is set, nothing can ever
happen again: that is a deadlock, which is raised.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(AssertionError):
    """All coroutines wait for each other."""


class _JumpingSelector(selectors.DefaultSelector):
    """Never sleeps: when a real selector would wait for a timer, it moves the clock to that timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise Deadlock("nothing is ready and no timer is set: every task waits for another one")
            self.now += max(timeout, 0.0)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def jump(self, seconds: float) -> None:
        """Moves the clock, as if the machine had been asleep."""
        self._jumping.now += seconds

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """Runs the function at once in this thread: another thread would run in real time and in an unpredictable order."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Does nothing: there is no executor."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine like `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
