"""The real pipeline joined to simulated parts: the one place that knows how.

Buffer, staleness, partial rollouts, accounting, journal and pipeline are those of a run; engine, trainer, task, scorer and the
clock are simulated. Run it inside `virtual_time.run`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.algo.advantage.groups import algorithm_of
from headrace.durable.journal import Journal
from headrace.durable.passes import PassLog
from headrace.observe.facts import Warned, WeightsLive
from headrace.observe.health.waits import Waits
from headrace.orchestration.loops.evaluation import Evaluator
from headrace.orchestration.loops.identity import IdentityProbe
from headrace.orchestration.loops.parts import Parts
from headrace.orchestration.loops.pipeline import Pipeline
from headrace.orchestration.plan import Plan
from headrace.orchestration.store.checkpoints import Checkpoints
from headrace.orchestration.store.snapshots import Snapshots
from headrace.plan.parts.cores import Shared
from headrace.plan.parts.engine import SimulatedEngine
from headrace.plan.parts.pool import Replicas
from headrace.plan.parts.trainer import SimulatedTrainer
from headrace.plan.scenario import Scenario
from headrace.protocols import Engine, Observer, Scorer, Task, Trainer
from headrace.rollouts.buffer import Buffer
from headrace.rollouts.partial import Interrupts
from headrace.rollouts.rollout import RolloutConfig
from headrace.settings.process_config import EvalConfig
from headrace.simulate.surroundings import Lengths, SimulatedScorer, SimulatedTask

NEVER = 1e12
"""Seconds. A plan may be slow; what would stop a run for waiting too long is not what it asks about."""


class World:
    """Parts may be replaced (by some that fail, say) before `join`."""

    def __init__(self, scenario: Scenario, observer: Observer, directory: Path | None = None) -> None:
        """`directory`: where journal and checkpoints go; None keeps none, which is much faster."""
        self.scenario, self.observer, self.directory = scenario, observer, directory
        rates, grain, seed = scenario.rates, scenario.token_grain, scenario.seed
        shared = Shared(rates.engine_slowed, rates.trainer_slowed)
        lengths = Lengths(scenario.completions, scenario.rollout.max_tokens)
        engines = [
            SimulatedEngine(rates.engine, lengths, shared, grain, scenario.mean_completion, scenario.recompute)
            for _ in range(scenario.replicas)
        ]
        self.pool = Replicas(engines)
        self.engine: Engine = engines[0] if scenario.replicas == 1 else self.pool
        self.trainer: Trainer = SimulatedTrainer(rates.trainer, shared, grain)
        self.task: Task = SimulatedTask(scenario.prompts, seed)
        self.scorer: Scorer = SimulatedScorer(
            scenario.latency, scenario.workers, seed, scenario.contrast, scenario.solved, rates.overhead
        )
        self.buffer = Buffer(scenario.staleness, scenario.steps * scenario.staleness.groups_per_step)
        self.stop_after, self.checkpoint_every = NEVER, 0

    @property
    def rollout(self) -> RolloutConfig:
        """In simulated tokens."""
        rollout, grain = self.scenario.rollout, self.scenario.token_grain
        return dataclasses.replace(rollout, max_tokens=-(-rollout.max_tokens // grain))

    def join(self, first_step: int = 0) -> Pipeline:
        scenario, rollout, observer = self.scenario, self.rollout, self.observer
        clock = asyncio.get_running_loop().time
        waits = Waits(observer.record, clock, self.stop_after / 2, self.stop_after)
        interrupts = Interrupts(self.engine, scenario.partial, waits, clock)
        journal, snapshots = self._storage(clock)
        self.parts = Parts(
            task=self.task,
            engine=self.engine,
            interrupts=interrupts,
            trainer=self.trainer,
            scorer=self.scorer,
            observer=observer,
            journal=journal,
            buffer=self.buffer,
            algorithm=algorithm_of(scenario.algo, rollout.max_tokens),
            decode=_no_text,
            waits=waits,
            snapshots=snapshots,
            probe=IdentityProbe([1, 2, 3], scenario.identity_every, 1e-3, observer, clock),
            evaluator=Evaluator(
                interrupts.once, self.scorer, observer, [], EvalConfig(), rollout, _no_text, waits, clock
            ),
        )
        plan = Plan(
            steps=scenario.steps,
            staleness=scenario.staleness,
            rollout=rollout,
            seed=scenario.seed,
            max_skipped_steps=3,
            checkpoint_every=self.checkpoint_every,
            evaluate_every=0,
        )
        return Pipeline(self.parts, plan, clock, first_step)

    def _storage(self, clock: Callable[[], float]) -> tuple[Journal, Snapshots]:
        if self.directory is None:
            return _Unwritten(), _Unsaved()
        passes = PassLog(self.directory, 0, lambda said: self.observer.record(Warned(clock(), said)))
        self.engine.listen(passes.write)
        checkpoints = Checkpoints(self.directory / "checkpoints", keep=2)
        return Journal(self.directory, flushes=False), Snapshots(checkpoints, passes, self.observer, clock)

    async def go_live(self) -> None:
        update = await self.trainer.publish()
        load = await self.engine.load(update)
        self.observer.record(WeightsLive(asyncio.get_running_loop().time(), update, load))

    async def run(self) -> Pipeline:
        """From the first publish to the last step."""
        pipeline = self.join()
        await self.go_live()
        await pipeline.run()
        return pipeline


def _no_text(tokens: Any) -> str:
    return ""


class _Unwritten(Journal):
    """For plans: nobody goes on with a simulated run."""

    def __init__(self) -> None:
        self.position = 0

    def write(self, record: Any) -> None:
        self.position += 1

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Unsaved(Snapshots):
    def __init__(self) -> None:
        self.saved_step = -1

    async def save(self, step: int, parts: Any) -> str:
        self.saved_step = step
        return ""
