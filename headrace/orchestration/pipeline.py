"""The pipeline: reads like the algorithm, knows protocols only.

            tickets                     rollouts          scored groups          batches
  task ───────────────▶ rollout ───────────────▶ scoring ─────────────▶ buffer ───────────▶ trainer
              ▲            │ ▲                                            ▲                     │
              │            ▼ │ completions (tokens, logprobs, versions)   │ frees slots         │ WeightUpdate
              │          engine ◀─────────────── weight sync ◀────────────┴─────────────────────┘
              └─────────────── a slot is free only after the weights its group trained are live in the engine

  loop            waits for                               woken by
  ----            ---------                               --------
  admit           a free slot (`Buffer.draw`)             `release` after a swap; a group that ended otherwise
  roll_group      the engine, then the scorer             completions; rewards                 (one task per ticket)
  train           P groups (`Buffer.take`)                `put` of a scored group
  deliver         the engine's swap (`Engine.load`)       the first gap between two forward passes
  sentinels       the end of a worker process             the operating system

`max_lag = 0` is synchronous training; there is no second trainer for it. Shutdown is `Buffer.close()`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from headrace.algo.groups import Algorithm
from headrace.buffer import Buffer
from headrace.errors import IdentityError, TrainingError, WorkerDied, first_error
from headrace.observe.facts import TicketDrawn, Warned, WeightsLive
from headrace.observe.waits import Waits
from headrace.orchestration.evaluation import Evaluator
from headrace.orchestration.identity import IdentityProbe
from headrace.orchestration.outcomes import Outcome, Rolled, step_fact
from headrace.orchestration.snapshots import Snapshots
from headrace.protocols import Engine, Observer, Scorer, Task, Trainer
from headrace.reports import TrainReport
from headrace.rollout import Decode, RolloutConfig, roll_out, seed_of
from headrace.types import Batch, Episode, Failure, Group, Prompt, Scored
from headrace.weights import WeightUpdate

T = TypeVar("T")


@dataclass(frozen=True)
class Parts:
    """Everything the pipeline joins."""

    task: Task
    engine: Engine
    trainer: Trainer
    scorer: Scorer
    observer: Observer
    buffer: Buffer
    algorithm: Algorithm
    decode: Decode
    waits: Waits
    snapshots: Snapshots
    probe: IdentityProbe
    evaluator: Evaluator


@dataclass(frozen=True)
class Plan:
    """What to do with them."""

    steps: int
    groups_per_step: int
    rollout: RolloutConfig
    seed: int
    max_skipped_steps: int
    checkpoint_every: int
    evaluate_every: int
    adapter: str = ""
    """Which adapter is trained; empty where all weights are."""


class Pipeline:
    def __init__(self, parts: Parts, plan: Plan, clock: Callable[[], float], first_step: int = 0) -> None:
        self._parts, self._plan, self._clock = parts, plan, clock
        self._record = parts.observer.record
        self.step = first_step
        self.interrupted = False
        self.trainer_busy = 0.0
        """Seconds in step, publish and save."""
        self._rollouts: set[asyncio.Task[None]] = set()
        self._evaluations: list[asyncio.Task[None]] = []
        self._barren = 0
        self._skipped = 0
        self._rewards: list[float] = []
        """Of the groups that ended since the last step."""
        self._reward_drawn = math.nan

    def interrupt(self) -> None:
        """Leave at the next step's end, with a checkpoint. What is in flight is drawn again after a resume."""
        self.interrupted = True
        self._parts.buffer.close()

    async def run(self) -> None:
        """Train until the plan is fulfilled or `interrupt` was called. The current weights must be live already.

        Raises the first `HeadraceError` of any loop; while the trainer lives, a checkpoint is written before.
        """
        try:
            async with asyncio.TaskGroup() as loops:
                await self._run(loops)
        except BaseExceptionGroup as group:
            error = first_error(group)
            if isinstance(error, (TrainingError, IdentityError)) or (
                isinstance(error, WorkerDied) and error.who != "trainer"
            ):
                await self._checkpoint()
            raise error from group

    async def _run(self, loops: asyncio.TaskGroup) -> None:
        parts = self._parts
        background = [loops.create_task(parts.engine.watch()), loops.create_task(parts.trainer.watch())]
        background.append(loops.create_task(self._admit(loops)))
        await self._train(loops)
        parts.buffer.close()
        if self.interrupted:
            await self._checkpoint()
            background += self._evaluations
        for task in [*background, *self._rollouts]:
            task.cancel()

    # -- admit ----------------------------------------------------------------------------------------------------------

    async def _admit(self, loops: asyncio.TaskGroup) -> None:
        buffer, waits = self._parts.buffer, self._parts.waits
        while True:
            async with waits.named("admission", "a free slot (weights live, or a group ended)"):
                ticket = await buffer.draw()
            if ticket is None:
                return
            again = buffer.next_again()
            prompt = again or self._parts.task.draw()
            buffer.start(ticket, prompt, again is not None)
            self._record(TicketDrawn(self._clock(), ticket, prompt.id, again is not None))
            task = loops.create_task(self._roll_group(ticket, prompt, again is not None))
            self._rollouts.add(task)
            task.add_done_callback(self._rollouts.discard)

    # -- roll_group -----------------------------------------------------------------------------------------------------

    async def _roll_group(self, ticket: int, prompt: Prompt, again: bool) -> None:
        started = self._clock()
        scored, failures = await self._rollouts_of(ticket, prompt)
        rolled = Rolled(ticket, prompt, scored, failures, self._clock() - started)
        self._rewards += [one.reward for one in scored]
        algorithm = self._parts.algorithm
        if len(scored) < algorithm.min_rollouts:
            self._end(rolled, "failed", rolled.commonest_failure)
            return
        rows = algorithm.rows(prompt, scored)
        if not any(any(row.mask) for row in rows):
            self._end(rolled, "dropped", "overlong")
        elif algorithm.needs_contrast and not any(any(row.advantages) for row in rows):
            self._end(rolled, "dropped", "no_contrast")
        else:
            self._barren = 0
            self._parts.buffer.put(Group(ticket, prompt, scored, rows, failures, again))
            self._record(rolled.ended(self._clock(), "ready"))

    async def _rollouts_of(self, ticket: int, prompt: Prompt) -> tuple[tuple[Scored, ...], tuple[Failure, ...]]:
        parts, rollout = self._parts, self._plan.rollout
        room = parts.engine.capabilities.context_length
        if len(prompt.tokens) + rollout.max_tokens > room:
            detail = f"prompt of {len(prompt.tokens)} tokens + max_tokens {rollout.max_tokens} > context of {room}"
            return (), (Failure("prompt_too_long", detail),) * rollout.group_size
        async with parts.waits.named("rollouts", "the engine"):
            requests = [
                rollout.request(
                    f"{self._name(ticket)}/{i}",
                    prompt,
                    seed_of(self._plan.seed, "rollout", ticket, i),
                    ticket,
                    self._plan.adapter,
                )
                for i in range(rollout.group_size)
            ]
            results = await roll_out(parts.engine, prompt, requests, parts.decode)
        episodes = [result for result in results if isinstance(result, Episode)]
        judged: list[Scored | Failure] = []
        if episodes:
            async with parts.waits.named("rollouts", "the scorer"):
                judged = await parts.scorer.score(prompt, episodes)
        scored = tuple(result for result in judged if isinstance(result, Scored))
        return scored, tuple(result for result in [*results, *judged] if isinstance(result, Failure))

    def _name(self, ticket: int) -> str:
        """Of its requests: unique in an engine that serves several adapters."""
        return f"{self._plan.adapter}:t{ticket}" if self._plan.adapter else f"t{ticket}"

    def _end(self, rolled: Rolled, outcome: Outcome, reason: str) -> None:
        self._parts.buffer.end(rolled.ticket, outcome, reason, rolled.failures)
        self._record(rolled.ended(self._clock(), outcome, reason))
        self._barren += 1
        if self._barren >= self._plan.rollout.patience:
            raise TrainingError(
                f"{self._barren} groups in a row could not be trained; the last one: {reason} "
                f"({rolled.detail or 'all rewards of the group were equal'}). With no_contrast the task is too hard or too "
                "easy for this model: change the task, the reward, or raise rollout.group_size; rollout.patience sets how "
                "many groups may pass."
            )

    # -- train ----------------------------------------------------------------------------------------------------------

    async def _train(self, loops: asyncio.TaskGroup) -> None:
        parts, plan = self._parts, self._plan
        delivery: asyncio.Task[None] | None = None
        while self.step < plan.steps:
            waited = self._clock()
            async with parts.waits.named("trainer", f"{plan.groups_per_step} scored groups"):
                groups = await parts.buffer.take(plan.groups_per_step)
            if groups is None:
                break
            waited = self._clock() - waited
            groups = parts.algorithm.assemble(groups)
            batch = Batch(self.step, groups, plan.rollout.temperature, plan.adapter)
            report = await self._busy(parts.trainer.step(batch), "step")
            if report.skipped:
                self._skip(report, groups)
                continue
            self._skipped = 0
            self.step = report.version
            parts.buffer.trained(groups)
            self._record(step_fact(self._clock(), report, groups, self._mean_drawn(), waited))
            if delivery:  # a publish overwrites the slot before last: the last one must be live
                async with parts.waits.named("trainer", "the swap in the engine (of the version before)"):
                    await delivery
            delivery = await self._publish(loops, groups)
            if plan.checkpoint_every and self.step % plan.checkpoint_every == 0:
                await self._checkpoint()
        if delivery:
            await delivery
        if self.step >= plan.steps:
            await self._checkpoint()

    async def _publish(self, loops: asyncio.TaskGroup, groups: tuple[Group, ...]) -> asyncio.Task[None]:
        update = await self._busy(self._parts.trainer.publish(self._plan.adapter), "publish")
        probed = self._parts.probe.trainer_side(self._parts.trainer, update.version)
        expected = await self._busy(probed, "probe")
        return loops.create_task(self._deliver(loops, update, groups, expected))

    async def _deliver(
        self, loops: asyncio.TaskGroup, update: WeightUpdate, groups: tuple[Group, ...], expected: list[float] | None
    ) -> None:
        parts = self._parts
        async with parts.waits.named("delivery", "the swap in the engine"):
            load = await parts.engine.load(update)
        self._record(WeightsLive(self._clock(), update, load))
        parts.buffer.release(groups)
        async with parts.waits.named("delivery", "the engine (probe)"):
            await parts.probe.engine_side(parts.engine, update.version, expected)
        every, version = self._plan.evaluate_every, update.version
        if every and version % every == 0 and version < self._plan.steps:
            self._evaluations.append(loops.create_task(self._evaluate(version)))

    async def _evaluate(self, version: int) -> None:
        await self._parts.evaluator.measure("during", version)

    def _mean_drawn(self) -> float:
        """Of what ended since the last step; the value before when nothing did."""
        if self._rewards:
            self._reward_drawn = sum(self._rewards) / len(self._rewards)
            self._rewards.clear()
        return self._reward_drawn

    def _skip(self, report: TrainReport, groups: tuple[Group, ...]) -> None:
        for group in groups:
            self._parts.buffer.end(group.ticket, "dropped", report.skipped)
            self._record(
                Rolled(group.ticket, group.prompt, group.scored).ended(self._clock(), "dropped", report.skipped)
            )
        self._skipped += 1
        message = f"step {report.step} was skipped: {report.skipped}; the weights are unchanged, its groups are dropped"
        self._record(Warned(self._clock(), message))
        if self._skipped >= self._plan.max_skipped_steps:
            raise TrainingError(
                f"{self._skipped} steps in a row were skipped ({report.skipped}). Lower train.learning_rate or "
                "train.max_grad_norm, or look at the rewards of these groups in the report; "
                "train.max_skipped_steps sets how many may pass."
            )

    async def _checkpoint(self) -> None:
        await self._busy(self._parts.snapshots.save(self.step, self._parts), "checkpoint")

    async def _busy(self, work: Awaitable[T], what: str) -> T:
        """Awaits the trainer's work under a named wait, and counts its time as busy."""
        started = self._clock()
        async with self._parts.waits.named("controller", f"the trainer ({what})"):
            result = await work
        self.trainer_busy += self._clock() - started
        return result
