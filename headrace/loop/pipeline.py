"""The pipeline. It reads like the algorithm, and knows protocols only.

            tickets                     rollouts          scored groups          batches
  task ───────────────▶ rollout ───────────────▶ scoring ─────────────▶ buffer ───────────▶ trainer
              ▲            │ ▲                                            ▲                     │
              │            ▼ │ completions (tokens, logprobs, versions)   │ frees slots         │ WeightUpdate
              │          engine ◀─────────────── weight sync ◀────────────┴─────────────────────┘
              └─────────────── a slot is free only after the weights its group trained are live in the engine

The loops are `Rolling.admit`, `Rolling._roll_group` (a task for each ticket), `Pipeline._train`, `Pipeline._deliver` (a task for each version),
`Saving._write` (a task for each checkpoint) and `_sentinel`. Each says what it consumes, what it waits for, and what unblocks it.

`max_lag = 0` is synchronous training; there is no second trainer for it. Shutdown is `Buffer.close()`. The groups and the result of a step
are in the journal before the buffer changes. So a run that is killed anywhere is resumed from the newest checkpoint by repeating the
journaled steps (`redo`), and loses nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

from msgspec.structs import replace

from headrace.algo.noise import NoiseWatch
from headrace.algo.training_rows import Algorithm
from headrace.core.batches import Failure, Group
from headrace.core.errors import HeadraceError, IdentityError, TrainingError, WorkerDied, first_error
from headrace.core.protocols import Engine, EnvironmentKind, Scorer, Trainer
from headrace.core.reports import TrainReport
from headrace.core.rewards import usable
from headrace.core.types import Prompt
from headrace.durable.journal import Journal, JournalStep
from headrace.episodes.rollout_session import Notebook
from headrace.facts.run_state import RunState
from headrace.facts.telemetry import Telemetry
from headrace.loop.buffer import Buffer
from headrace.loop.checkpoints import UNSAVED, Moment, Snapshots
from headrace.loop.curriculum import Curriculum
from headrace.loop.evaluation import Evaluator, IdentityProbe
from headrace.loop.ledger import FirstTexts, Ledger, Rolled, rolled_of, step_fact
from headrace.loop.loop_plan import LoopPlan
from headrace.loop.own_groups import GroupSource
from headrace.loop.partial import Interrupts
from headrace.loop.recovery import unlike
from headrace.loop.run_limits import Budgets, Leaving, Minutes, until_saved
from headrace.loop.staleness import judge
from headrace.loop.turns import DeviceShare
from headrace.weight_sync.delta.efficiency import DeltaWatch

# --- The parts that the loops share


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
    turns: DeviceShare = field(default_factory=DeviceShare)
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
    during = [evaluation.step for evaluation in state.evals if evaluation.phase == "during"]
    drawn = state.rows[-1].reward_drawn if state.rows else math.nan
    return EarlierMetrics(state.step, max(during, default=0), drawn, tuple(state.drawn_rewards))


# --- Training, and the delivery of its weights


_REMEDIES = {
    "all_rejected": "The bounds of algo.correction, or the clip, reject every token: widen them, lower staleness.max_lag, or use "
    "another algo.name"
}
_OTHERWISE = "Lower train.learning_rate or train.max_grad_norm, or check the rewards of these groups in the report"
"""The remedy for all other reasons of a skipped step."""

_GONE = "but the metrics have none; those weights no longer exist, so"

T = TypeVar("T")
P = ParamSpec("P")


class Pipeline:
    """One training run: it starts the loops, trains, delivers the weights, and ends the run with a checkpoint."""

    def __init__(
        self, parts: Parts, plan: LoopPlan, first_step: int = 0, earlier: EarlierMetrics | None = None
    ) -> None:
        """`earlier`: what the metrics hold of earlier processes, in a resumed run."""
        self._parts, self._plan, self._clock = parts, plan, parts.telemetry.clock
        self._record, self._warn = parts.telemetry.record, parts.telemetry.warn
        self._earlier = earlier or EarlierMetrics()
        self._rolling = Rolling(parts, plan, self._earlier)
        self.step = first_step
        self.worked = 0.0
        """Seconds from the beginning of training to the last step."""
        self._began = 0.0
        self._leaving = Leaving()
        self._saving = Saving(parts, self._busy)
        self._evaluations: list[asyncio.Task[Any]] = []
        self._under_way: asyncio.Future[Any] | None = None
        """The step, or the beginning or end of a checkpoint, that is running, see `_whole`."""
        self._skipped = 0

    def interrupt(self) -> None:
        """Ends the run after the current step, with a checkpoint that contains the groups in flight."""
        self._leaving.begin()
        self._parts.buffer.close()

    @property
    def interrupted(self) -> bool:
        return self._leaving.begun

    async def run(self) -> None:
        """Trains until the plan is fulfilled or `interrupt` is called. The current weights must be live already.

        Raises the first `HeadraceError` of any loop. If the trainer is alive, a checkpoint is written before that.
        """
        self._began = self._clock()
        try:
            async with asyncio.TaskGroup() as loops:
                await self._run(loops)
        except BaseExceptionGroup as group:
            error = first_error(group)
            if isinstance(error, (TrainingError, IdentityError)) or (
                isinstance(error, WorkerDied) and error.who != "trainer"
            ):
                await self._last_checkpoint()
            raise error from group
        finally:
            if self._under_way:
                self._under_way.cancel()
            self._saving.cancel()

    async def _run(self, loops: asyncio.TaskGroup) -> None:
        """Starts sentinels and admission, trains in this task, and stops the others when training is over."""
        parts = self._parts
        background = [
            loops.create_task(_sentinel(watch)) for watch in (parts.engine.watch, parts.trainer.watch, *parts.sentinels)
        ]
        background.append(loops.create_task(self._rolling.admit(loops)))
        await self._catch_up(loops)
        await self._train(loops)
        parts.buffer.close()
        if self.interrupted:
            await self._whole(self._saving.whole(self.step))
            background += self._evaluations
        self._rolling.stop()
        for task in background:
            task.cancel()

    # -- training -------------------------------------------------------------------------------------------------------

    async def _train(self, loops: asyncio.TaskGroup) -> None:
        """The loop of optimizer steps: takes a batch of groups, trains it, and begins the delivery of the weights.

        Consumes: ready groups (`Buffer.take`), `groups_per_step` of them a step.
        Waits for: these groups, the trainer's step, and the delivery of the version before.
        Unblocked by: `Buffer.put` of a scored group; the trainer's report; the swap in the engine. `Buffer.close` (an interrupt, or the
        curfew of `train.minutes`) ends the wait for groups, and an interrupt also that for a delivery.
        """
        parts, plan = self._parts, self._plan
        delivery: asyncio.Task[None] | None = None
        parts.minutes.begin(self.step)
        while self.step < self._plan.steps and parts.minutes.another(self.step):
            if parts.turns.alternate and not await self._leaving.unless(self._hand_over(delivery)):
                break
            waited = self._clock()
            waits, progress = parts.telemetry.waits, parts.groups.progress
            async with waits.named("trainer", f"{plan.staleness.groups_per_step} scored groups", advances=progress):
                with parts.minutes.curfew(self.step, parts.buffer):
                    async with parts.turns.lent():
                        groups = await parts.buffer.take(plan.staleness.groups_per_step, self._judge)
            if groups is None:
                break
            report = await self._whole(self._step(groups, self._clock() - waited))
            if report.skipped:
                continue
            # a publish overwrites the slot before last, so the last version must be live
            if delivery and not await self._leaving.unless(self._delivered(delivery, "the version before")):
                break
            delivery = await self._leaving.unless(self._publish(loops))
            if parts.turns.alternate:
                await self._leaving.unless(parts.turns.over(bool(delivery) and parts.interrupts.swap.at_once))
            if plan.checkpoint_every and self.step % plan.checkpoint_every == 0:
                await self._save_beside(loops)
            self._replan(parts.minutes.stepped(self.step, report.seconds))
        if self.step < self._plan.steps and not self.interrupted:
            parts.minutes.over(self.step)
            self._replan(self.step)
        if delivery:
            await self._leaving.unless(self._delivered(delivery, "the last version"))
        if self.step >= self._plan.steps:
            await self._save_result()

    async def _hand_over(self, delivery: asyncio.Task[None] | None) -> bool:
        """Gives the devices that both share to the engine. It does not sleep again before new weights are live."""
        await self._parts.turns.over()
        return not delivery or await self._delivered(delivery, "the version before")

    async def _step(self, groups: tuple[Group, ...], waited: float) -> TrainReport:
        """Does one optimizer step. Nothing is awaited between the trainer's report and its journal record."""
        parts, batch = self._parts, self._plan.batch(self.step, groups, self._parts.algorithm)
        report = await self._busy("step", parts.trainer.step, batch)
        drawn = math.nan if report.skipped else self._rolling.mean_drawn(batch.groups)
        parts.ledger.trained(report, batch, drawn, waited)
        for sentence in (*parts.noise.check(report), report.notice):
            if sentence:
                self._warn(sentence)
        if report.skipped:
            self._skip(report)
            return report
        self._skipped = 0
        parts.probe.saw(batch.rows)
        self.step, self.worked = report.version, self._clock() - self._began
        return report

    def _judge(self, group: Group) -> Group | None:
        """The part of a ready group that the next step may train (`staleness.judge`); None for a group that it has ended."""
        # A group of an earlier process may hold what was no failure in its version of headrace.
        if failed := next((rollout for rollout in map(usable, group.scored) if isinstance(rollout, Failure)), None):
            self._warn(f"the finished group {group.ticket} is dropped ({failed.reason}): {failed.detail}")
            self._parts.ledger.ended(rolled_of(group), "dropped", failed.reason)
            return None
        judged = judge(group, self.step, self._plan.staleness)
        if judged is None:
            self._parts.ledger.ended(rolled_of(group), "dropped", "overdue")
        return judged

    def _skip(self, report: TrainReport) -> None:
        """Reports a skipped step. Raises TrainingError after `train.max_skipped_steps` of them in a row."""
        self._skipped += 1
        message = f"step {report.step} was skipped: {report.skipped}; the weights are unchanged, its groups are dropped"
        self._warn(message)
        if self._skipped >= self._plan.max_skipped_steps:
            raise TrainingError(
                f"{self._skipped} steps in a row were skipped ({report.skipped}). {_REMEDIES.get(report.skipped, _OTHERWISE)}; "
                "train.max_skipped_steps sets how many are allowed."
            )

    def _replan(self, steps: int | None) -> None:
        """Changes the number of steps to `steps`, which fit into `train.minutes`. None: no change."""
        if steps is not None:
            self._plan = dataclasses.replace(self._plan, steps=steps)
            self._parts.buffer.want(steps * self._plan.staleness.groups_per_step)

    # -- delivery -------------------------------------------------------------------------------------------------------

    async def _publish(self, loops: asyncio.TaskGroup) -> asyncio.Task[None]:
        """Copies the weights, and returns the task that delivers them beside the next step: it asks the trainer before that step is begun."""
        parts = self._parts
        await self._busy("publish", parts.trainer.copy, self._plan.adapter)
        expected = await self._busy("probe", parts.probe.trainer_side, parts.trainer, self.step)
        return loops.create_task(self._deliver(loops, expected))

    async def _deliver(self, loops: asyncio.TaskGroup, expected: list[float] | None) -> None:
        """Brings one version from the trainer to the engine, and proves that it arrived. `expected`: the trainer's log-probs of the probe.

        Consumes: the copy of the weights that `_publish` made.
        Waits for: the update (`Trainer.publish`), the swap (`Interrupts.deliver`), and the engine's log-probs of the probe.
        Unblocked by: the first gap between two forward passes, or whatever else `partial.mode` swaps at. The swap frees the slots of
        the groups that this version trained (`Ledger.live`), which unblocks admission.
        """
        parts = self._parts
        async with parts.telemetry.waits.named("delivery", "the trainer (the published weights)"):
            update = await parts.trainer.publish(self._plan.adapter)
        version = update.version
        async with parts.telemetry.waits.named("delivery", "the swap in the engine"):
            delivery = await parts.interrupts.deliver(update)
        parts.ledger.live(update, delivery, self._cancel_stale(version))
        for sentence in parts.deltas.check(update):
            self._warn(sentence)
        async with parts.telemetry.waits.named("delivery", "the engine (probe)"):
            await parts.probe.engine_side(parts.engine, version, expected)
        every = self._plan.evaluate_every
        if every and version % every == 0 and version < self._plan.steps:
            self._evaluations.append(loops.create_task(parts.evaluator.measure("during", version, version - 1)))

    async def _delivered(self, delivery: asyncio.Task[None], which: str) -> bool:
        """Waits until the weights of `delivery` are live. True, because `Leaving.unless` returns None after an interrupt."""
        async with self._parts.telemetry.waits.named("trainer", f"the swap in the engine (of {which})"):
            await delivery
        return True

    def _cancel_stale(self, version: int) -> int:
        """Cancels groups that are too old for the next step, which trains at `version` or later. Returns the number of rollouts that end."""
        staleness = self._plan.staleness
        if self._parts.interrupts.swap.cancels_groups:
            return self._rolling.cancel_older_than(version, "interrupted")
        if staleness.overdue == "cancel":
            return self._rolling.cancel_older_than(version - staleness.max_lag, "overdue")
        return 0

    # -- resuming -------------------------------------------------------------------------------------------------------

    async def redo(self, steps: Sequence[JournalStep]) -> None:
        """Repeats the steps that a killed process did after the checkpoint."""
        for step in steps:
            batch = self._plan.batch_again(step, self._parts.algorithm)
            batch = replace(batch, skippable=step.report.skippable, steps=step.steps)
            report = await self._busy("step, again", self._parts.trainer.step, batch)
            if message := unlike(step, report):
                self._warn(message)
            if step.report.skipped:
                continue
            self.step = step.version
            if self.step > self._earlier.step:
                self._record(
                    step_fact(self._clock(), report, batch.groups, self._rolling.mean_drawn(batch.groups), 0.0)
                )

    def discard(self, outdated: Mapping[int, Sequence[str]]) -> None:
        """Drops groups of the checkpoint that were made under settings which have changed. `outdated`: the settings, by ticket."""
        parts = self._parts
        finished = [rolled_of(group) for group in parts.buffer.finished if group.ticket in outdated]
        under_way = [
            Rolled(ticket=ticket, prompt=prompt, scored=())
            for ticket, prompt in parts.buffer.in_flight.items()
            if ticket in outdated
        ]
        for what, groups in (("finished groups of the checkpoint", finished), ("groups under way", under_way)):
            if groups:
                names = " and ".join(outdated[groups[0].ticket])
                self._warn(f"{len(groups)} {what} are dropped (settings_changed), because of changes in {names}")
            for rolled in groups:
                parts.ledger.ended(rolled, "dropped", "settings_changed")

    async def _catch_up(self, loops: asyncio.TaskGroup) -> None:
        """Does the checkpoint or evaluation that was due at the last step of an earlier process, which ended before."""
        plan, saved = self._plan, self._parts.snapshots.saved_step
        done, evaluator = self._earlier.evaluated, self._parts.evaluator
        due = _turns(plan.evaluate_every, done, self.step)
        if lost := [step for step in due if step < self.step]:
            which = f"step {lost[0]}" if len(lost) == 1 else f"{len(lost)} steps from {lost[0]} to {lost[-1]}"
            self._warn(f"an evaluation was due at {which}, {_GONE} step {self.step} is measured instead")
        if self.step >= plan.steps:  # at the last step, both are done anyway
            return
        if _turns(plan.checkpoint_every, saved, self.step):
            await self._save_beside(loops)
        if due:
            self._evaluations.append(loops.create_task(evaluator.measure("during", self.step, done)))

    # -- the trainer's work, and the last checkpoint --------------------------------------------------------------------

    async def _busy(self, what: str, work: Callable[P, Awaitable[T]], *given: P.args, **named: P.kwargs) -> T:
        """Awaits work of the trainer in this pipeline's turn, under a named wait, and counts its time as busy."""
        parts = self._parts
        turn = parts.turns.take(self._clock, computes=what != SAVING)
        async with parts.telemetry.waits.named("controller", f"the trainer ({what})"), turn:
            return await work(*given, **named)

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        """Shields work of the trainer's process, which continues even if its caller is cancelled. If the run ends meanwhile, its last
        checkpoint waits for this work: else it could combine weights and tickets of different steps, or be written twice at once."""
        under_way = self._under_way = asyncio.ensure_future(work)
        return await asyncio.shield(under_way)

    async def _save_beside(self, loops: asyncio.TaskGroup) -> None:
        """Captures a checkpoint of this moment, which is written beside training. `loops`: is told of errors that must end the run.

        It is told here and not by the shielded work, which may end after the group has ended with another error."""
        await self._whole(self._saving.begin(self.step))
        self._saving.watch(loops)

    async def _save_result(self) -> None:
        """Saves the final checkpoint. Without it the run does not count as finished."""
        plan, parts = self._plan, self._parts
        save = lambda: self._whole(self._saving.whole(self.step))  # noqa: E731
        warn = functools.partial(self._warn, key=UNSAVED)
        await until_saved(
            save, self.step, plan.save_patience, waits=parts.telemetry.waits, leaving=self._leaving, warn=warn
        )

    async def _last_checkpoint(self) -> None:
        """Writes a checkpoint after an error of another part."""
        with suppress(HeadraceError):  # the user should read the error that ended the run, not a second one
            if self._under_way and not self._under_way.done():
                await self._under_way
            await self._saving.whole(self.step)


