"""The worker processes of one run: whom to ask where they stand, and whom to end with the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Child:
    who: str
    pid: int
    stacks: Path | None
    """The file that it writes its stacks to; None of a process that was started without one."""


class Family:
    """The children of one run. May be read from any thread."""

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
    """Processes that are started inside, by tasks and threads that begin there too, belong to `mine`."""
    token = _current.set(mine)
    try:
        yield
    finally:
        _current.reset(token)


def current_family() -> Family:
    """Whoever starts a process asks once, and reports its end to the same one. Outside of a run it is one that nobody reads."""
    return _current.get() or Family()
