"""The one place where concrete classes of the controller's half are named: a config becomes parts, and the parts a pipeline.

It imports no torch. The workers' half runs in their processes (`workers/build.py`).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headrace.algo.advantage.groups import algorithm_of
from headrace.algo.noise import NoiseWatch, inside_rounding
from headrace.config import RunConfig
from headrace.durable.journal import JournalStep
from headrace.errors import ConfigError
from headrace.models.chat import ChatEncoder
from headrace.models.resolve import resolve_model
from headrace.observe.facts import Books, RunStarted, Warned, WeightsLive
from headrace.observe.health.waits import Waits
from headrace.observe.machine import machine_mark
from headrace.orchestration.handed import Handed
from headrace.orchestration.loops.evaluation import Evaluator
from headrace.orchestration.loops.identity import PROBE, TOLERANCE, IdentityProbe
from headrace.orchestration.loops.parts import Parts, told_of
from headrace.orchestration.loops.pipeline import Pipeline
from headrace.orchestration.loops.utilisation import Utilisation
from headrace.orchestration.plan import Plan
from headrace.orchestration.pools import Pools, open_pools
from headrace.orchestration.store.recovery import recover
from headrace.orchestration.store.resume_rules import scoring_mark
from headrace.orchestration.store.snapshots import Snapshots
from headrace.orchestration.store.storage import Storage
from headrace.orchestration.teaching import Lesson, Student, open_teaching, plan_lessons, reward_weights
from headrace.orchestration.wording import headline, where
from headrace.protocols import Observer, Scorer, Task
from headrace.rehearsal.reward import try_in_loop
from headrace.rollouts.buffer import Buffer
from headrace.rollouts.partial import Interrupts
from headrace.scoring.handed import RewardFunction
from headrace.scoring.overlong import punished
from headrace.tasks.config import TaskConfig
from headrace.tasks.read import Row
from headrace.types import Prompt

if TYPE_CHECKING:
    pass

Clock = Callable[[], float]


def open_waits(config: RunConfig, observer: Observer, clock: Clock) -> Waits:
    return Waits(observer.record, clock, config.watch.warn_after, config.watch.stop_after)


async def open_model(config: RunConfig) -> tuple[Path, ChatEncoder]:
    """The model's directory (fetched if need be) and its tokenizer."""
    model_dir = await asyncio.to_thread(resolve_model, config.model.path)
    return model_dir, await asyncio.to_thread(ChatEncoder, model_dir)


@dataclass
class Built:
    """A run ready to go."""

    pools: Pools
    parts: Parts
    pipeline: Pipeline
    redo: Sequence[JournalStep]
    """Steps after the checkpoint, which the trainer has to do again before anything else."""
    outdated: Collection[int]
    """Tickets of finished groups that other settings made."""
    utilisation: Utilisation
    clock: Clock
    config: RunConfig
    adapter: str
    """Which one is trained; empty where the engine serves full weights."""

    def started(self, step: int) -> RunStarted:
        """`step`: optimizer steps that are done."""
        config, buffer = self.config, self.parts.buffer
        books = Books(buffer.accounting(), tuple(buffer.in_flight), buffer.ready)
        return RunStarted(
            self.clock(),
            config.name,
            headline(config),
            config.seed,
            config.train.steps,
            config.staleness.groups_per_step,
            config.rollout.group_size,
            config.staleness.generating,
            config.staleness.window,
            config.staleness.lag_bound,
            where(config, self.pools.engine.capabilities.path),
            step,
            books,
            machine_mark(config.train.cores),
            config.rollout.max_tokens,
        )

    async def go_live(self) -> None:
        """Publishes the trainer's weights, loads them into the engine, and proves that they are the same (C3)."""
        parts = self.parts
        async with parts.waits.named("start", "the first weights to be live"):
            if self.adapter:
                await self.pools.serve_base(parts.observer, self.clock)
            update = await parts.trainer.publish(self.adapter)
            expected = await parts.probe.trainer_side(parts.trainer, update.version, always=True)
            load = await parts.engine.load(update)
            parts.observer.record(WeightsLive(self.clock(), update, load))
            rounding = await parts.probe.engine_side(parts.engine, update.version, expected)
        for sentence in inside_rounding(self.config.algo, rounding, self.config.rollout.max_tokens):
            parts.observer.record(Warned(self.clock(), sentence))

    async def close(self) -> None:
        await self.parts.scorer.close()
        await self.pools.close()


