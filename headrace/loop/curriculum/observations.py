"""Reads from a record of the journal what it says about the prompt of its ticket, and keeps the range of rewards."""

from __future__ import annotations

import math
from typing import Literal

from headrace.core.batches import OUTAGES
from headrace.core.types import Struct
from headrace.durable.journal import AnyRecord, GoneRecord, ReadyRecord

_CANCELLED = ("overdue", "interrupted")
"""Reasons that depend on when a group was generated, not on its prompt."""


class Observation(Struct, frozen=True):
    """The end of a group's generation and scoring."""

    ticket: int
    result: Literal["mixed", "flat", "failed", "unknown"]
    """Whether the group had something to learn from; flat if its rewards did not differ, failed if it ended for a reason of its own, unknown
    if it was cancelled or met an outage."""
    rewards: tuple[float, ...] = ()


def observation_of(record: AnyRecord) -> Observation | None:
    """Returns None for a record that ends no group."""
    match record:
        case ReadyRecord(group=group):
            return Observation(group.ticket, "mixed", tuple(one.reward for one in group.scored))
        case GoneRecord(ticket=ticket, outcome="dropped", reason="no_contrast"):
            return Observation(ticket, "flat", record.rewards)
        case GoneRecord(ticket=ticket, reason=reason):
            own = reason not in OUTAGES and reason not in _CANCELLED
            return Observation(ticket, "failed" if own else "unknown")
    return None


class RewardScale(Struct, frozen=True):
    """The range of rewards in this run, and whether they show contrast."""

    low: float = math.inf
    high: float = -math.inf
    deceives: bool = False
    """Whether equal rewards had contrast, or different ones had none: because of a length penalty or an advantage of the user's, say."""

    def after(self, seen: Observation) -> RewardScale:
        differ = len(set(seen.rewards)) > 1
        return RewardScale(
            low=min(self.low, *seen.rewards, math.inf),
            high=max(self.high, *seen.rewards, -math.inf),
            deceives=self.deceives or (seen.result != "failed" and differ != (seen.result == "mixed")),
        )

    def solved(self, mean: float) -> bool:
        """Whether a group of equal rewards counts as solved: they lie in the upper half of all that were seen."""
        return mean > (self.low + self.high) / 2 if self.low < self.high else mean > 0
