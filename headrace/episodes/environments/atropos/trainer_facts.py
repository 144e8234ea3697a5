"""The properties of a run that environments of Atropos ask its trainer for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainerFacts:
    name: str
    steps: int
    group_size: int
    groups_per_step: int
    longest: int
    """The most tokens of a rollout."""

    @property
    def batch_size(self) -> int:
        """Rollouts of a step."""
        return self.groups_per_step * self.group_size