@dataclass
class Prepared:
    """What a run has beside its pools."""

    model_dir: Path
    encoder: ChatEncoder
    task: Task
    scorer: Scorer
    prompts: Sequence[Prompt]
    lessons: Sequence[Lesson]


async def prepare(config: RunConfig, model_dir: Path, encoder: ChatEncoder, handed: Handed, logs: Path) -> Prepared:
    """What can be wrong in the user's input is found out here, before processes are started, which takes seconds."""
    task = await asyncio.to_thread(build_task, config.task, encoder, config.seed, handed.rows)
    scorer = await asyncio.to_thread(build_scorer, config, handed.rewards, logs / "scorer.log")
    answer, size = config.task.answer, config.rollout.group_size
    await try_in_loop(handed.rewards, scorer, task, answer, size, encoder.encode_completion)
    lessons = await plan_lessons(config, model_dir, encoder, handed.rows)
    prompts = await asyncio.to_thread(task.held_out, config.eval.prompts)
    return Prepared(model_dir, encoder, task, scorer, prompts, lessons)


async def build(
    config: RunConfig,
    logs: Path,
    storage: Storage,
    handed: Handed,
    waits: Waits,
    clock: Clock,
) -> Built:
    observer = storage.recorder
    async with waits.named(
        "start", "the files of models, task and reward", endless=True
    ):  # some may have to be fetched
        prepared = await prepare(config, *await open_model(config), handed, logs)
    async with AsyncExitStack() as undo:
        undo.push_async_callback(prepared.scorer.close)
        adapter = config.lora.served_name
        restore = {adapter: storage.checkpoint} if storage.checkpoint else {}
        pools = await open_pools(config, prepared.model_dir, logs, observer, waits, clock, restore)
        undo.push_async_callback(pools.close)
        begin = await join(config, prepared, pools, adapter, logs, storage, waits, clock)
        built = begin()
        undo.pop_all()
    return built


async def join(
    config: RunConfig,
    prepared: Prepared,
    pools: Pools,
    adapter: str,
    logs: Path,
    storage: Storage,
    waits: Waits,
    clock: Clock,
) -> Callable[[], Built]:
    """A pipeline over pools that are up. `adapter`: which one it trains; empty where the engine serves full weights.

    Here ends what may be refused: only what is returned, and begins the run, changes its directory."""
    if config.rollout.stop and not pools.engine.capabilities.stop_strings:
        raise ConfigError(
            "this engine cannot end completions at strings (the model has no tokenizer it can use); remove rollout.stop"
        )
    student = Student(prepared.model_dir, pools.trainer, pools.engine, bool(adapter), pools.shadow, pools.weights_fd)
    pools.teaching = await open_teaching(config, prepared.lessons, student, logs, storage.recorder, waits, clock)
    buffer = Buffer(config.staleness, config.train.steps * config.staleness.groups_per_step)
    interrupts = Interrupts(pools.engine, config.partial, waits, clock)
    past = storage.past
    redo, outlived = recover(past, prepared.task, buffer, interrupts, plan_of(config, adapter)) if past else ([], False)

    def begin() -> Built:
        storage.begin(outlived)
        pools.engine.listen(storage.passes.write)
        return _assemble(config, prepared, pools, adapter, storage, waits, clock, buffer, interrupts, redo)

    return begin


