"""Teachers and the reference: what is checked before anything starts, the processes that serve them, their place in scoring.

A teacher is an engine like the run's own, in a process of its own, and is replaced like it when it dies. Its weights come from
a directory and never change, or they are the student's older self, which the trainer publishes while the run goes on.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.algo.config import AlgoConfig
from headrace.config import RunConfig, teacher_engine
from headrace.engine.config import EngineConfig
from headrace.errors import ConfigError, first_error
from headrace.models.chat import ChatEncoder
from headrace.models.resolve import resolve_model
from headrace.observe.facts import EngineSample, Fact, Warned
from headrace.observe.health.waits import Waits
from headrace.orchestration.clients.process_engine import ProcessEngine
from headrace.orchestration.needs import check_teacher
from headrace.orchestration.workers.messages import EngineStart, ShadowStart
from headrace.protocols import Engine, Job, Launcher, Observer, Scorer, Trainer, Transport
from headrace.scoring.teacher.config import TeacherConfig
from headrace.scoring.teacher.stage import Teacher, TextScorer, TextTeacher, TraceScorer
from headrace.scoring.teacher.vocabulary import vocabulary_problem, width_of
from headrace.tasks.config import TaskConfig
from headrace.tasks.read import Row, read_rows
from headrace.types import Prompt
from headrace.weight_sync.directory import offer
from headrace.weights import Manifest, WeightUpdate

Clock = Callable[[], float]


# -- before anything starts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedTeacher:
    """A teacher whose model was found to fit."""

    config: TeacherConfig
    model_dir: Path
    engine: EngineConfig
    encoder: ChatEncoder | None
    """Its own, where it reads text."""


async def plan_teachers(
    config: RunConfig, model_dir: Path, encoder: ChatEncoder, rows: Sequence[Row] | None = None
) -> list[PlannedTeacher]:
    """Finds the teachers' models (fetched if need be). Raises ConfigError for one that cannot teach this student.

    `rows`: the rows that Python passed."""
    if problem := await asyncio.to_thread(_prompt_without_teacher, config, rows):
        raise ConfigError(problem)
    return [await asyncio.to_thread(_lesson, config, teacher, model_dir, encoder) for teacher in config.teachers]


def _lesson(config: RunConfig, teacher: TeacherConfig, model_dir: Path, encoder: ChatEncoder) -> PlannedTeacher:
    engine = teacher_engine(config, teacher)
    if teacher.student:
        return PlannedTeacher(teacher, model_dir, engine, None)
    try:
        directory = resolve_model(teacher.path, setting=f"the teacher {teacher.name}: path")
    except ConfigError as error:
        raise ConfigError(
            f"{error}. What a run has learned becomes a teacher with two commands: headrace train CONFIG, then "
            f"headrace export RUN --to {teacher.path}"
        ) from None
    own = ChatEncoder(directory)
    if teacher.mode == "text":
        return PlannedTeacher(teacher, directory, engine, own)
    problem = vocabulary_problem(encoder.vocabulary(), own.vocabulary())
    widths = width_of(model_dir), width_of(directory)
    if not problem and config.algo.teacher_top and widths[0] != widths[1]:
        problem = f"the models have {widths[0]} and {widths[1]} rows of logits"
    if problem:
        raise ConfigError(
            f"the teacher {teacher.name} has another vocabulary than the student: {problem}. Log-probs by token cannot be "
            'compared; set mode = "text" in its table, which makes its opinion of the whole text a reward'
        )
    return PlannedTeacher(teacher, directory, engine, None)


def _prompt_without_teacher(config: RunConfig, rows: Sequence[Row] | None) -> str:
    """Empty, or the first row of the task that no teacher takes. Of procedural tasks it cannot be known before."""
    teachers = [teacher for teacher in config.teachers if teacher.mode == "tokens"]
    if not teachers or config.task.kind == "reasoning_gym" or any(teacher.route is None for teacher in teachers):
        return ""
    for number, row in enumerate(read_rows(config.task.kind, config.task.path) if rows is None else rows, 1):
        if not any(teacher.takes(row) for teacher in teachers):
            columns = sorted({teacher.route.column for teacher in teachers if teacher.route})
            told = ", ".join(f"{column} = {row.get(column)!r}" for column in columns)
            return (
                f"no teacher takes row {number} of {config.task.source} ({told}); widen a route, add a [[teachers]] table without "
                "one, or take such rows out"
            )
    return ""


def for_reading(config: RunConfig) -> RunConfig:
    """The run as `headrace eval` needs it: of all teachers those that read text, whose scores are part of the reward."""
    readers = tuple(teacher for teacher in config.teachers if teacher.mode == "text")
    return dataclasses.replace(config, teachers=readers, algo=AlgoConfig())


def shadow_of(config: RunConfig, transport: Transport) -> ShadowStart | None:
    """What the trainer is told of the teacher that is the student itself."""
    for teacher in config.teachers:
        if teacher.student:
            dtype = teacher_engine(config, teacher).serving_dtype
            return ShadowStart(teacher.student, teacher.every, teacher.decay, dtype, transport)
    return None


def reward_weights(config: RunConfig) -> dict[str, float]:
    """Of all named rewards: those of functions, and those of teachers that read text."""
    return {**config.reward.weights, **{one.name: one.weight for one in config.teachers if one.mode == "text"}}


# -- the processes ----------------------------------------------------------------------------------------------------------


class _WithoutSamples:
    """A pool's statistics are those of the run's own engine; of the others only what goes wrong is told."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def record(self, fact: Fact) -> None:
        if not isinstance(fact, EngineSample):
            self._observer.record(fact)


