"""What became of the groups that were drawn, and whether those that were trained are the short or the easy ones.

Pacing trains what it draws. Discarding what is too old does not: a group with a long completion takes longer, so it is overdue more
often, and long ones are the hard ones. Only what was discarded for its age counts as such a bias. Groups without contrast are dropped
by every policy, because they teach nothing; they are told apart.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headrace.observe.facts import GroupEnded

DISCARDED = ("overdue", "interrupted")
"""Reasons that depend on when a group was generated: `staleness.overdue`, `partial.mode = "cancel_group"`."""


class Histogram:
    """How often each value was seen."""

    def __init__(self) -> None:
        self.counts: Counter[float] = Counter()

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
        """Unbiased; NaN of fewer than two."""
        mean = self.mean
        if mean is None or self.count < 2:
            return math.nan
        return sum(n * (value - mean) ** 2 for value, n in self.counts.items()) / (self.count - 1)


class Sieve:
    """One number of all that was drawn, of what could be trained (has contrast, say), and of what was trained."""

    def __init__(self) -> None:
        self.drawn, self.trainable, self.trained = Histogram(), Histogram(), Histogram()

    def draw(self, values: Sequence[float], trainable: bool) -> None:
        self.drawn.add(values)
        if trainable:
            self.trainable.add(values)


class Fate:
    """All groups that came to one end. Rollouts of a group are alike, so a group is one observation."""

    def __init__(self) -> None:
        self.groups = 0
        self.unfinished = 0
        """Of these, ended while they were generated."""
        self.tokens = 0
        """Sampled for all of them."""
        self.lengths = Histogram()
        """Mean tokens of a rollout, of each group; of an unfinished one what there was: it would have become longer."""
        self.rewards = Histogram()
        """Mean reward of each group that was scored: the prompt's solve rate."""

    def add(self, one: GroupEnded, group_size: int) -> None:
        self.groups += 1
        self.tokens += sum(one.lengths) + one.lost_tokens
        if one.lengths:
            self.lengths.add([round(sum(one.lengths) / len(one.lengths), 1)])
            self.rewards.add(solve_rate(one))
        elif one.lost_tokens:
            self.unfinished += 1
            self.lengths.add([round(one.lost_tokens / group_size, 1)])


def solve_rate(one: GroupEnded) -> list[float]:
    """The mean reward of its rollouts; of no value where none was scored, or where one is not finite."""
    mean = sum(one.rewards) / len(one.rewards) if one.rewards else math.nan
    return [round(mean, 3)] if math.isfinite(mean) else []


class Fates:
    """By `trained`, or the reason why not."""

    def __init__(self) -> None:
        self.of: defaultdict[str, Fate] = defaultdict(Fate)
        self._ready: dict[int, GroupEnded] = {}

    def end(self, fact: GroupEnded, group_size: int) -> None:
        if fact.outcome == "ready":
            self._ready[fact.ticket] = fact
        else:
            self._ready.pop(fact.ticket, None)
            self.of[fact.reason].add(fact, group_size)

    def train(self, tickets: Iterable[int], group_size: int) -> list[GroupEnded]:
        """What was told of these groups when they were ready: nothing of one whose end was lost in a kill."""
        found = [fact for ticket in tickets if (fact := self._ready.pop(ticket, None))]
        for fact in found:
            self.of["trained"].add(fact, group_size)
        return found


class Shift(NamedTuple):
    """By how much the groups that were trained differ from all that could have been."""

    drawn: float
    """Mean over the trained and the discarded."""
    trained: float
    errors: float
    """Of the difference between trained and discarded, in its standard errors (Welch); NaN where a side has fewer than two."""


def discarded(fates: Fates) -> list[Fate]:
    return [fates.of[reason] for reason in DISCARDED if reason in fates.of]


def length_shift(fates: Fates) -> Shift | None:
    """None where nothing was discarded, or nothing trained. A lower bound where discarded groups were not finished."""
    return _shift(fates.of["trained"].lengths, [fate.lengths for fate in discarded(fates)])


def reward_shift(fates: Fates) -> Shift | None:
    """Of those that were scored."""
    return _shift(fates.of["trained"].rewards, [fate.rewards for fate in discarded(fates)])


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
