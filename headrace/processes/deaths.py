"""How often a process may die before it is given up: an engine, a server, a trainer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

FORGIVEN = 3600.0
"""Seconds of work after which earlier deaths no longer count: in a run of weeks on hundreds of machines every process dies now and then."""


class Deaths:
    """The deaths of one process after the other. Those before an hour of work are forgiven."""

    def __init__(self, most: int) -> None:
        """`most`: deaths that are borne."""
        self.most = most
        self.total = 0
        self._forgiven: set[int] = set()

    def after(self, worked: float) -> Callable[[], None]:
        """Notes that a process has ended that had worked for so many seconds. Returns a function that forgives its death, if it is one."""
        if worked > FORGIVEN:
            self._forgiven.update(range(1, self.total + 1))
        return partial(self._forgiven.add, self.total + 1)

    def add(self) -> None:
        """Counts the death."""
        self.total += 1

    @property
    def counted(self) -> int:
        """Deaths that are not forgiven."""
        return self.total - len(self._forgiven)

    @property
    def too_many(self) -> bool:
        return self.counted > self.most

    def said(self, setting: str) -> str:
        """The sentence about a death that was one too many: `it was its death no. 4 (engine.max_deaths allows 3)`."""
        return f"it was its death no. {self.counted} ({setting} allows {self.most})"
