"""How the loops run: their settings, with the requests and the batches that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.algo.advantage.groups import Algorithm
from headrace.durable.journal import JournalStep
from headrace.rollout_key import RolloutKey
from headrace.rollouts.episodes import TurnAsked, name_of_turn
from headrace.rollouts.rollout import RolloutConfig, seed_of
from headrace.rollouts.staleness import StalenessConfig, judge
from headrace.settings.process_config import WatchConfig
from headrace.types import Batch, Group, Prompt, Request


@dataclass(frozen=True, kw_only=True)
class LoopPlan:
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

    def batch(self, step: int, judged: tuple[Group, ...], algorithm: Algorithm) -> Batch:
        """What the trainer is given for `step`. `judged`: as `Buffer.take` returns them, in the order in which they were taken."""
        return Batch(step, algorithm.assemble(judged), self.rollout.temperature, self.adapter, steps=self.steps)

    def batch_again(self, step: JournalStep, algorithm: Algorithm) -> Batch:
        """The same batch, made of what the journal holds: groups as they were finished, before anything of them was trimmed."""
        judged = [judge(group, step.step, self.staleness) for group in step.groups]
        return self.batch(step.step, tuple(group for group in judged if group), algorithm)

    def request(self, ticket: int, prompt: Prompt, asked: TurnAsked) -> Request:
        """The request for a turn: the same one whenever, and in whichever process, the turn is asked for."""
        return self._request(name_of_turn(ticket, prompt, asked, self.adapter), asked.context)

    def recorded(self, key: RolloutKey) -> Request:
        """The request for a turn that was recorded, as far as its records have to be read: without the tokens before it."""
        return self._request(key, ())

    def _request(self, key: RolloutKey, context: tuple[int, ...]) -> Request:
        later = (key.turn,) if key.turn else ()  # seeds of first turns are those of before there were others
        seed = seed_of(self.seed, "rollout", key.ticket, key.index, *later)
        return self.rollout.request(str(key), context, seed, priority=key.ticket, adapter=self.adapter)

    def environment_seeds(self, ticket: int) -> list[int]:
        """Those of a group's environments, one for each rollout."""
        return [seed_of(self.seed, "environment", ticket, i) for i in range(self.rollout.group_size)]
