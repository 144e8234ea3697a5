"""Things that a test does beside something that goes on: threads that hand over what they raise, and waiting for an event."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PATIENCE = 600.0
"""Seconds for an event that takes a few on a machine that does nothing else."""


class Beside(threading.Thread):
    """Calls a function in a thread that has begun. `join` raises what the function raised; a plain thread would fail no test.

    A thread that still waits does not keep the process of the tests from its end."""

    def __init__(self, act: Callable[[], object], name: str | None = None) -> None:
        super().__init__(name=name, daemon=True)
        self._act = act
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._act()
        except BaseException as error:
            self._error = error

    def join(self, timeout: float | None = PATIENCE) -> None:
        super().join(timeout)
        if self._error is not None:
            raise self._error
        assert not self.is_alive(), f"it has not ended in {timeout} s"


def until(true: Callable[[], object]) -> None:
    """Returns when it is true. The event itself is waited for, however slow the machine is."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"it was not true in {PATIENCE} s"
        time.sleep(0.01)
