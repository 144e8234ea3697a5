"""The parts that the pipeline's loops share."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from headrace.algo.noise import NoiseWatch
from headrace.algo.training_rows import Algorithm
from headrace.core.protocols import Engine, EnvironmentKind, Scorer, Trainer
from headrace.durable.journal import Journal
from headrace.episodes.notebook import Notebook
from headrace.facts.run_state import RunState
from headrace.facts.telemetry import Telemetry
from headrace.loop.buffer import Buffer
from headrace.loop.curriculum.source import Curriculum
from headrace.loop.evaluation import Evaluator
from headrace.loop.group_source import GroupSource
from headrace.loop.identity import IdentityProbe
from headrace.loop.ledger import Ledger
from headrace.loop.minutes import Minutes
from headrace.loop.partial import Interrupts
from headrace.loop.snapshots import Snapshots
from headrace.loop.turns import Turns
from headrace.weight_sync.delta.efficiency import DeltaWatch


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything the pipeline joins."""

    curriculum: Curriculum
    engine: Engine
    interrupts: Interrupts
    """The engine with the chosen way of interrupting rollouts."""
    notebook: Notebook
    """The notes of environments about rollouts in flight."""
    trainer: Trainer
    groups: GroupSource
    """The place where rollouts are sampled and scored."""
    environment: EnvironmentKind
    scorer: Scorer
    telemetry: Telemetry
    journal: Journal
    buffer: Buffer
    ledger: Ledger
    algorithm: Algorithm
    snapshots: Snapshots
    probe: IdentityProbe
    evaluator: Evaluator
    turns: Turns = field(default_factory=Turns)
    """The turns at the trainer, if several pipelines share it."""
    noise: NoiseWatch = field(default_factory=NoiseWatch)
    deltas: DeltaWatch = field(default_factory=DeltaWatch)
    minutes: Minutes = field(default_factory=Minutes)
    """The time limit of the run."""
    sentinels: Sequence[Callable[[], Awaitable[None]]] = ()
    """Functions that raise the error of another part that the run needs, such as a teacher. Engine and trainer are watched anyway."""


@dataclass(frozen=True)
class EarlierMetrics:
    """The values that a resumed run takes from the metrics of its earlier processes."""

    step: int = 0
    """Number of optimizer steps."""
    evaluated: int = 0
    """The last step whose weights were evaluated during training."""
    reward_drawn: float = math.nan
    """Mean reward of all groups that ended before the last step."""
    rewards: tuple[float, ...] = ()
    """Rewards of the rollouts whose groups ended after that step."""


def earlier_metrics(state: RunState) -> EarlierMetrics:
    during = [one.step for one in state.evals if one.phase == "during"]
    drawn = state.rows[-1].reward_drawn if state.rows else math.nan
    return EarlierMetrics(state.step, max(during, default=0), drawn, tuple(state.drawn_rewards))
