"""Simulates a scenario (settings of a run, the speeds of its parts, the lengths of its completions) and summarises the result."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from headrace.algo.config import AlgoConfig
from headrace.commands.plan.parts.engine import Shared, SimulatedEngine
from headrace.commands.plan.parts.pool import Replicas
from headrace.commands.plan.parts.simulated_trainer import SimulatedTrainer
from headrace.commands.plan.rates.rates import Rates
from headrace.core.errors import ConfigError
from headrace.core.protocols import Observer
from headrace.core.reports import EngineStats
from headrace.core.types import Struct
from headrace.episodes.environments.single_turn import SINGLE_TURN
from headrace.episodes.rollout import RolloutConfig
from headrace.facts.facts import GroupEnded, StepTrained, Waited
from headrace.facts.group_numbers import Histogram
from headrace.loop.partial import PartialConfig
from headrace.loop.staleness import StalenessConfig
from headrace.loop.world import virtual_time
from headrace.loop.world.surroundings import (
    CompletionLengths,
    Distribution,
    SimulatedScorer,
    SimulatedTask,
    TurnShape,
    fixed,
)
from headrace.loop.world.world import World

COARSENESS = 16
"""Simulated tokens of a mean completion at most: enough to see in which part of it weights were swapped."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One simulation."""

    rates: Rates
    completions: Distribution
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    partial: PartialConfig = field(default_factory=PartialConfig)
    steps: int = 20
    epochs: int = 1
    """Number of times that a step trains its groups."""
    minibatches: int = 1
    given: float = 0.0
    """Tokens of demonstrations, and of good earlier rollouts, that a step trains beside its groups."""
    replicas: int = 1
    """Engines, each with `rates.engine`."""
    prompts: Distribution = fixed(100)
    latency: Distribution = fixed(0)
    """Seconds that the reward of one rollout takes."""
    workers: int = 1
    """Number of rollouts that are scored at once."""
    contrast: float = 1.0
    """Share of groups whose rewards differ."""
    solved: float | None = None
    """If set, replaces `contrast`: the mean reward of rollouts that are right or wrong, depending on the prompt's difficulty."""
    recompute: bool = False
    """Whether KV caches are computed again after a swap."""
    identity_every: int = 0
    """Versions between two probes of C3."""
    seed: int = 0
    shape: TurnShape = TurnShape()
    """The turns of a rollout; `completions` are then those of one turn."""
    grain: int = 0
    """Real tokens that one simulated token stands for; 0 chooses it. The lag is resolved to multiples of it."""

    @property
    def mean_completion(self) -> float:
        """Mean tokens of a completion, cut off at max_tokens."""
        return self.completions.mean_below(self.rollout.max_tokens)

    @property
    def looks_ahead(self) -> bool:
        """Whether old log-probs or a critic's values are those before a step of several updates (`Gradient.minibatches`)."""
        return self.algo.recipe.old != "sampler" or self.algo.has_critic

    @property
    def token_grain(self) -> int:
        return self.grain or max(1, int(self.mean_completion / COARSENESS))

    @property
    def gpus(self) -> int:
        return self.replicas * self.rates.engine.gpus + self.rates.trainer.gpus


# --- The world of a scenario
# The real pipeline with simulated engines, a simulated trainer, and prompts and rewards by distribution.


NEVER = 1e12
"""Seconds. A plan may be slow, so waits have no deadline."""


@dataclass(kw_only=True)
class PlannedWorld(World):
    pool: Replicas
    """All engines, even if there is only one."""


