"""The one place where a pipeline is assembled, for runs, the fault simulation, the planner and tests.

`restore_state` brings buffer, interrupts and task to where the run stopped; `assemble` joins them with all other parts; `go_live`
makes the engine serve the trainer's weights, which `Pipeline.run` requires. `groups_alone` joins what samples without a pipeline.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.algo.noise import NoiseWatch
from headrace.algo.training_rows import Algorithm
from headrace.core.errors import HeadraceError, IdentityError
from headrace.core.protocols import Engine, EnvironmentKind, Scorer, Task, Trainer
from headrace.core.types import Prompt
from headrace.durable.journal import Journal, JournalStep
from headrace.episodes.rollout_session import Decode, Notebook
from headrace.facts.facts import WeightsLive
from headrace.facts.telemetry import Telemetry
from headrace.loop.buffer import Buffer
from headrace.loop.checkpoints import Snapshots
from headrace.loop.curriculum import Curriculum, open_curriculum
from headrace.loop.evaluation import Evaluator, HeldOutSet, IdentityProbe, measure_of
from headrace.loop.ledger import Ledger
from headrace.loop.loop_plan import LoopPlan
from headrace.loop.openings import CacheSize, Openings
from headrace.loop.own_groups import GroupSource, OwnGroups
from headrace.loop.partial import Interrupts, PartialConfig
from headrace.loop.pipeline import Parts
from headrace.loop.recovery import SavedRun, recover
from headrace.loop.run_limits import Minutes
from headrace.loop.turns import DeviceShare
from headrace.settings.process_config import EvalConfig
from headrace.weight_sync.delta.efficiency import DeltaWatch


@dataclass(frozen=True, kw_only=True)
class MeasuredSet:
    """A further evaluation set."""

    name: str
    prompts: Sequence[Prompt]
    evaluation: EvalConfig
    environment: EnvironmentKind | None = None
    """None: that of the held-out prompts; so for the scorer."""
    scorer: Scorer | None = None
    measure: str = ""
    """See `evaluation.measure_of`."""
    every: int = 0
    """See `HeldOutSet`."""

    def with_groups(self, groups: GroupSource) -> HeldOutSet:
        """`groups`: of the held-out prompts."""
        own = groups.measuring(self.evaluation, self.environment, self.scorer)
        return HeldOutSet(self.name, own, self.prompts, self.measure, self.every)


@dataclass(frozen=True, kw_only=True)
class RestoredState:
    """The state of a run before its loops begin: empty for a new run, that of the kill for a resumed one."""

    curriculum: Curriculum
    buffer: Buffer
    interrupts: Interrupts
    notebook: Notebook
    redo: Sequence[JournalStep]
    """The steps after the checkpoint, which the trainer must repeat before anything else."""
    outlived: bool
    """Whether the passes logged since the checkpoint cannot be used (see `recover`)."""
    step: int
    """Number of optimizer steps in the checkpoint that the trainer loads."""


def restore_state(
    *,
    plan: LoopPlan,
    task: Task,
    engine: Engine,
    partial: PartialConfig,
    telemetry: Telemetry,
    saved: SavedRun | None,
    buffer: Buffer | None = None,
) -> RestoredState:
    """`saved`: the run's directory as it was found; None for a new run. Raises ConfigError if the task now draws other prompts."""
    wanted = plan.steps * plan.staleness.groups_per_step
    buffer = buffer or Buffer(plan.staleness, wanted, remembers=plan.remembers, experience=plan.experience)
    interrupts = Interrupts(engine, partial, telemetry.waits, telemetry.clock)
    curriculum = open_curriculum(task, plan.curriculum, plan.rollout.group_size)
    notebook = Notebook(plan.adapter)
    redo, outlived = (
        recover(saved, curriculum, buffer, interrupts, notebook=notebook, plan=plan) if saved else ([], False)
    )
    return RestoredState(
        curriculum=curriculum,
        buffer=buffer,
        interrupts=interrupts,
        notebook=notebook,
        redo=redo,
        outlived=outlived,
        step=saved.saved_step if saved else 0,
    )


def assemble(
    *,
    plan: LoopPlan,
    restored: RestoredState,
    telemetry: Telemetry,
    engine: Engine,
    trainer: Trainer,
    environment: EnvironmentKind,
    scorer: Scorer,
    evaluated_by: Scorer,
    held_out: Sequence[Prompt],
    evaluation: EvalConfig,
    algorithm: Algorithm,
    decode: Decode,
    journal: Journal,
    snapshots: Snapshots,
    probe: IdentityProbe,
    turns: DeviceShare | None = None,
    noise: NoiseWatch | None = None,
    deltas: DeltaWatch | None = None,
    minutes: Minutes | None = None,
    sentinels: Sequence[Callable[[], Awaitable[None]]] = (),
    elsewhere: GroupSource | None = None,
    sets: Sequence[MeasuredSet] = (),
) -> Parts:
    """`evaluated_by` scores held-out rollouts, without penalties and teachers' log-probs. `elsewhere`: where rollouts are sampled, if not here."""
    groups = elsewhere or _own_groups(
        (restored.interrupts, restored.notebook),
        plan=plan,
        engine=engine,
        environment=environment,
        scorer=scorer,
        evaluated_by=evaluated_by,
        evaluation=evaluation,
        decode=decode,
        telemetry=telemetry,
    )
    return Parts(
        curriculum=restored.curriculum,
        engine=engine,
        interrupts=restored.interrupts,
        notebook=restored.notebook,
        trainer=trainer,
        groups=groups,
        environment=environment,
        scorer=scorer,
        telemetry=telemetry,
        journal=journal,
        buffer=restored.buffer,
        ledger=Ledger(journal, restored.buffer, restored.curriculum, telemetry),
        algorithm=algorithm,
        snapshots=snapshots,
        probe=probe,
        evaluator=_evaluator(evaluation, (groups, held_out), sets, telemetry, snapshots.made_by),
        turns=turns or DeviceShare(),
        noise=noise or NoiseWatch(),
        deltas=deltas or DeltaWatch(),
        minutes=minutes or Minutes(),
        sentinels=sentinels,
    )


