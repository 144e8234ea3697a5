"""Shares of rollouts that were cut off or failed, and of groups without contrast: in the whole run, and recently."""

from __future__ import annotations

from collections import Counter

from msgspec import field

from headrace.core.batches import OUTAGES
from headrace.facts.facts import GroupEnded
from headrace.facts.run_sums import RunSums, counter

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
    """Those of them that failed because of an outage."""
    no_contrast: int = 0
    dropped: int = 0
    """Groups that were dropped for another reason than that they have no contrast."""
    kinds: Counter[str] = counter()
    """Failed rollouts by exception, or by reason if nothing was raised."""
    talk: Counter[str] = counter()
    """The counts of `GroupEnded.talk`."""

    def add(self, one: GroupEnded) -> None:
        """Counts one group."""
        self._count(one, 1)

    def change(self, was: GroupEnded, now: GroupEnded) -> None:
        """Counts a group anew that was ready and then was dropped."""
        self._count(was, -1)
        self._count(now, 1)

    def _count(self, one: GroupEnded, sign: int) -> None:
        failed = sum(one.failures.values())
        self.groups += sign
        self.rollouts += sign * (len(one.rewards) + failed)
        self.truncated += sign * one.truncated
        self.failed += sign * failed
        self.outages += sign * sum(one.failures.get(reason, 0) for reason in OUTAGES)
        for kind, count in (one.kinds or one.failures).items():
            self.kinds[kind] += sign * count
        for name, count in one.talk.items():
            self.talk[name] += sign * count
        if one.outcome == "dropped":
            self.no_contrast += sign * (one.reason == NO_CONTRAST)
            self.dropped += sign * (one.reason != NO_CONTRAST)

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
    """These groups, the oldest first: a few dozen."""

    def add(self, one: GroupEnded) -> None:
        super().add(one)
        self.held.append(one)
        while self.groups > self.prompts and self.rollouts - rollouts_of(self.held[0]) >= self.window:
            self._count(self.held.pop(0), -1)

    def change(self, was: GroupEnded, now: GroupEnded) -> None:
        if was in self.held:
            super().change(was, now)
            self.held[self.held.index(was)] = now


def rollouts_of(one: GroupEnded) -> int:
    """Returns the number of rollouts, with or without a reward."""
    return len(one.rewards) + sum(one.failures.values())


class Shares(RunSums):
    """The counts over the whole run, and over the last groups."""

    total: Tally = field(default_factory=Tally)
    recent: Recent = field(default_factory=lambda: Recent(prompts=4 * PROMPTS))
    """A longer window for views: over only 8 groups the shares would fluctuate too much."""
    failing: Recent = field(default_factory=Recent)
    """The window by which a run is warned and paused."""
    ready: dict[int, GroupEnded] = {}
    """The groups that wait to be trained, by ticket."""

    def end(self, one: GroupEnded) -> None:
        """Counts the end of a group. A group that was cancelled before it had a rollout counts only as dropped."""
        was = self.ready.pop(one.ticket, None)
        lost = one.outcome == "failed" and set(one.failures) <= set(
            OUTAGES
        )  # an outage says nothing about data and reward
        for tally in (self.total, self.recent, *(() if lost else (self.failing,))):
            if was:
                tally.change(was, one)
            else:
                tally.add(one)
        if one.outcome == "ready":
            self.ready[one.ticket] = one

    def train(self, tickets: tuple[int, ...]) -> None:
        for ticket in tickets:
            self.ready.pop(ticket, None)
