"""The outcomes of the groups that were drawn, and whether the trained ones are the short or the easy ones.

Pacing trains everything it draws. Discarding overdue groups does not: a group with a long completion takes longer, so it is overdue more
often, and long completions belong to hard prompts. Only groups that were discarded for their age count as such a bias. Groups without
contrast are dropped by every policy, because their gradient is zero; they are counted separately.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import field

from headrace.facts.facts import GroupEnded
from headrace.facts.run_sums import RunSums, counter

DISCARDED = ("overdue", "interrupted")
"""Reasons that depend on when a group was generated: `staleness.overdue`, `partial.mode = "cancel_group"`."""


class Histogram(RunSums):
    """Counts how often each value was seen."""

    counts: Counter[int | float] = counter()

    def add(self, values: Iterable[float]) -> None:
        self.counts.update(values)

    @property
    def count(self) -> int:
        return self.counts.total()

    @property
    def mean(self) -> float | None:
        return sum(value * n for value, n in self.counts.items()) / self.count if self.count else None

    @property
    def variance(self) -> float:
        """Unbiased estimate; NaN for fewer than two values."""
        mean = self.mean
        if mean is None or self.count < 2:
            return math.nan
        squares = (
            n * (value - mean) * (value - mean) for value, n in self.counts.items()
        )  # infinite where `**` would raise
        return sum(squares) / (self.count - 1)


class Sieve(RunSums):
    """The distribution of one number over all that was drawn, over what could be trained (has contrast, for example), and over what was
    trained."""

    drawn: Histogram = field(default_factory=Histogram)
    trainable: Histogram = field(default_factory=Histogram)
    trained: Histogram = field(default_factory=Histogram)

    def draw(self, values: Sequence[float], trainable: bool) -> None:
        self.drawn.add(values)
        if trainable:
            self.trainable.add(values)


class Fate(RunSums):
    """All groups with the same outcome. The rollouts of a group are correlated, so a group is one observation."""

    groups: int = 0
    unfinished: int = 0
    """Groups that were cancelled while they were generated."""
    tokens: int = 0
    """Tokens sampled for all groups."""
    lengths: Histogram = field(default_factory=Histogram)
    """Mean tokens per rollout of each group. For an unfinished group it is a lower bound: the tokens up to its cancellation."""
    rewards: Histogram = field(default_factory=Histogram)
    """Mean reward of each scored group: the solve rate of its prompt."""

    def add(self, one: GroupEnded, group_size: int) -> None:
        self.groups += 1
        self.tokens += sum(one.lengths) + one.lost_tokens
        if one.lengths:
            self.lengths.add([round(sum(one.lengths) / len(one.lengths), 1)])
            self.rewards.add(solve_rate(one))
        elif one.lost_tokens:
            self.unfinished += 1
            self.lengths.add([round(one.lost_tokens / (one.rollouts or group_size), 1)])


def solve_rate(one: GroupEnded) -> list[float]:
    """Returns the mean reward of the rollouts as a list of one; empty if none was scored or the mean is not finite."""
    mean = sum(one.rewards) / len(one.rewards) if one.rewards else math.nan
    return [round(mean, 3)] if math.isfinite(mean) else []


class Fates(RunSums):
    """The fates of all groups."""

    by_reason: dict[str, Fate] = {}
    """Keys: `trained`, or the reason why they were not."""
    ready: dict[int, GroupEnded] = {}
    """The facts of the groups that wait to be trained, by ticket."""

    def of(self, reason: str) -> Fate:
        """The fate of one reason, empty if no group had it."""
        return self.by_reason.get(reason) or Fate()

    def end(self, fact: GroupEnded, group_size: int) -> None:
        if fact.outcome == "ready":
            self.ready[fact.ticket] = fact
        else:
            self.ready.pop(fact.ticket, None)
            self.by_reason.setdefault(fact.reason, Fate()).add(fact, group_size)

    def train(self, tickets: Iterable[int], group_size: int) -> list[GroupEnded]:
        """Counts groups as trained and returns the facts of when they became ready, except those lost in a kill."""
        found = [fact for ticket in tickets if (fact := self.ready.pop(ticket, None))]
        for fact in found:
            self.by_reason.setdefault("trained", Fate()).add(fact, group_size)
        return found


class Shift(NamedTuple):
    """The difference between the groups that were trained and all that could have been."""

    drawn: float
    """Mean over trained and discarded groups."""
    trained: float
    errors: float
    """Difference between trained and discarded groups in standard errors (Welch); NaN if either has fewer than two."""


def discarded(fates: Fates) -> list[Fate]:
    return [fates.by_reason[reason] for reason in DISCARDED if reason in fates.by_reason]


def length_shift(fates: Fates) -> Shift | None:
    """Returns the shift of lengths; None if nothing was discarded or nothing trained. It is a lower bound if discarded groups were not
    finished."""
    return _shift(fates.of("trained").lengths, [fate.lengths for fate in discarded(fates)])


def reward_shift(fates: Fates) -> Shift | None:
    """Returns the shift of rewards among scored groups."""
    return _shift(fates.of("trained").rewards, [fate.rewards for fate in discarded(fates)])


def _shift(trained: Histogram, parts: list[Histogram]) -> Shift | None:
    away = Histogram()
    for part in parts:
        away.counts.update(part.counts)
    kept, lost = trained.mean, away.mean
    if kept is None or lost is None:
        return None
    drawn = (kept * trained.count + lost * away.count) / (trained.count + away.count)
    error = math.sqrt(trained.variance / trained.count + away.variance / away.count)
    if error == 0:
        return Shift(drawn, kept, 0.0 if kept == lost else math.copysign(math.inf, kept - lost))
    return Shift(drawn, kept, (kept - lost) / error)
