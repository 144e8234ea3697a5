"""How the loops run: their settings, with the requests and the batches that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.algo.advantage.groups import Algorithm
from headrace.rollouts.rollout import RolloutConfig, name_of, seed_of
from headrace.rollouts.staleness import StalenessConfig, judge
from headrace.settings.process_config import WatchConfig
from headrace.types import Batch, Group, Prompt, Request


@dataclass(frozen=True)
class Plan:
    """The settings that the loops follow, and what follows from them alone: requests, and the batch of a step."""

    steps: int
    staleness: StalenessConfig
    rollout: RolloutConfig
    seed: int
    max_skipped_steps: int
    checkpoint_every: int
    evaluate_every: int
    adapter: str = ""
    """Which adapter is trained; empty where all weights are."""
    watch: WatchConfig = WatchConfig()
    """What may go wrong before the run pauses."""
    save_patience: float = 300.0
    """Seconds for which the last checkpoint is tried again."""

    def batch(self, step: int, groups: Sequence[Group], algorithm: Algorithm) -> Batch:
        """What the trainer is given of groups that were taken for `step`: the same ones whenever it is asked."""
        kept = [judge(group, step, self.staleness) for group in groups]
        assembled = algorithm.assemble(tuple(group for group in kept if group))
        assert len(assembled) == len(groups), "a group that is trained was judged before"
        return Batch(step, assembled, self.rollout.temperature, self.adapter)

    def names(self, ticket: int) -> list[str]:
        """Of its requests."""
        return [name_of(self.adapter, ticket, i) for i in range(self.rollout.group_size)]

    def requests(self, ticket: int, prompt: Prompt) -> list[Request]:
        """The same ones whenever, and in whichever process, they are made."""
        return [
            self.rollout.request(name, prompt, seed_of(self.seed, "rollout", ticket, i), ticket, self.adapter)
            for i, name in enumerate(self.names(ticket))
        ]
