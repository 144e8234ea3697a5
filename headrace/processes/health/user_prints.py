"""Bounds what one call of the user's code prints: a reward that prints a megabyte for each group would fill the terminal, or the disk with its log.

The streams of the process are wrapped once. What other threads and tasks print passes unchanged. Only what goes through `sys.stdout` and
`sys.stderr` is counted, so the output of native code and of other programs is not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from headrace.core.printing import say

SCREEN = 16_000
"""Characters of one call on a screen: 200 lines."""
LOG = 200_000
"""Characters of one call in a log."""


class _Budget:
    def __init__(self, most: int) -> None:
        self.left, self.dropped = most, 0


_budget: ContextVar[_Budget | None] = ContextVar("headrace_prints", default=None)
"""The budget of the call in which the code runs; None outside of one."""


class _Bounded:
    """A stream that drops what exceeds the budget of a call."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        budget = _budget.get()
        if budget is None:
            written: int = self.stream.write(text)
            return written
        shown = text[: budget.left]
        budget.left -= len(shown)
        budget.dropped += len(text) - len(shown)
        if shown:
            self.stream.write(shown)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def bounded_prints(who: str, most: int) -> Iterator[None]:
    """Shows at most `most` characters of what is printed meanwhile, in this thread or task and those that it starts, and says how many are
    left out. `who`: the code that prints, for that message."""
    _wrap()
    budget = _Budget(most)
    token = _budget.set(budget)
    try:
        yield
    finally:
        _budget.reset(token)
        if budget.dropped and sys.stderr:
            say(
                f"{who} printed {most + budget.dropped:,} characters in one call; {budget.dropped:,} of them are left out"
            )


def unwrap() -> None:
    """Gives the process its own streams back."""
    for name in ("stdout", "stderr"):
        if isinstance(stream := getattr(sys, name), _Bounded):
            setattr(sys, name, stream.stream)


def _wrap() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)  # a live view may have put another one there since the call before
        if stream is not None and not isinstance(stream, _Bounded):
            setattr(sys, name, _Bounded(stream))