def groups_alone(
    *,
    plan: LoopPlan,
    engine: Engine,
    partial: PartialConfig,
    environment: EnvironmentKind,
    scorer: Scorer,
    evaluated_by: Scorer,
    evaluation: EvalConfig,
    decode: Decode,
    telemetry: Telemetry,
) -> OwnGroups:
    """The groups of a process that has no pipeline: of an evaluation, of a rollout host."""
    return _own_groups(
        (Interrupts(engine, partial, telemetry.waits, telemetry.clock), Notebook(plan.adapter)),
        plan=plan,
        engine=engine,
        environment=environment,
        scorer=scorer,
        evaluated_by=evaluated_by,
        evaluation=evaluation,
        decode=decode,
        telemetry=telemetry,
    )


def _evaluator(
    evaluation: EvalConfig,
    held_out: tuple[GroupSource, Sequence[Prompt]],
    sets: Sequence[MeasuredSet],
    telemetry: Telemetry,
    made_by: Mapping[str, Any],
) -> Evaluator:
    groups, prompts = held_out
    measure = measure_of(made_by, evaluation.temperature)
    first = HeldOutSet(evaluation.name, groups, prompts, measure)
    return Evaluator(first, telemetry, [one.with_groups(groups) for one in sets])


def _own_groups(
    sampled: tuple[Interrupts, Notebook],
    *,
    plan: LoopPlan,
    engine: Engine,
    environment: EnvironmentKind,
    scorer: Scorer,
    evaluated_by: Scorer,
    evaluation: EvalConfig,
    decode: Decode,
    telemetry: Telemetry,
) -> OwnGroups:
    """The groups that this engine samples, as many at once as its cache holds."""
    has = engine.capabilities
    longest = min(environment.limits.tokens or has.context_length, has.context_length)
    cache = CacheSize(tokens=has.kv_tokens, rows=has.rows, longest=longest, kv_gib=plan.kv_gib)
    return OwnGroups(
        plan=plan,
        evaluation=evaluation,
        interrupts=sampled[0],
        environment=environment,
        scorer=scorer,
        evaluated_by=evaluated_by,
        notebook=sampled[1],
        decode=decode,
        waits=telemetry.waits,
        context_length=has.context_length,
        openings=Openings(cache, telemetry.warn),
    )


async def go_live(
    parts: Parts, adapter: str = "", serve_base: Callable[[], Awaitable[None]] | None = None
) -> float | None:
    """Publishes the trainer's weights, loads them into the engine, and proves that they are the same (C3).

    `serve_base`: loads the base weights first, where an adapter is served. Returns the root mean square of the probe's differences,
    in nats; None if the probe is switched off. Raises IdentityError where the engine's model has other parameters than the trainer's."""
    try:
        return await _go_live(parts, adapter, serve_base)
    except HeadraceError:  # among them ConfigError, which is a ValueError too
        raise
    except ValueError as error:
        raise IdentityError(
            f"the engine cannot hold what the trainer publishes: {error}. The files of the model may contradict each other: `headrace preflight MODEL` "
            "compares them"
        ) from None


async def _go_live(parts: Parts, adapter: str, serve_base: Callable[[], Awaitable[None]] | None) -> float | None:
    telemetry = parts.telemetry
    async with telemetry.waits.named("start", "the first weights to be live"):
        if serve_base:
            await serve_base()
        if parts.probe.trial:
            await _try_weights(parts, adapter)
        parts.probe.saw([row for group in parts.buffer.finished for row in group.rows])
        async with parts.turns.take(telemetry.clock):
            update = await parts.trainer.publish(adapter)
            expected = await parts.probe.trainer_side(parts.trainer, update.version, always=True)
        await parts.turns.over()
        load = await parts.engine.load(update)
        telemetry.record(WeightsLive(telemetry.clock(), update, load))
        return await parts.probe.engine_side(parts.engine, update.version, expected, first=True)


async def _try_weights(parts: Parts, adapter: str) -> None:
    """Publishes changed weights, and has the probe compare what the engine makes of them, on a few tokens first where these may be enough.
    Requests have not begun yet."""
    for most in parts.probe.trial_tokens:
        async with parts.turns.take(parts.telemetry.clock):
            await parts.trainer.begin_trial(adapter)
            update = await parts.trainer.publish(adapter)
            scores = await parts.trainer.end_trial(parts.probe.trial, adapter, most)
        await parts.turns.over()
        await parts.engine.load(update)
        if await parts.probe.try_weights(parts.engine, update.version, scores):
            return
