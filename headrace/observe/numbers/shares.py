"""How many of the rollouts were cut off or failed, and how many of the groups had no contrast: of all, and of the last ones."""

from __future__ import annotations

from collections import Counter, deque

from headrace.observe.facts import GroupEnded
from headrace.types import OUTAGES

WINDOW, PROMPTS = 64, 8
"""What a run is warned of and paused for is a share of the last so many rollouts, and of no fewer than so many prompts."""
NO_CONTRAST = "no_contrast"


class Tally:
    """Counts of groups that ended by themselves, and were not cancelled. A share of nothing is None."""

    def __init__(self) -> None:
        self.groups = self.rollouts = self.truncated = self.failed = self.outages = 0
        """Groups; and of their rollouts all, those cut off, those that failed, and those that an outage made fail."""
        self.no_contrast = self.dropped = 0
        """Groups; and those that were dropped for another reason."""
        self.kinds: Counter[str] = Counter()
        """Rollouts that failed, by what was raised or else by reason."""

    def add(self, one: GroupEnded) -> None:
        self._count(one, 1)

    def change(self, was: GroupEnded, now: GroupEnded) -> None:
        """A ready group that was dropped after all."""
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
        if one.outcome == "dropped":
            self.no_contrast += sign * (one.reason == NO_CONTRAST)
            self.dropped += sign * (one.reason != NO_CONTRAST)

    @property
    def scored(self) -> int:
        """Rollouts with a reward."""
        return self.rollouts - self.failed

    @property
    def faults(self) -> int:
        """Rollouts that failed through data or reward."""
        return self.failed - self.outages

    @property
    def truncated_share(self) -> float | None:
        """Of the rollouts with a reward."""
        return _share(self.truncated, self.scored)

    @property
    def failed_share(self) -> float | None:
        """Of the rollouts."""
        return _share(self.failed, self.rollouts)

    @property
    def fault_share(self) -> float | None:
        """Of the rollouts that no outage took."""
        return _share(self.faults, self.rollouts - self.outages)

    @property
    def no_contrast_share(self) -> float | None:
        """Of the groups."""
        return _share(self.no_contrast, self.groups)

    @property
    def dropped_share(self) -> float | None:
        """Of the groups: for their age, say, but not for want of contrast."""
        return _share(self.dropped, self.groups)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


class Recent(Tally):
    """Of the last groups: as few as hold `rollouts` rollouts, and no fewer than `prompts`."""

    def __init__(self, rollouts: int = WINDOW, prompts: int = PROMPTS) -> None:
        super().__init__()
        self._wanted, self._least = rollouts, prompts
        self._held: deque[GroupEnded] = deque()

    def add(self, one: GroupEnded) -> None:
        super().add(one)
        self._held.append(one)
        while self.groups > self._least and self.rollouts - rollouts_of(self._held[0]) >= self._wanted:
            self._count(self._held.popleft(), -1)

    def change(self, was: GroupEnded, now: GroupEnded) -> None:
        if was in self._held:
            super().change(was, now)
            self._held[self._held.index(was)] = now


def rollouts_of(one: GroupEnded) -> int:
    """That it had, with or without a reward."""
    return len(one.rewards) + sum(one.failures.values())


class Shares:
    """What became of rollouts and groups, of a whole run and lately."""

    def __init__(self) -> None:
        self.total = Tally()
        self.recent = Recent(WINDOW, 4 * PROMPTS)
        """For people: of groups, the last 8 would jump about."""
        self.failing = Recent()
        """The window that a run is warned of and paused for."""
        self._ready: dict[int, GroupEnded] = {}

    def end(self, one: GroupEnded) -> None:
        """Groups that were cancelled before they had a rollout count as dropped alone."""
        was = self._ready.pop(one.ticket, None)
        lost = one.outcome == "failed" and set(one.failures) <= set(OUTAGES)  # says nothing of data and reward
        for tally in (self.total, self.recent, *(() if lost else (self.failing,))):
            if was:
                tally.change(was, one)
            else:
                tally.add(one)
        if one.outcome == "ready":
            self._ready[one.ticket] = one

    def train(self, tickets: tuple[int, ...]) -> None:
        for ticket in tickets:
            self._ready.pop(ticket, None)