def planned_world(scenario: Scenario, observer: Observer) -> PlannedWorld:
    """The world of a scenario, which writes nothing to the disk."""
    rates, grain, seed = scenario.rates, scenario.token_grain, scenario.seed
    shared = Shared(rates.engine_slowed, rates.trainer_slowed)
    lengths = CompletionLengths(scenario.completions, scenario.rollout.max_tokens)
    engines = [
        SimulatedEngine(
            rates=rates.engine,
            length=lengths,
            shared=shared,
            grain=grain,
            expected=scenario.mean_completion,
            recompute=scenario.recompute,
        )
        for _ in range(scenario.replicas)
    ]
    pool = Replicas(engines)
    return PlannedWorld(
        None,
        scenario.staleness,
        pool=pool,
        engine=engines[0] if scenario.replicas == 1 else pool,
        trainer=SimulatedTrainer(
            rates.trainer,
            shared,
            grain,
            epochs=scenario.epochs,
            minibatches=scenario.minibatches,
            looks_ahead=scenario.looks_ahead,
            given=scenario.given,
        ),
        task=SimulatedTask(scenario.prompts, seed),
        scorer=SimulatedScorer(
            latency=scenario.latency,
            workers=scenario.workers,
            seed=seed,
            contrast=scenario.contrast,
            solved=scenario.solved,
            overhead=rates.overhead,
        ),
        environment=scenario.shape.kind() if scenario.shape.several else SINGLE_TURN,
        observer=observer,
        steps=scenario.steps,
        seed=seed,
        rollout=_in_grains(scenario),
        algo=scenario.algo,
        partial=scenario.partial,
        decode=_no_text,
        stop_after=NEVER,
        identity_every=scenario.identity_every,
    )