@dataclass(frozen=True)
class Shadowing:
    """How the student's older self reaches the engine that serves it."""

    manifest: Manifest
    transport: Transport


class TeacherEngines:
    """Opens engines, side by side, and closes them all."""

    def __init__(self, launcher: Launcher, observer: Observer, waits: Waits, clock: Clock) -> None:
        self._launcher, self._observer, self._waits, self._clock = launcher, _WithoutSamples(observer), waits, clock
        self.engines: list[Engine] = []

    async def open(self, who: str, model_dir: Path, config: EngineConfig, shadow: Shadowing | None = None) -> Engine:
        """With a shadow, weights will come from the trainer; without, those in the directory are live now."""
        transport = shadow.transport if shadow else None
        job = Job("engine", who, config.cores, transport.inherited if transport else ())
        engine = ProcessEngine(self._launcher, job, config.max_deaths, self._observer, self._clock)
        self.engines.append(engine)
        async with self._waits.named("start", f"the {who}"):
            await engine.launch()
            manifests = {"": shadow.manifest} if shadow else {}
            await engine.open(EngineStart(str(model_dir), dataclasses.asdict(config), manifests, transport))
            if not shadow:
                await engine.load(await asyncio.to_thread(offer, model_dir))
        return engine

    def kill(self) -> None:
        for engine in self.engines:
            engine.kill()

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self.engines))


class SelfTeaching:
    """The student's older self goes to its engine behind the run's own weights, whenever a version of it is due."""

    def __init__(self, trainer: Trainer, engine: Engine, waits: Waits) -> None:
        self._trainer, self._engine, self._waits = trainer, engine, waits
        self._delivery: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()

    async def after_publish(self) -> None:
        """Publishes; the swap goes on beside the run. Raises what went wrong with the swap before."""
        if self._delivery:  # a publish overwrites the slot before last: the last one must be live
            async with self._waits.named("trainer", "the swap in the teacher (of the version before)"):
                await self._delivery
        if update := await self._trainer.publish_shadow():
            self._delivery = asyncio.get_running_loop().create_task(self._deliver(update))
            self._begun.set()

    async def _deliver(self, update: WeightUpdate) -> None:
        async with self._waits.named("delivery", "the swap in the teacher"):
            await self._engine.load(update)

    async def watch(self) -> None:
        """Raises what went wrong with a swap when it goes wrong, not at the next publish: until then the teacher would be an
        older one than the run believes."""
        while True:
            await self._begun.wait()
            self._begun.clear()
            assert self._delivery
            await asyncio.shield(self._delivery)

    def close(self) -> None:
        if self._delivery:
            self._delivery.cancel()


class PublishingTrainer:
    """Protocol `Trainer`: another one, of whose publishes the teacher is served, too."""

    def __init__(self, trainer: Trainer, teaching: SelfTeaching) -> None:
        self._trainer, self._teaching = trainer, teaching
        self.step, self.score, self.save = trainer.step, trainer.score, trainer.save
        self.publish_shadow = trainer.publish_shadow
        self.watch, self.kill, self.close = trainer.watch, trainer.kill, trainer.close

    async def publish(self, adapter: str = "") -> WeightUpdate:
        update = await self._trainer.publish(adapter)
        await self._teaching.after_publish()
        return update


# -- all of it --------------------------------------------------------------------------------------------------------------


@dataclass
class Teaching:
    """Teachers and reference, ready to be asked."""

    engines: TeacherEngines
    teachers: Sequence[Teacher]
    texts: Sequence[TextTeacher]
    reference: Engine | None
    self_teaching: SelfTeaching | None
    waits: Waits
    warn: Callable[[str], None]

    def rewarding(self, scorer: Scorer) -> Scorer:
        """Of evaluation too: text-level teachers are part of the reward."""
        return TextScorer(scorer, self.texts, self.waits) if self.texts else scorer

    def tracing(self, scorer: Scorer) -> Scorer:
        """Of what is trained on."""
        if not self.teachers and self.reference is None:
            return scorer
        return TraceScorer(scorer, self.teachers, self.reference, self.waits, self.warn)

    def publishing(self, trainer: Trainer) -> Trainer:
        """The run's trainer, which serves the teacher that is the student itself behind the run's engine."""
        return PublishingTrainer(trainer, self.self_teaching) if self.self_teaching else trainer

    async def watch(self) -> None:
        """Raises what ends a teacher; returns at once where there is none."""
        async with asyncio.TaskGroup() as watched:
            for engine in self.engines.engines:
                watched.create_task(engine.watch())
            if self.self_teaching:
                watched.create_task(self.self_teaching.watch())

    def kill(self) -> None:
        self.engines.kill()

    async def close(self) -> None:
        if self.self_teaching:
            self.self_teaching.close()
        await self.engines.close()


