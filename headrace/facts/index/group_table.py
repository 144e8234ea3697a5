"""Numbers of every group by its ticket, small enough that 10⁷ rollouts can be filtered at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from headrace.facts.facts import GroupEnded
from headrace.facts.index.growing import Growing

ROW = np.dtype(
    [
        ("outcome", "i1"),
        ("reason", "i2"),
        ("cut", "i4"),
        ("failed", "i4"),
        ("size", "i4"),
        ("worst", "f4"),
        ("best", "f4"),
        ("mean", "f4"),
        ("longest", "i4"),
        ("step", "i4"),
    ]
)
"""One group. `outcome`: a place in OUTCOMES. `cut`, `failed`, `size`: rollouts. `step`: the step that trained it, from 1; 0 if none."""
OUTCOMES = ("", "ready", "dropped", "failed")
FARTHEST = 1 << 22
"""A ticket that lies further behind the last known one is damage: tickets are drawn one after the other."""

Order = Literal["newest", "oldest", "worst", "best", "longest"]


class Wanted(NamedTuple):
    """A question for groups. Ranges include their ends."""

    steps: tuple[float, float] = (0, math.inf)
    rewards: tuple[float, float] = (-math.inf, math.inf)
    """The range in which at least one rollout has its reward."""
    cut: bool = False
    """Only groups with a rollout that was cut off."""
    failed: bool = False
    """Only groups with a rollout that failed."""
    gone: bool = False
    """Groups that will not be trained, instead of the others."""


class GroupTable:
    def __init__(self) -> None:
        self.rows = Growing(ROW)
        self.reasons = [""]
        """The reasons of outcomes; `reason` is a place in it."""

    def end(self, fact: GroupEnded) -> None:
        """Takes the outcome of a group. A ready group that is dropped later keeps only its last outcome."""
        if not 0 <= fact.ticket < len(self.rows) + FARTHEST:
            return
        if fact.reason not in self.reasons:
            self.reasons.append(fact.reason)
        rewards = [one for one in fact.rewards if math.isfinite(one)]
        worst, best, mean = (min(rewards), max(rewards), sum(rewards) / len(rewards)) if rewards else (math.nan,) * 3
        outcome, reason = OUTCOMES.index(fact.outcome), self.reasons.index(fact.reason)
        lost, size, longest = sum(fact.failures.values()), len(fact.lengths), max(fact.lengths, default=0)
        row = (outcome, reason, fact.truncated, lost, size, worst, best, mean, longest, 0)
        self.rows.put(fact.ticket, row)

    def begin_at(self, count: int, reasons: Sequence[str], ready: Iterable[GroupEnded]) -> None:
        """Makes `count` rows of which only those of the `ready` groups are filled: what else can change was written before."""
        self.reasons = list(reasons)
        if count:
            self.rows.put(count - 1, 0)
        for fact in ready:
            self.end(fact)

    def train(self, tickets: Iterable[int], step: int) -> None:
        rows = self.rows.view
        for ticket in tickets:
            if 0 <= ticket < len(rows):
                rows["step"][ticket] = step

    def find(self, wanted: Wanted, order: Order = "newest") -> np.ndarray:
        """Returns the tickets [n] of the groups that may hold what is wanted."""
        rows = self.rows.view
        gone = rows["outcome"] >= OUTCOMES.index("dropped")
        here = gone if wanted.gone else rows["outcome"] == OUTCOMES.index("ready")
        least, most = wanted.rewards
        if least > -math.inf or most < math.inf:
            here = here & (rows["best"] >= least) & (rows["worst"] <= most)
        if not wanted.gone:
            here = here & (rows["step"] >= wanted.steps[0]) & (rows["step"] <= wanted.steps[1])
        if wanted.cut:
            here = here & (rows["cut"] > 0)
        if wanted.failed:
            here = here & (rows["failed"] > 0)
        tickets = np.flatnonzero(here)
        found = rows[tickets]
        key = {
            "newest": lambda: (-tickets, -found["step"]),
            "oldest": lambda: (tickets, found["step"]),
            "worst": lambda: (tickets, np.nan_to_num(found["worst"], nan=np.inf)),
            "best": lambda: (tickets, -np.nan_to_num(found["best"], nan=-np.inf)),
            "longest": lambda: (tickets, -found["longest"]),
        }[order]()
        return tickets[np.lexsort(key)]