def _in_grains(scenario: Scenario) -> RolloutConfig:
    """The rollout settings, with `max_tokens` in simulated tokens."""
    rollout, grain = scenario.rollout, scenario.token_grain
    return dataclasses.replace(rollout, max_tokens=-(-rollout.max_tokens // grain))


def _no_text(tokens: Any) -> str:
    return ""


# --- measure ------------------------------------------------------------


FILLING = 4
"""Steps at the start that are not counted, in addition to max_lag, because the pipeline fills."""


class Prediction(Struct, frozen=True):
    """The result of a simulation. Except for lengths and totals, it covers the steps after the pipeline has filled."""

    seconds_per_step: float
    tokens_per_second: float
    """Trained tokens per second."""
    sampled_per_second: float
    """Sampled tokens per second."""
    engine_idle: float
    """Share of the time in which a replica was idle, 0 to 1."""
    trainer_idle: float
    running: float
    """Mean number of sequences that a replica decodes at once while it works."""
    lags: dict[int, float]
    """Share of the trained tokens by lag."""
    lag_mean: float
    lag_max: int
    step_seconds: tuple[float, ...]
    """Seconds of every step from the first on, measured from the step before."""
    drawn_length: float
    """Mean tokens that a rollout sampled, over all groups that ended."""
    trained_length: float
    """Mean tokens over the trained groups. If it differs from `drawn_length`, the settings are biased against long completions."""
    dropped: dict[str, int]
    """Groups that were not trained, by reason."""
    gpus: int
    waits: dict[str, float]
    """Seconds of waiting per step, by owner and awaited thing."""
    seconds: float
    """Seconds of the whole run."""
    rollouts: int

    @property
    def tokens_per_gpu(self) -> float:
        """Trained tokens per second and GPU."""
        return self.tokens_per_second / self.gpus

    def cost(self, price: float, steps: int) -> float:
        """Returns the cost of `steps` steps. `price`: of one GPU for an hour."""
        return self.seconds_per_step * steps / 3600 * self.gpus * price


class _Step(NamedTuple):
    """The counters at the end of a step."""

    t: float
    tokens: int
    lags: dict[int, int]
    trainer: float
    """Seconds of the trainer's work so far."""
    engine: EngineStats


class Gauge:
    """An observer that keeps the numbers that a prediction needs, but no tokens."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self.waits: list[Waited] = []
        self.dropped: Counter[str] = Counter()
        self.drawn, self.trained = Histogram(), Histogram()
        self.pool: Replicas | None = None
        self._trainer = 0.0

    def record(self, fact: Any) -> None:
        match fact:
            case StepTrained():
                assert self.pool is not None
                self.trained.add(rollout.episode.sampled for group in fact.groups for rollout in group.scored)
                self.steps.append(
                    _Step(fact.t, fact.report.loss_tokens, fact.lags, self._trainer, self.pool.snapshot())
                )
            case GroupEnded():
                self.drawn.add(fact.lengths)
                if fact.outcome != "ready":
                    self.dropped[fact.reason] += 1
            case Waited(owner="controller"):
                self._trainer += fact.seconds
            case Waited(owner="trainer" | "admission" | "delivery"):
                self.waits.append(fact)


def margins(scenario: Scenario) -> tuple[int, int]:
    """Returns the numbers of steps that are not counted at the start, while the pipeline fills, and at the end, when it draws no new
    prompts."""
    return FILLING + scenario.staleness.max_lag, scenario.staleness.max_lag + 1


def predict(scenario: Scenario, skip: int | None = None, tail: int | None = None) -> Prediction:
    """Simulates a scenario and counts all steps except the first `skip` and the last `tail` (None: those of `margins`).

    Raises ConfigError if fewer than two steps are left."""
    first, last = margins(scenario)
    first, last = first if skip is None else skip, last if tail is None else tail
    if scenario.steps - first - last < 2:
        raise ConfigError(
            f"{scenario.steps} steps are too few, because {first} fill the pipeline and {last} empty it; raise --steps"
        )
    gauge = Gauge()
    world = planned_world(scenario, gauge)
    gauge.pool = world.pool
    virtual_time.run(world.run())
    return _summary(scenario, gauge, gauge.steps[first - 1 : len(gauge.steps) - last] if first else gauge.steps)


def _summary(scenario: Scenario, gauge: Gauge, steps: Sequence[_Step]) -> Prediction:
    """Summarises a simulation. `steps`: the counted steps, and the one before them."""
    begin, end, counted = steps[0], steps[-1], steps[1:]
    seconds = end.t - begin.t
    lags: Counter[int] = Counter()
    for step in counted:
        lags.update(step.lags)
    total = lags.total()
    engine_busy = end.engine.busy_seconds - begin.engine.busy_seconds
    sampled = end.engine.sampled_tokens - begin.engine.sampled_tokens
    passes = end.engine.steps - begin.engine.steps
    real = sum(step.tokens for step in gauge.steps) / gauge.trained.count
    trained, drawn = gauge.trained.mean or 1.0, gauge.drawn.mean or 1.0
    return Prediction(
        seconds_per_step=seconds / len(counted),
        tokens_per_second=sum(step.tokens for step in counted) / seconds,
        sampled_per_second=sampled / seconds,
        engine_idle=max(0.0, 1 - engine_busy / seconds),
        trainer_idle=max(0.0, 1 - (end.trainer - begin.trainer) / seconds),
        running=sampled / passes if passes else 0.0,
        lags={lag: count / total for lag, count in sorted(lags.items())},
        lag_mean=sum(lag * count for lag, count in lags.items()) / total,
        lag_max=max(lags),
        step_seconds=tuple(after.t - before.t for before, after in pairwise(gauge.steps)),
        drawn_length=real * drawn / trained,
        trained_length=real,
        dropped=dict(gauge.dropped),
        gpus=scenario.gpus,
        waits=_waits(gauge, begin.t, end.t, len(counted)),
        seconds=gauge.steps[-1].t,
        rollouts=gauge.drawn.count,
    )


def _waits(gauge: Gauge, since: float, until: float, steps: int) -> dict[str, float]:
    totals: defaultdict[str, float] = defaultdict(float)
    for wait in gauge.waits:
        if since < wait.t <= until:
            totals[f"{wait.owner} for {wait.what}"] += wait.seconds
    return {name: seconds / steps for name, seconds in sorted(totals.items(), key=lambda pair: -pair[1])}
