"""What the pipeline's loops share."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from headrace.algo.groups import Algorithm
from headrace.algo.noise import NoiseWatch
from headrace.buffer import Buffer
from headrace.observe.journal import Journal
from headrace.observe.state import RunState
from headrace.observe.waits import Waits
from headrace.orchestration.evaluation import Evaluator
from headrace.orchestration.identity import IdentityProbe
from headrace.orchestration.snapshots import Snapshots
from headrace.orchestration.turns import Turns
from headrace.partial import Interrupts
from headrace.process_config import WatchConfig
from headrace.protocols import Engine, Observer, Scorer, Task, Trainer
from headrace.rollout import Decode, RolloutConfig, name_of, seed_of
from headrace.staleness import StalenessConfig, judge
from headrace.types import Batch, Group, Prompt, Request


@dataclass(frozen=True)
class Parts:
    """Everything the pipeline joins."""

    task: Task
    engine: Engine
    interrupts: Interrupts
    """The engine, as rollouts see it."""
    trainer: Trainer
    scorer: Scorer
    observer: Observer
    journal: Journal
    buffer: Buffer
    algorithm: Algorithm
    decode: Decode
    waits: Waits
    snapshots: Snapshots
    probe: IdentityProbe
    evaluator: Evaluator
    turns: Turns = field(default_factory=Turns)
    """At the trainer, where several pipelines share it."""
    noise: NoiseWatch = field(default_factory=NoiseWatch)
    sentinels: Sequence[Callable[[], Awaitable[None]]] = ()
    """Each raises what ends something beside engine and trainer that the run cannot do without: a teacher, say."""


@dataclass(frozen=True)
class Told:
    """What the metrics have of the processes before this one, in a run that goes on."""

    step: int = 0
    """Optimizer steps."""
    evaluated: int = 0
    """The last step whose weights were measured while training went on."""
    reward_drawn: float = math.nan
    """Of the last step."""
    rewards: tuple[float, ...] = ()
    """Of the rollouts whose groups ended since that step."""


def told_of(state: RunState) -> Told:
    during = [one.step for one in state.evals if one.phase == "during"]
    drawn = state.rows[-1].reward_drawn if state.rows else math.nan
    return Told(state.step, max(during, default=0), drawn, tuple(state.drawn_rewards))


@dataclass(frozen=True)
class Plan:
    """What to do with them."""

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
        return Batch(step, assembled, self.rollout.temperature, self.adapter, steps=self.steps)

    def names(self, ticket: int) -> list[str]:
        """Of its requests."""
        return [name_of(self.adapter, ticket, i) for i in range(self.rollout.group_size)]

    def requests(self, ticket: int, prompt: Prompt) -> list[Request]:
        """The same ones whenever, and in whichever process, they are made."""
        return [
            self.rollout.request(name, prompt, seed_of(self.seed, "rollout", ticket, i), ticket, self.adapter)
            for i, name in enumerate(self.names(ticket))
        ]
