"""What the pipeline's loops share."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from headrace.algo.advantage.groups import Algorithm
from headrace.algo.noise import NoiseWatch
from headrace.durable.journal import Journal
from headrace.observe.numbers.state import RunState
from headrace.observe.telemetry import Telemetry
from headrace.orchestration.loops.evaluation import Evaluator
from headrace.orchestration.loops.identity import IdentityProbe
from headrace.orchestration.loops.ledger import Ledger
from headrace.orchestration.loops.minutes import Minutes
from headrace.orchestration.loops.turns import Turns
from headrace.orchestration.store.snapshots import Snapshots
from headrace.protocols import Engine, EnvironmentKind, Scorer, Task, Trainer
from headrace.rollouts.buffer import Buffer
from headrace.rollouts.episodes import Decode
from headrace.rollouts.partial import Interrupts


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything the pipeline joins."""

    task: Task
    engine: Engine
    interrupts: Interrupts
    """The engine, as rollouts see it."""
    trainer: Trainer
    environment: EnvironmentKind
    scorer: Scorer
    telemetry: Telemetry
    journal: Journal
    buffer: Buffer
    ledger: Ledger
    algorithm: Algorithm
    decode: Decode
    snapshots: Snapshots
    probe: IdentityProbe
    evaluator: Evaluator
    turns: Turns = field(default_factory=Turns)
    """At the trainer, where several pipelines share it."""
    noise: NoiseWatch = field(default_factory=NoiseWatch)
    minutes: Minutes = field(default_factory=Minutes)
    """Those that the run may take."""
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
