"""The contracts, checked at every fact of a simulated day, over all processes of the controller.

The reference values follow from seeds and tickets alone: nothing of what an engine sampled has to be remembered, however long the day is.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from headrace.core.batches import Group
from headrace.core.types import Request, Sampling
from headrace.episodes.rollout import seed_of
from headrace.facts.facts import (
    Accounting,
    GroupEnded,
    MemberMoved,
    StepTrained,
    TicketDrawn,
    Warned,
    WeightsLive,
    WorkerLost,
)
from headrace.loop.world.surroundings import CompletionLengths
from headrace.testing.faultsim.cluster.cluster_engine import token_at
from headrace.testing.faultsim.cluster.sizing import ClusterSize

HOUR = 3600.0


class DayChecks:
    """Protocol `Observer`."""

    def __init__(self, size: ClusterSize, seed: int) -> None:
        self._size, self._seed = size, seed
        self._lengths = CompletionLengths(size.completions, size.max_tokens)
        self._outcome: dict[int, str] = {}
        """How each ticket ended, if it has."""
        self._drawn = 0
        self._out: set[int] = set()
        """Tickets that hold a slot: drawn, and neither ended untrained nor trained by weights that are live."""
        self._admitted: dict[int, int] = {}
        """The version that was live when each ticket was drawn, until it ends."""
        self._live = -1
        self._serving, self._since = 0, 0.0
        self.trained: dict[int, tuple[int, ...]] = {}
        """The tickets of each step."""
        self.tokens = 0
        """Real tokens that were trained, those of repeated steps once."""
        self.rollouts = self.facts = 0
        self.lag = 0
        self.repeated_steps, self.repeated_seconds = 0, 0.0
        self.served_seconds = 0.0
        """Seconds of all engines in the rotation."""
        self.deaths = self.absences = 0
        self.said: list[str] = []
        """Warnings, with their times."""

    def record(self, fact: Any) -> None:
        self.facts += 1
        match fact:
            case TicketDrawn():
                assert fact.ticket == self._drawn, f"C2: ticket {fact.ticket} is drawn after {self._drawn} tickets"
                assert fact.prompt_id == f"train/{fact.ticket}", f"C7: ticket {fact.ticket} has prompt {fact.prompt_id}"
                self._drawn += 1
                self._out.add(fact.ticket)
                self._admitted[fact.ticket] = self._live
                slots = self._size.staleness.slots
                assert len(self._out) <= slots, f"C1: {len(self._out)} tickets are out, and there are {slots} slots"
            case GroupEnded():
                self._ended(fact)
            case StepTrained():
                self._step(fact)
            case WeightsLive():
                assert fact.update.version > self._live, f"C4: version {fact.update.version} after {self._live}"
                for step in range(max(0, self._live), fact.update.version):
                    self._out.difference_update(self.trained.get(step, ()))
                self._live = fact.update.version
            case MemberMoved():
                self.serve(fact.t, fact.serving)
                self.absences += fact.state in ("away", "lost")
            case WorkerLost():
                self.deaths += 1
            case Warned():
                assert "with a different result" not in fact.message, f"C7: {fact.message}"
                self.said.append(f"{fact.t / HOUR:5.2f} h  {fact.message}")

    def begins(self, t: float, engines: int) -> None:
        """A process of the controller has all its engines."""
        self.restarted()
        self.serve(t, engines)

    def restarted(self) -> None:
        """A new process of the controller begins: it publishes the newest weights again."""
        self._live = -1

    def serve(self, t: float, engines: int) -> None:
        """Notes that so many engines are in the rotation from `t` on."""
        self.served_seconds += self._serving * (t - self._since)
        self._serving, self._since = engines, t

    def finish(self, books: Accounting) -> None:
        """Checks C2 and C7 at the end: every prompt that was drawn has one outcome, or is in the checkpoint."""
        assert books.balance() == 0, f"C2: {books}"
        ended = Counter(self._outcome.values())
        found = self._drawn, ended["trained"], ended["dropped"], ended["failed"]
        counted = books.drawn, books.trained, sum(books.dropped.values()), sum(books.failed.values())
        assert found == counted, f"C2: the facts count {found}, and the controller {counted}"
        assert sorted(self.trained) == list(range(len(self.trained))), "C7: a step is missing"

    # -- groups ---------------------------------------------------------------------------------------------------------

    def _ended(self, fact: GroupEnded) -> None:
        assert fact.ticket < self._drawn, f"C2: ticket {fact.ticket} ends, and was never drawn"
        if fact.outcome != "ready":
            self._end(fact.ticket, fact.outcome)

    def _end(self, ticket: int, outcome: str) -> None:
        before = self._outcome.setdefault(ticket, outcome)
        assert before is outcome, f"C7: ticket {ticket} was {before}, and is {outcome} now"
        if outcome != "trained":
            self._out.discard(ticket)
            self._admitted.pop(ticket, None)

    def _step(self, fact: StepTrained) -> None:
        tickets = tuple(group.ticket for group in fact.groups)
        step, known = fact.report.step, self.trained.setdefault(fact.report.step, tickets)
        assert known == tickets, f"C7: step {step} trained {known}, and then {tickets}"
        if step in self.trained and all(self._outcome.get(ticket) == "trained" for ticket in tickets):
            self.repeated_steps += 1
            self.repeated_seconds += fact.report.seconds
            return
        free = self._size.staleness.slots - len(self._out)
        assert free <= self._size.groups_per_step, (
            f"C6: {free} slots are free at step {step}, and nobody draws a ticket"
        )
        for group in fact.groups:
            assert self._outcome.get(group.ticket) is None, f"C7: ticket {group.ticket} is trained twice"
            self._end(group.ticket, "trained")
            self._check(group, step)
        self.tokens += fact.report.loss_tokens

    def _check(self, group: Group, step: int) -> None:
        """C1, C4, C5 of one group: no token too old, and exactly those that the seeds give."""
        bound = self._size.staleness.lag_bound
        admitted = self._admitted.pop(group.ticket, -1)
        for index, row in enumerate(group.rows):
            seed = seed_of(self._seed, "rollout", group.ticket, index)
            length, _ = self._lengths(Request("", group.prompt.tokens, Sampling(max_tokens=1, seed=seed)))
            wanted = tuple(token_at(seed, place, length) for place in range(-(-length // self._size.grain)))
            assert row.tokens == wanted, f"C5: ticket {group.ticket} trains {row.tokens}, and {wanted} were sampled"
            assert list(row.versions) == sorted(row.versions), f"C4: versions of ticket {group.ticket} decrease"
            assert row.versions[0] >= admitted, (
                f"C1: ticket {group.ticket} was drawn while version {admitted} was live, and has tokens of {row.versions[0]}"
            )
            self.lag = max(self.lag, step - row.versions[0])
            assert step - row.versions[0] <= bound, (
                f"C1: ticket {group.ticket} is trained at {step}, with {row.versions}"
            )
            self.rollouts += 1
