"""The world of a scenario: the real pipeline with simulated engines, a simulated trainer, and prompts and rewards by distribution."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from headrace.commands.plan.parts.engine import SimulatedEngine
from headrace.commands.plan.parts.pool import Replicas
from headrace.commands.plan.parts.shared_cores import Shared
from headrace.commands.plan.parts.simulated_trainer import SimulatedTrainer
from headrace.commands.plan.scenario import Scenario
from headrace.core.protocols import Observer
from headrace.episodes.environments.single_turn import SINGLE_TURN
from headrace.episodes.rollout import RolloutConfig
from headrace.loop.world.surroundings import CompletionLengths, SimulatedScorer, SimulatedTask
from headrace.loop.world.world import World

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
        trainer=SimulatedTrainer(rates.trainer, shared, grain),
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