def _assemble(
    config: RunConfig, prepared: Prepared, pools: Pools, adapter: str, storage: Storage, waits: Waits, clock: Clock,
    buffer: Buffer, interrupts: Interrupts, redo: Sequence[JournalStep],
) -> Built:  # fmt: skip
    task, encoder, observer = prepared.task, prepared.encoder, storage.recorder
    plan, past, mark = plan_of(config, adapter), storage.past, scoring_mark(config)
    assert pools.teaching is not None
    rewarding = pools.teaching.rewarding(prepared.scorer)
    parts = Parts(
        task=task,
        engine=pools.engine,
        interrupts=interrupts,
        trainer=pools.trainer,
        scorer=pools.teaching.tracing(
            punished(config.reward.soft_overlong_punishment, config.rollout.max_tokens, rewarding)
        ),
        observer=observer,
        journal=storage.journal,
        buffer=buffer,
        algorithm=algorithm_of(config.algo, config.rollout.max_tokens, reward_weights(config)),
        decode=encoder.decode,
        waits=waits,
        snapshots=Snapshots(storage.checkpoints, storage.passes, observer, clock, adapter, storage.saved_step, mark),
        probe=IdentityProbe(
            encoder.encode_text(PROBE)[: pools.engine.capabilities.context_length],
            config.watch.identity_every,
            max(TOLERANCE[config.engine.serving_dtype], TOLERANCE[pools.trainer_dtype]),
            observer,
            clock,
            adapter,
        ),
        evaluator=Evaluator(
            interrupts.once,
            rewarding,
            observer,
            prepared.prompts,
            config.eval,
            config.rollout,
            encoder.decode,
            waits,
            clock,
            adapter,
        ),
        turns=pools.turns,
        noise=NoiseWatch(config.algo),
        sentinels=(pools.teaching.watch,),
    )
    pipeline = Pipeline(parts, plan, clock, past.saved_step if past else 0, told_of(storage.recorder.state))
    utilisation = Utilisation(pools.engine, pools.turns, waits, clock)
    outdated = past.outdated(mark) if past else ()
    return Built(pools, parts, pipeline, redo, outdated, utilisation, clock, config, adapter)


def plan_of(config: RunConfig, adapter: str) -> Plan:
    return Plan(
        config.train.steps,
        config.staleness,
        config.rollout,
        config.seed,
        config.train.max_skipped_steps,
        config.checkpoint.every,
        config.eval.every,
        adapter,
        config.watch,
        config.checkpoint.patience,
    )


def build_task(config: TaskConfig, encoder: ChatEncoder, seed: int, rows: Sequence[Row] | None = None) -> Task:
    """`rows`: those that Python passed."""
    match config.kind:
        case "reasoning_gym":
            from headrace.tasks.reasoning_gym import ReasoningGymTask

            return ReasoningGymTask(config, seed, encoder)
        case _:
            from headrace.tasks.rows import RowsTask

            return RowsTask(config, seed, encoder, rows)


def build_scorer(config: RunConfig, rewards: Sequence[RewardFunction] = (), log: Path | None = None) -> Scorer:
    """Of reward functions, `rewards` being those that Python passed; or of none, where teachers are all there is to learn from."""
    from headrace.scoring.functions import FunctionScorer
    from headrace.scoring.teacher.stage import NoReward

    if config.teachers and not config.reward.specs and not rewards:
        if config.eval.prompts and all(teacher.mode == "tokens" for teacher in config.teachers):
            raise ConfigError(
                f"eval.prompts = {config.eval.prompts} measures a reward, and nothing gives one; set reward.function (the "
                f"algorithm {config.algo.name} does not learn from it), or eval.prompts = 0"
            )
        return NoReward()
    return FunctionScorer(config.reward, rewards, log)


def export_weights(
    config: RunConfig, model_dir: Path, checkpoint: Path, to: Path, dtype: Literal["bfloat16", "float32"], merge: bool
) -> None:
    """A directory that `transformers` loads: the checkpoint's weights, the model's tokenizer and templates; of an adapter one
    that peft loads, unless it is merged into the base weights (in float32)."""
    from headrace.trainer.step.learner import Assignment
    from headrace.trainer.step.trainer import TorchTrainer

    algo = config.algo.with_length(config.rollout.max_tokens)
    masters = config.train.weights == "float32" or config.train.offload_optimizer
    kept: Literal["float32", "bfloat16"] = "float32" if masters else "bfloat16"  # in the checkpoint
    train = dataclasses.replace(config.train, dtype=kept, weights=kept, offload_optimizer=False)
    adapters = {"": Assignment(train, algo, config.lora)} if config.lora.rank else {}
    trainer = TorchTrainer(model_dir, train, algo, config.seed, adapters=adapters)
    trainer.restore(checkpoint)
    trainer.export(to, dtype, merge=merge)
