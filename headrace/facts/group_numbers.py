"""Numbers of groups and rollouts: where every ticket is, how many were cut off or failed, whether the trained ones are the short or the
easy ones, and the bias of a curriculum.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import field

from headrace.core.batches import OUTAGES
from headrace.facts.facts import Accounting, Books, GroupEnded, PromptChosen, TicketDrawn
from headrace.facts.run_totals import RunSums, counter

# --- The state of every ticket, counted from the facts alone (C2).


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


# --- Shares of rollouts that were cut off or failed
# Shares of rollouts that were cut off or failed, and of groups without contrast: in the whole run, and recently.


WINDOW, PROMPTS = 64, 8
"""Size of the window by which a run is warned and paused: the last rollouts, from at least this many prompts."""
NO_CONTRAST = "no_contrast"


class Tally(RunSums):
    """Counts of groups and rollouts that ended and were not cancelled. A share of nothing is None."""

    groups: int = 0
    rollouts: int = 0
    truncated: int = 0
    """Rollouts that were cut off."""
    failed: int = 0
    """Rollouts without a reward."""
    outages: int = 0
    """Rollouts without a reward because of an outage."""
    no_contrast: int = 0
    dropped: int = 0
    """Groups that were dropped for another reason than that they have no contrast."""
    kinds: Counter[str] = counter()
    """Failed rollouts by exception, or by reason if nothing was raised."""
    talk: Counter[str] = counter()
    """The counts of `GroupEnded.talk`."""

    def add(self, group: GroupEnded) -> None:
        """Counts one group."""
        self._count(group, 1)

    def change(self, was: GroupEnded, now: GroupEnded) -> None:
        """Counts a group anew that was ready and then was dropped."""
        self._count(was, -1)
        self._count(now, 1)

    def _count(self, group: GroupEnded, sign: int) -> None:
        failed = sum(group.failures.values())
        self.groups += sign
        self.rollouts += sign * (len(group.rewards) + failed)
        self.truncated += sign * group.truncated
        self.failed += sign * failed
        self.outages += sign * sum(group.failures.get(reason, 0) for reason in OUTAGES)
        for kind, count in (group.kinds or group.failures).items():
            self.kinds[kind] += sign * count
        for name, count in group.talk.items():
            self.talk[name] += sign * count
        if group.outcome == "dropped":
            self.no_contrast += sign * (group.reason == NO_CONTRAST)
            self.dropped += sign * (group.reason != NO_CONTRAST)

    @property
    def scored(self) -> int:
        """Rollouts with a reward."""
        return self.rollouts - self.failed

    @property
    def faults(self) -> int:
        """Rollouts that failed because of data or reward."""
        return self.failed - self.outages

    @property
    def truncated_share(self) -> float | None:
        """Share of the rollouts with a reward that were cut off."""
        return _share(self.truncated, self.scored)

    @property
    def failed_share(self) -> float | None:
        """Share of the rollouts that failed."""
        return _share(self.failed, self.rollouts)

    @property
    def fault_share(self) -> float | None:
        """Share of failures because of data or reward among the rollouts that no outage affected."""
        return _share(self.faults, self.rollouts - self.outages)

    @property
    def no_contrast_share(self) -> float | None:
        """Share of the groups without contrast."""
        return _share(self.no_contrast, self.groups)

    @property
    def dropped_share(self) -> float | None:
        """Share of the groups that were dropped for another reason, such as their age."""
        return _share(self.dropped, self.groups)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


class Recent(Tally):
    """The counts over the last groups: the fewest that hold `window` rollouts, but at least `prompts` groups."""

    window: int = WINDOW
    prompts: int = PROMPTS
    held: list[GroupEnded] = []
    """The groups that are remembered, the oldest first: a few dozen."""

    def add(self, group: GroupEnded) -> None:
        super().add(group)
        self.held.append(group)
        while self.groups > self.prompts and self.rollouts - rollouts_of(self.held[0]) >= self.window:
            self._count(self.held.pop(0), -1)

    def change(self, was: GroupEnded, now: GroupEnded) -> None:
        if was in self.held:
            super().change(was, now)
            self.held[self.held.index(was)] = now


def rollouts_of(group: GroupEnded) -> int:
    """Returns the number of rollouts, with or without a reward."""
    return len(group.rewards) + sum(group.failures.values())


class Shares(RunSums):
    """The counts over the whole run, and over the last groups."""

    total: Tally = field(default_factory=Tally)
    recent: Recent = field(default_factory=lambda: Recent(prompts=4 * PROMPTS))
    """A longer window for views: over only 8 groups the shares would fluctuate too much."""
    failing: Recent = field(default_factory=Recent)
    """The window by which a run is warned and paused."""
    ready: dict[int, GroupEnded] = {}
    """The groups that wait to be trained, by ticket."""

    def end(self, group: GroupEnded) -> None:
        """Counts the end of a group. A group that was cancelled before it had a rollout counts only as dropped."""
        was = self.ready.pop(group.ticket, None)
        lost = group.outcome == "failed" and set(group.failures) <= set(
            OUTAGES
        )  # an outage says nothing about data and reward
        for tally in (self.total, self.recent, *(() if lost else (self.failing,))):
            if was:
                tally.change(was, group)
            else:
                tally.add(group)
        if group.outcome == "ready":
            self.ready[group.ticket] = group

    def train(self, tickets: tuple[int, ...]) -> None:
        for ticket in tickets:
            self.ready.pop(ticket, None)


# --- The outcomes of the groups that were drawn
# The outcomes of the groups that were drawn, and whether the trained ones are the short or the easy ones.
#
# Pacing trains everything it draws. Discarding overdue groups does not: a group with a long completion takes longer, so it is overdue more
# often, and long completions belong to hard prompts. Only groups that were discarded for their age count as such a bias. Groups without
# contrast are dropped by every policy, because their gradient is zero; they are counted separately.


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

    def add(self, group: GroupEnded, group_size: int) -> None:
        self.groups += 1
        self.tokens += sum(group.lengths) + group.lost_tokens
        if group.lengths:
            self.lengths.add([round(sum(group.lengths) / len(group.lengths), 1)])
            self.rewards.add(solve_rate(group))
        elif group.lost_tokens:
            self.unfinished += 1
            self.lengths.add([round(group.lost_tokens / (group.rollouts or group_size), 1)])


def solve_rate(group: GroupEnded) -> list[float]:
    """Returns the mean reward of the rollouts as a list of one; empty if none was scored or the mean is not finite."""
    mean = sum(group.rewards) / len(group.rewards) if group.rewards else math.nan
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


# --- The bias of a curriculum
# Which prompts were drawn, and which were offered by the task.
#
# Every draw looks at candidates in the order of the task. Uniform drawing would take one of them at random, so the pools of all candidates
# are those of uniform draws, and the difference is the bias of the choice.


POOLS = ("new", "mixed", "solved", "hopeless", "failed")


class Choices(RunSums):
    """The counts over the whole run; all zero for a run without a curriculum."""

    draws: int = 0
    known: int = 0
    """Different prompts."""
    most: int = 0
    """How often the commonest one was drawn."""
    drawn: Counter[str] = counter()
    """Draws by the pool of the prompt."""
    offered: Counter[str] = counter()
    """Candidates by their pool."""
    flat: Counter[str] = counter()
    """Groups without contrast, by the pool of the prompt when it was drawn."""
    sizes: Counter[int] = counter()
    """Groups by their number of rollouts, if that was chosen too."""
    twins: int = 0
    """Ordered pairs of draws of one prompt."""
    means: tuple[int, float, float] = (0, 0.0, 0.0)
    """Draws for which both are known; sum of the mean reward of the prompt's last group; the same over the candidates."""
    pending: dict[int, str] = {}
    """The pool by ticket, until its group has ended."""

    def choose(self, fact: PromptChosen) -> None:
        choice = fact.choice
        self.draws += 1
        self.known, self.most = choice.known, max(self.most, choice.drawn)
        self.drawn[choice.pool] += 1
        self.offered.update(choice.looked)
        self.twins += 2 * (choice.drawn - 1)
        if math.isfinite(choice.mean) and math.isfinite(choice.offered):
            count, drawn, offered = self.means
            self.means = (count + 1, drawn + choice.mean, offered + choice.offered)
        self.pending[fact.ticket] = choice.pool

    def end(self, fact: GroupEnded) -> None:
        pool = self.pending.pop(fact.ticket, None)
        if pool and fact.reason == NO_CONTRAST:
            self.flat[pool] += 1
        if pool and fact.rollouts:
            self.sizes[fact.rollouts] += 1

    @property
    def distance(self) -> float | None:
        """Total variation distance between the pools of drawn and of offered prompts: 0 if the choice is uniform, at most 1."""
        if not self.draws:
            return None
        offered = self.offered.total()
        return sum(abs(self.drawn[pool] / self.draws - self.offered[pool] / offered) for pool in POOLS) / 2

    @property
    def effective(self) -> float | None:
        """The number of equally likely prompts that would be drawn as unevenly: the inverse of the probability that two draws are of one
        prompt, estimated without bias by D (D - 1) / sum of n (n - 1) over prompts drawn n times (Simpson 1949, Measurement of Diversity).
        None if no prompt was drawn twice."""
        return self.draws * (self.draws - 1) / self.twins if self.twins else None

    @property
    def rewards(self) -> tuple[float, float] | None:
        """Mean reward of the last group of the drawn prompts, and of the offered ones."""
        count, drawn, offered = self.means
        return (drawn / count, offered / count) if count else None
