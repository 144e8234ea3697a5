"""The sleep of engine and trainer in a run that gives both the same devices in turns."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from headrace.observe.facts import Slept, Woke


class Nap(NamedTuple):
    """The time in which a worker did not have the devices."""

    who: str
    start: float
    end: float
    freed: int
    """Bytes that it gave back."""


class Naps:
    """All naps of a run."""

    def __init__(self) -> None:
        self.over: list[Nap] = []
        self.now: dict[str, Slept] = {}
        """The workers that are asleep."""
        self.turns = 0
        """Changes of the devices from one to the other."""
        self.seconds = 0.0
        """The time of these changes, in which neither worked."""
        self.freed: Counter[str] = Counter()
        """The most bytes that a sleep gave back, by worker."""

    def restart(self) -> None:
        """Begins a new process of the run."""
        self.now.clear()

    def sleep(self, fact: Slept) -> None:
        self.now[fact.who] = fact
        self.seconds += fact.report.seconds
        self.freed[fact.who] = max(self.freed[fact.who], fact.report.memory)

    def wake(self, fact: Woke) -> None:
        self.turns += 1
        self.seconds += fact.report.seconds
        if slept := self.now.pop(fact.who, None):
            self.over.append(Nap(fact.who, slept.t, fact.t, slept.report.memory))

    @property
    def words(self) -> str:
        """`40 turns on the same devices, 0.21 s each; at most 1.2 GiB given back by the trainer, 0.3 GiB by the engine`; empty without any."""
        if not self.turns:
            return ""
        freed = [f"{size / 2**30:.2g} GiB by the {who}" for who, size in self.freed.most_common() if size]
        given = f"; at most {', '.join(freed)} given back" if freed else ""
        return f"{self.turns} turns on the same devices, {self.seconds / self.turns:.2g} s each{given}"
