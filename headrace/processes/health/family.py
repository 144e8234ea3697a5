"""The worker processes of one run, which are asked for their stacks and ended with the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Child:
    """One worker process."""

    who: str
    pid: int
    stacks: Path | None
    """The file that it writes its stacks to; None if it was started without one."""


class Family:
    """The worker processes of one run. May be read from any thread."""

    def __init__(self) -> None:
        self._children: dict[int, Child] = {}

    def started(self, child: Child) -> None:
        self._children[child.pid] = child

    def ended(self, pid: int) -> None:
        self._children.pop(pid, None)

    def children(self) -> list[Child]:
        return list(self._children.values())


_current: ContextVar[Family | None] = ContextVar("headrace_family", default=None)


@contextmanager
def family(mine: Family) -> Iterator[None]:
    """Registers processes that are started inside this context with `mine`, also by tasks and threads that begin there."""
    token = _current.set(mine)
    try:
        yield
    finally:
        _current.reset(token)


def current_family() -> Family:
    """Returns the family of the current context; outside of a run, an unused one. Code that starts a process calls this once, and
    reports the start and the end of the process to the same family."""
    return _current.get() or Family()