@dataclass(frozen=True)
class Student:
    """What teachers need of the run."""

    model_dir: Path
    trainer: Trainer
    engine: Engine
    serves_base: bool
    """The run's own engine serves the initial model (LoRA): no other process is needed for the reference."""
    shadow: Shadowing | None
    launcher: Launcher


async def open_teaching(
    config: RunConfig,
    planned_teachers: Sequence[PlannedTeacher],
    student: Student,
    observer: Observer,
    waits: Waits,
    clock: Clock,
) -> Teaching:
    """Starts an engine for each teacher, and one for the reference. Raises ConfigError for a context that is too short."""
    engines = TeacherEngines(student.launcher, observer, waits, clock)
    async with AsyncExitStack() as undo:
        undo.push_async_callback(engines.close)
        try:
            async with asyncio.TaskGroup() as starts:
                opening = [starts.create_task(_open(engines, planned, student)) for planned in planned_teachers]
                referring = starts.create_task(_reference(config, engines, student))
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        opened, reference = [task.result() for task in opening], referring.result()
        pairs = list(zip(planned_teachers, opened, strict=True))
        for planned, engine in pairs:
            check_teacher(f"teacher {planned.config.name}", engine.capabilities, config.algo.teacher_top)
            _check_room(planned, engine, student.engine)
        own = [engine for planned, engine in pairs if planned.config.student]
        self_teaching = SelfTeaching(student.trainer, own[0], waits) if own else None
        undo.pop_all()
    top = config.algo.teacher_top
    return Teaching(
        engines=engines,
        teachers=[_teacher(planned, engine, top) for planned, engine in pairs if planned.config.mode == "tokens"],
        texts=[
            _text_teacher(planned, engine, config.task) for planned, engine in pairs if planned.config.mode == "text"
        ],
        reference=reference,
        self_teaching=self_teaching,
        waits=waits,
        warn=lambda message: observer.record(Warned(clock(), message)),
    )


async def _open(engines: TeacherEngines, planned: PlannedTeacher, student: Student) -> Engine:
    shadow = student.shadow if planned.config.student else None
    return await engines.open(f"teacher {planned.config.name}", planned.model_dir, planned.engine, shadow)


async def _reference(config: RunConfig, engines: TeacherEngines, student: Student) -> Engine | None:
    """The model that the run began with: its directory, or the run's own engine without an adapter."""
    if not config.algo.reference_in_reward:
        return None
    if student.serves_base:
        return student.engine
    engine = dataclasses.replace(config.engine.for_worker, max_adapters=0, routing=False)
    return await engines.open("reference", student.model_dir, engine)


def _check_room(planned: PlannedTeacher, engine: Engine, student: Engine) -> None:
    room, needed = engine.capabilities.context_length, student.capabilities.context_length
    if planned.config.mode == "tokens" and room < needed:
        raise ConfigError(
            f"the teacher {planned.config.name} holds {room} tokens of context, too few for the {needed} that the policy may "
            f"fill; lower engine.context_length to {room}, or choose a teacher with a longer context"
        )


def _teacher(planned: PlannedTeacher, engine: Engine, top: int) -> Teacher:
    return Teacher(planned.config.name, engine, lambda prompt: planned.config.takes(prompt.columns), top)


def _text_teacher(planned: PlannedTeacher, engine: Engine, task: TaskConfig) -> TextTeacher:
    encoder, config = planned.encoder, planned.config
    assert encoder is not None
    system = config.system or task.system

    def encode_prompt(prompt: Prompt) -> tuple[int, ...]:
        if not encoder.has_template:
            return encoder.encode_text(prompt.text)
        return encoder.encode_messages(messages_of(prompt, task.prompt, system))[1]

    return TextTeacher(
        name=config.name,
        engine=engine,
        takes=lambda prompt: config.takes(prompt.columns),
        weight=config.weight,
        encode_prompt=encode_prompt,
        encode_completion=encoder.encode_completion,
    )


def messages_of(prompt: Prompt, column: str, system: str) -> list[dict[str, Any]]:
    """A row's whole conversation where it has one, else the question. The task's solved examples are not among them."""
    conversation = prompt.columns.get(column)
    messages = conversation if isinstance(conversation, list) else [{"role": "user", "content": prompt.text}]
    return [{"role": "system", "content": system}, *messages] if system else list(messages)