async def _sentinel(watch: Callable[[], Awaitable[None]]) -> None:
    """Watches a part on which the run depends, and ends the run with that part's error.

    Consumes: nothing.
    Waits for: the end of a worker process, or of what it is asked in the background (`watch`, which then raises).
    Unblocked by: the operating system, which reports the end of the process; `Pipeline._run` cancels it at the end of the run.
    """
    await watch()


def _turns(every: int, done: int, step: int) -> Sequence[int]:
    """The multiples of `every` up to `step` whose work was not done. `done`: the step of the last work; below 0 if there was none."""
    return range(every * max(1, done // every + 1), step + 1, every) if every else ()


# --- From a prompt to a group
# `admit` draws prompts; `_roll_group` turns each into a group that is ready, dropped or failed.


class Rolling:
    """The groups in flight: one task for each ticket, from the draw of its prompt to the end of its group or its place in the buffer."""

    def __init__(self, parts: Parts, plan: LoopPlan, earlier: EarlierMetrics) -> None:
        self._parts, self._plan, self._clock = parts, plan, parts.telemetry.clock
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """The task of each ticket in flight."""
        self._cancelled: dict[int, str] = {}
        """The reason for each ticket that was cancelled."""
        self._budgets = Budgets(plan.watch, plan.rollout.patience, parts.telemetry.record, self._clock)
        self._texts = FirstTexts(parts.telemetry.record, self._clock)
        self._rewards = list(earlier.rewards)
        """Rewards of the groups that ended since the last step."""
        self._mean_drawn = earlier.reward_drawn
        self._diverged = False

    async def admit(self, loops: asyncio.TaskGroup) -> None:
        """The loop of admission: draws prompts until the buffer is closed, and starts a task for each. In a resumed run, the groups in flight at
        the kill come first, under their old tickets.

        Consumes: free slots (`Buffer.draw`) and prompts of the task (`Curriculum.draw`).
        Waits for: a free slot, and until new groups may begin (`Interrupts.admission`; they may not during a swap by `barrier`).
        Unblocked by: `Buffer.release` once the weights are live that a group trained; `Buffer.end` of a dropped or failed group, or `Buffer.want`
        of more groups; `Buffer.close` ends the loop.
        """
        buffer, parts = self._parts.buffer, self._parts
        for ticket, prompt in buffer.in_flight.items():
            self._begin(loops, ticket, prompt)
        while True:
            waits, progress = parts.telemetry.waits, parts.groups.progress
            async with waits.named("admission", "a free slot (weights live, or a group ended)", advances=progress):
                await parts.interrupts.admission()
                drawn = await buffer.draw()
            if drawn is None:
                return
            if not parts.interrupts.admits:
                continue
            prompt, choice = parts.curriculum.draw(drawn)
            parts.ledger.drawn(drawn, prompt, choice)
            self._begin(loops, drawn, prompt)

    def cancel_older_than(self, version: int, reason: str) -> int:
        """Drops the groups in flight that have a token older than `version`. Returns the number of rollouts that end."""
        ended = 0
        for ticket, task in self._tasks.items():
            names = self._parts.interrupts.tokens.names(ticket)
            first = self._parts.interrupts.tokens.first_version(names)
            if first is not None and first < version and not task.done():
                self._cancelled[ticket] = reason
                ended += len(self._parts.engine.unfinished(names))
                task.cancel()
        return ended

    def mean_drawn(self, groups: Sequence[Group]) -> float:
        """Mean reward of all groups that ended since the last step, or the previous value if none did. If the metrics of a killed process
        are lost, it is the mean of `groups`, which this step takes."""
        if not self._rewards and math.isnan(self._mean_drawn):
            self._rewards = [rollout.reward for group in groups for rollout in group.scored]
        if self._rewards:
            self._mean_drawn = sum(self._rewards) / len(self._rewards)
            self._rewards.clear()
        return self._mean_drawn

    def stop(self) -> None:
        """Cancels all groups in flight. They stay recorded in checkpoint and journal."""
        for task in self._tasks.values():
            task.cancel()

    # -- one group ------------------------------------------------------------------------------------------------------

    def _begin(self, loops: asyncio.TaskGroup, ticket: int, prompt: Prompt) -> None:
        task = self._tasks[ticket] = loops.create_task(self._roll_group(ticket, prompt))
        task.add_done_callback(lambda _: self._tasks.pop(ticket))

    async def _roll_group(self, ticket: int, prompt: Prompt) -> None:
        """Turns the prompt of a ticket into a group that is ready, dropped or failed.

        Consumes: the ticket and its prompt.
        Waits for: the rollouts and their rewards (`GroupSource.trained`: the engine, environments, the scorer).
        Unblocked by: completions, results of environments, rewards. `cancel_older_than` drops the group; `stop` cancels the task and leaves the
        ticket in flight, for a resumed run.
        """
        started = self._clock()
        try:
            async with self._parts.interrupts.group():
                group = await self._parts.groups.trained(ticket, prompt, partial(self._texts.report, prompt))
            rolled = Rolled(
                ticket=ticket,
                prompt=prompt,
                scored=group.scored,
                failures=group.failures,
                seconds=self._clock() - started,
                lost_tokens=self._not_asked_again(ticket),
                between=group.between,
                times=group.times,
            )
            self._rewards += [rollout.reward for rollout in group.scored]
            self._judge(rolled)
        except asyncio.CancelledError:
            if ticket not in self._cancelled:
                raise
            interrupts = self._parts.interrupts
            lost = interrupts.tokens.count(interrupts.tokens.names(ticket))
            rolled = Rolled(
                ticket=ticket, prompt=prompt, scored=(), failures=(), seconds=self._clock() - started, lost_tokens=lost
            )
            self._parts.ledger.ended(rolled, "dropped", self._cancelled.pop(ticket))
        self._parts.groups.forget(ticket)

    def _judge(self, rolled: Rolled) -> None:
        """Ends the group as failed or dropped, or puts it into the buffer as ready. Charges it to the budgets."""
        algorithm, ledger = self._parts.algorithm, self._parts.ledger
        group = Group(rolled.ticket, rolled.prompt, rolled.scored, (), rolled.failures)
        group = algorithm.filled(self._parts.buffer.with_earlier(group), self._plan.rollout.temperature)
        if not group.rows:
            fact = ledger.ended(rolled, "failed", rolled.commonest_failure)
        elif reason := algorithm.barren(group.rows, group.again):
            fact = ledger.ended(rolled, "dropped", reason)
        else:
            fact = ledger.ready(group, rolled)
        self._budgets.spend(rolled, fact)

    def _not_asked_again(self, ticket: int) -> int:
        """Number of recorded tokens of turns that this process did not ask for, because the environment took another course after the kill."""
        parts = self._parts
        lost = sum(len(completion.tokens) for completion in parts.interrupts.tokens.unused(ticket).values())
        if lost and parts.environment.resumes != "restarted" and not self._diverged:
            self._diverged = True
            parts.telemetry.warn(
                f'an environment that declares resumes="{parts.environment.resumes}" asked for other turns than before the run was killed (ticket '
                f"{ticket}), so {lost} sampled tokens are lost. Make it depend only on its prompt, its seed and its turns, or let it "
                'declare resumes="restarted"'
            )
        return lost


# --- Checkpoints beside training
# The trainer stands still for a copy, which is written while the next steps are done.
#
# step 4 ─▶ capture ─▶ step 5 ─▶ step 6 ─▶ ...
#              └─▶ the files, their checksums, the name
#
# One is written at a time. If the next one is due before that, training waits, under a name: so a run has the checkpoints that
# `checkpoint.every` says, whatever the disk does, and memory for one copy is enough.


SAVING = "checkpoint"
"""The work of a trainer that it can do while it sleeps."""

WORTH_SAYING = 1.0
"""Seconds from which on a wait for the checkpoint before is reported."""


class Saving:
    """The checkpoints of a run, of which at most one is being written."""

    def __init__(
        self, parts: Parts, busy: Callable[[str, Callable[[int], Awaitable[None]], int], Awaitable[None]]
    ) -> None:
        """`busy`: does work of the trainer, in this pipeline's turn (`Pipeline._busy`)."""
        self._parts, self._busy, self._clock = parts, busy, parts.telemetry.clock
        self._writing: asyncio.Future[str] | None = None
        """The checkpoint that is being written, or was last. The result is the error, or an empty string."""
        self._step = -1
        """The step of that checkpoint."""
        self._reported: set[str] = set()
        """The kinds of warnings that were given."""

    async def begin(self, step: int) -> None:
        """Captures a checkpoint of this moment, between two steps, and begins to write it.

        Consumes: the trainer's turn, for the copy.
        Waits for: the checkpoint before, which must be written, and the trainer's copy.
        Unblocked by: the disk; the trainer.
        """
        began, before = self._clock(), self._step
        await self.finish()
        if (waited := self._clock() - began) > WORTH_SAYING and step > before:
            self._warn_once(
                "waited",
                f"training waited {waited:.0f} s until the checkpoint of step {before} was written, before that of step {step}: raise "
                "checkpoint.every, or let the run write to a faster disk",
            )
        self._writing = None
        if step == self._parts.snapshots.saved_step:
            return
        await self._busy(SAVING, self._capture, step)

    def watch(self, loops: asyncio.TaskGroup) -> None:
        """Lets errors of the checkpoint that is being written end the group; those of the disk are only recorded."""
        if self._writing:
            loops.create_task(_errors_of(self._writing))

    async def finish(self) -> str:
        """Waits until nothing is being written. Returns the error of the last one, or an empty string."""
        if self._writing is None:
            return ""
        if not self._writing.done():
            async with self._parts.telemetry.waits.named(
                "trainer", f"the checkpoint of step {self._step} to be written"
            ):
                await asyncio.shield(self._writing)
        return self._writing.result()

    async def whole(self, step: int) -> str:
        """Writes a checkpoint, and returns when it is there. Returns the error, or an empty string."""
        await self.begin(step)
        return await self.finish()

    def cancel(self) -> None:
        if self._writing:
            self._writing.cancel()

    async def _capture(self, step: int) -> None:
        """Copies state and weights, and starts the task that writes them. The trainer goes on when this returns."""
        moment = await self._parts.snapshots.capture(step, self._parts)
        self._step, self._writing = step, asyncio.ensure_future(self._write(moment))
        if moment.short:
            self._warn_once(
                "short", f"training stands still while checkpoints are written: {moment.short}. Free memory"
            )
            await asyncio.shield(self._writing)

    async def _write(self, moment: Moment) -> str:
        """Writes one captured checkpoint beside training. Returns the error of the disk, or an empty string.

        Consumes: what was captured.
        Waits for: the trainer's process, which writes the weights, and the disk.
        Unblocked by: both; `cancel` ends it with the run.
        """
        failure = await self._parts.snapshots.write(moment)
        self._parts.minutes.measured(save=self._clock() - moment.seconds)
        return failure

    def _warn_once(self, kind: str, message: str) -> None:
        """Warns of each kind once."""
        if kind not in self._reported:
            self._reported.add(kind)
            self._parts.telemetry.warn(message)


async def _errors_of(writing: asyncio.Future[str]) -> None:
    """Ends the run if writing raises: the trainer's process is lost, for example. A full disk does not raise.

    Consumes: nothing.
    Waits for: the end of writing, which goes on if this task is cancelled.
    Unblocked by: `Saving._write`.
    """
    await asyncio.shield(writing)
