"""The state of every ticket, counted from the facts alone (C2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headrace.facts.facts import Accounting, Books, GroupEnded, TicketDrawn
from headrace.facts.run_sums import RunSums, counter


class Tickets(RunSums):
    """Counts tickets independently of the controller's own counters, so that a killed run can be accounted for as well."""

    drawn: int = 0
    trained: int = 0
    dropped: Counter[str] = counter()
    failed: Counter[str] = counter()
    rollout_failures: Counter[str] = counter()
    flying: set[int] = set()
    """Tickets whose groups are generated or scored."""
    ready: set[int] = set()
    """Tickets whose groups wait for the trainer or are in its current step."""

    def draw(self, fact: TicketDrawn) -> None:
        self.flying.add(fact.ticket)
        self.drawn += 1

    def end(self, fact: GroupEnded) -> bool:
        """Counts an outcome. Returns whether it is the group's first one: a ready group may still be dropped with a skipped step."""
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
        """Takes over the counts of the journal: the process before may have been killed before it recorded its last facts."""
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
