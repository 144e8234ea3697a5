"""The settings of the loops, and the requests and batches that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headrace.algo.recipe_parts import Experience
from headrace.algo.training_rows import Algorithm
from headrace.core.batches import Batch, Demonstration, Group
from headrace.core.types import Constraint, Prompt, Request, RolloutKey
from headrace.durable.journal import JournalStep
from headrace.episodes.episodes import name_of_turn
from headrace.episodes.rollout import RolloutConfig, seed_of
from headrace.episodes.rollout_session import TurnAsked
from headrace.loop.curriculum_config import CurriculumConfig
from headrace.loop.staleness import StalenessConfig, judge
from headrace.settings.process_config import WatchConfig


@dataclass(frozen=True, kw_only=True)
class LoopPlan:
    """The settings of the loops. Requests, and the batch of a step, follow from them alone."""

    steps: int
    staleness: StalenessConfig
    rollout: RolloutConfig
    seed: int
    max_skipped_steps: int
    checkpoint_every: int
    evaluate_every: int
    adapter: str = ""
    """The adapter that is trained; empty if all weights are."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """The choice of the next prompt."""
    watch: WatchConfig = WatchConfig()
    """How many failures are allowed before the run pauses."""
    save_patience: float = 300.0
    """Seconds for which a failed last checkpoint is tried again."""
    kv_gib: float = 0.0
    """`engine.kv_gib`, for advice."""
    remembers: bool = False
    """Whether rewards are kept by prompt, for an advantage that asks for those of earlier groups."""
    experience: Experience = Experience()
    """The rollouts that are kept by prompt, and trained again with its next group."""

    demonstrations: Callable[[int], tuple[Demonstration, ...]] = lambda step: ()
    """The given answers that are trained beside the groups of a step, unless they are those of its questions (`Algorithm.answers`)."""

    def batch(self, step: int, judged: tuple[Group, ...], algorithm: Algorithm) -> Batch:
        """The trainer's batch for `step`. `judged`: the groups that `Buffer.take` returned, in the order in which they were taken."""
        return Batch(
            step,
            algorithm.assemble(judged),
            self.rollout.temperature,
            self.adapter,
            steps=self.steps,
            demonstrations=self.demonstrations(step) or algorithm.answers(judged),
        )

    def batch_again(self, step: JournalStep, algorithm: Algorithm) -> Batch:
        """Makes the batch of a step again from the journal, which holds the groups as they were finished, before any of them was trimmed."""
        judged = [judge(group, step.step, self.staleness) for group in step.groups]
        batch = self.batch(step.step, tuple(group for group in judged if group), algorithm)
        return msgspec.structs.replace(batch, demonstrations=step.demonstrations)

    def request(self, ticket: int, prompt: Prompt, asked: TurnAsked) -> Request:
        """The request for a turn. It is the same at every time and in every process."""
        key = name_of_turn(ticket, prompt, asked, self.adapter)
        return asked.limited(self._request(key, asked.context, asked.constraint))

    def recorded(self, key: RolloutKey) -> Request:
        """The request of a recorded turn, without the context tokens, which are not needed to read its records."""
        return self._request(key, ())

    def _request(self, key: RolloutKey, context: tuple[int, ...], constraint: Constraint | None = None) -> Request:
        later = (
            (key.turn,) if key.turn else ()
        )  # first turns keep the seeds that they had before there were several turns
        seed = seed_of(self.seed, "rollout", key.ticket, key.index, *later)
        return self.rollout.request(str(key), context, seed, key.ticket, self.adapter, constraint=constraint)

    def environment_seeds(self, ticket: int, prompt: Prompt) -> list[int]:
        """The seeds of a group's environments, one for each rollout."""
        return [seed_of(self.seed, "environment", ticket, i) for i in range(self.rollout.of(prompt))]
