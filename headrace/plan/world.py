"""The real pipeline joined to simulated parts: the one place that knows how.

Buffer, staleness, partial rollouts, accounting, journal and pipeline are those of a run; engine, trainer, task, scorer and the
clock are simulated. Run it inside `virtual_time.run`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

from headrace.algo.advantage.groups import algorithm_of
from headrace.durable.journal import Journal
from headrace.durable.pass_log import PassLog
from headrace.observe.health.waits import Waits
from headrace.observe.telemetry import Telemetry
from headrace.orchestration.assembly import assemble, go_live, restore_state
from headrace.orchestration.loop_plan import LoopPlan
from headrace.orchestration.loops.identity import IdentityProbe
from headrace.orchestration.loops.pipeline import Pipeline
from headrace.orchestration.store.checkpoints import Checkpoints
from headrace.orchestration.store.snapshots import Snapshots
from headrace.plan.parts.cores import Shared
from headrace.plan.parts.engine import SimulatedEngine
from headrace.plan.parts.pool import Replicas
from headrace.plan.parts.trainer import SimulatedTrainer
from headrace.plan.scenario import Scenario
from headrace.protocols import Engine, Observer, Scorer, Task, Trainer
from headrace.rollouts.buffer import Buffer
from headrace.rollouts.rollout import RolloutConfig
from headrace.settings.process_config import EvalConfig
from headrace.simulate.surroundings import CompletionLengths, SimulatedScorer, SimulatedTask

NEVER = 1e12
"""Seconds. A plan may be slow; what would stop a run for waiting too long is not what it asks about."""


class World:
    """Parts may be replaced (by some that fail, say) before `join`."""

    def __init__(self, scenario: Scenario, observer: Observer, directory: Path | None = None) -> None:
        """`directory`: where journal and checkpoints go; None keeps none, which is much faster."""
        self.scenario, self.observer, self.directory = scenario, observer, directory
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
        self.pool = Replicas(engines)
        self.engine: Engine = engines[0] if scenario.replicas == 1 else self.pool
        self.trainer: Trainer = SimulatedTrainer(rates.trainer, shared, grain)
        self.task: Task = SimulatedTask(scenario.prompts, seed)
        self.scorer: Scorer = SimulatedScorer(
            latency=scenario.latency,
            workers=scenario.workers,
            seed=seed,
            contrast=scenario.contrast,
            solved=scenario.solved,
            overhead=rates.overhead,
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
        telemetry = Telemetry(observer.record, clock, waits)
        journal, snapshots = self._storage(telemetry)
        plan = LoopPlan(
            steps=scenario.steps,
            staleness=scenario.staleness,
            rollout=rollout,
            seed=scenario.seed,
            max_skipped_steps=3,
            checkpoint_every=self.checkpoint_every,
            evaluate_every=0,
        )
        restored = restore_state(
            plan=plan,
            task=self.task,
            engine=self.engine,
            partial=scenario.partial,
            telemetry=telemetry,
            saved=None,
            buffer=self.buffer,
        )
        self.parts = assemble(
            plan=plan,
            restored=restored,
            telemetry=telemetry,
            task=self.task,
            engine=self.engine,
            trainer=self.trainer,
            scorer=self.scorer,
            evaluated_by=self.scorer,
            held_out=[],
            evaluation=EvalConfig(),
            algorithm=algorithm_of(scenario.algo, rollout.max_tokens),
            decode=_no_text,
            journal=journal,
            snapshots=snapshots,
            probe=IdentityProbe([1, 2, 3], scenario.identity_every, 1e-3, telemetry),
        )
        return Pipeline(self.parts, plan, first_step)

    def _storage(self, telemetry: Telemetry) -> tuple[Journal, Snapshots]:
        if self.directory is None:
            return _Unwritten(), _Unsaved()
        passes = PassLog(self.directory, 0, telemetry.warn)
        self.engine.listen(passes.write)
        checkpoints = Checkpoints(self.directory / "checkpoints", keep=2)
        return Journal(self.directory, flushes=False), Snapshots(checkpoints, passes, telemetry)

    async def run(self) -> Pipeline:
        """From the first publish to the last step."""
        pipeline = self.join()
        await go_live(self.parts)
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
