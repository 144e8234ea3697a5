"""C2 as counted from the facts alone: what became of every ticket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headrace.observe.facts import Accounting, Books, GroupEnded, TicketDrawn


class Tickets:
    """Independent of the controller's own counters, so that a run that was killed can be accounted for too."""

    def __init__(self) -> None:
        self.drawn = self.trained = 0
        self.dropped: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.rollout_failures: Counter[str] = Counter()
        self.flying: set[int] = set()
        """Generating or being scored."""
        self.ready: set[int] = set()
        """Waiting for the trainer, or in the step it is doing."""

    def draw(self, fact: TicketDrawn) -> None:
        self.flying.add(fact.ticket)
        self.drawn += 1

    def end(self, fact: GroupEnded) -> bool:
        """Whether this is the first word on the group (a ready group may still be dropped, with its skipped step)."""
        first = fact.ticket not in self.ready
        self.flying.discard(fact.ticket)
        self.ready.discard(fact.ticket)
        if fact.outcome == "ready":
            self.ready.add(fact.ticket)
        else:
            (self.dropped if fact.outcome == "dropped" else self.failed)[fact.reason] += 1
        if first and fact.outcome != "failed":
            self.rollout_failures.update(fact.failures)
        return first

    def train(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            self.ready.discard(ticket)
            self.trained += 1

    def resume(self, books: Books) -> None:
        """The process before may have been killed between what it did and the fact that tells it."""
        counted = books.accounting
        self.drawn, self.trained = counted.drawn, counted.trained
        self.dropped, self.failed = Counter(counted.dropped), Counter(counted.failed)
        self.rollout_failures = Counter(counted.rollout_failures)
        self.flying, self.ready = set(books.flying), set(books.ready)

    def accounting(self) -> Accounting:
        return Accounting(
            self.drawn,
            self.trained,
            dict(self.dropped),
            dict(self.failed),
            len(self.flying) + len(self.ready),
            rollout_failures=dict(self.rollout_failures),
        )
