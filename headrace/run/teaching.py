"""Teachers and the reference: the checks before anything starts, the processes that serve them, and their part in scoring.

A teacher is a second engine in its own process, and is replaced when it dies, as the run's engine is. Its weights come from a directory
and never change, or they are the student's older self, which the trainer publishes during the run.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.algo.config import AlgoConfig
from headrace.core.chat.messages import arguments_of, tools_of
from headrace.core.errors import ConfigError, first_error
from headrace.core.protocols import Engine, Job, Launcher, Scorer, Trainer
from headrace.core.types import Completion, Prompt
from headrace.core.weights import WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.episodes.scoring.teacher.config import TeacherConfig
from headrace.episodes.scoring.teacher.own_prompt import OwnPrompt, first_problem
from headrace.episodes.scoring.teacher.stage import Teacher, TraceScorer, vocabulary_problem, width_of
from headrace.episodes.scoring.teacher.text_teacher import TextScorer, TextTeacher, with_system
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.read import Row, read_rows
from headrace.facts.facts import EngineSample, Fact
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.own_groups import Suspects
from headrace.models.chat import ChatEncoder
from headrace.models.resolve import resolve_model
from headrace.run.clients.process_engine import ProcessEngine
from headrace.run.config import RunConfig
from headrace.run.needs import check_teacher
from headrace.run.pools import Pools, Shadowing
from headrace.run.worker.worker_messages import EngineStart
from headrace.weight_sync.directory import offer

# -- before anything starts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedTeacher:
    """A teacher whose model was found and fits the student."""

    config: TeacherConfig
    model_dir: Path
    engine: EngineConfig
    encoder: ChatEncoder | None
    """The teacher's own tokenizer, if it scores text; else None."""
    shows: OwnPrompt | None = None
    """Writes the prompt that it reads instead of the policy's, if it has its own."""


async def plan_teachers(
    config: RunConfig, encoder: ChatEncoder, rows: Sequence[Row] | None = None
) -> list[PlannedTeacher]:
    """Finds the teachers' models, and fetches them if needed. Raises ConfigError for one that cannot teach this student.

    `encoder`: the student's. `rows`: the rows that were passed from Python, if any."""
    task = config.task
    shows = {
        teacher.name: OwnPrompt(teacher, task, encoder.using(task.rendering)) if teacher.prompt else None
        for teacher in config.teachers
    }
    if problem := await asyncio.to_thread(_problem_of_rows, config.teachers, shows, task, rows):
        raise ConfigError(problem)
    planned = [await asyncio.to_thread(_lesson, config, teacher, encoder) for teacher in config.teachers]
    return [dataclasses.replace(one, shows=shows[one.config.name]) for one in planned]


def _lesson(config: RunConfig, teacher: TeacherConfig, encoder: ChatEncoder) -> PlannedTeacher:
    engine = config.engine_of(teacher)
    if teacher.student:
        return PlannedTeacher(teacher, encoder.directory, engine, None)
    try:
        directory = resolve_model(teacher.path, setting=f"the teacher {teacher.name}: path")
    except ConfigError as error:
        raise ConfigError(
            f"{error}. To make a trained run a teacher, run two commands: headrace train CONFIG, then "
            f"headrace export RUN --to {teacher.path}"
        ) from None
    own = ChatEncoder(directory).using(config.task.rendering)
    if teacher.mode == "text":
        if config.environment.turns > 1 and not own.has_template:
            raise ConfigError(
                f"the teacher {teacher.name} reads conversations, because a rollout may have {config.environment.turns} turns, and {directory} "
                "has no chat template; use an instruct model, or add its chat_template.jinja"
            )
        return PlannedTeacher(teacher, directory, engine, own)
    problem = vocabulary_problem(encoder.vocabulary(), own.vocabulary())
    widths = width_of(encoder.directory), width_of(directory)
    if not problem and config.algo.teacher_top and widths[0] != widths[1]:
        problem = f"the models have {widths[0]} and {widths[1]} rows of logits"
    if problem:
        raise ConfigError(
            f"the teacher {teacher.name} has another vocabulary than the student: {problem}. Their log-probs cannot be compared token by "
            'token; set mode = "text" in its table, which makes the log-prob of the whole text a reward'
        )
    return PlannedTeacher(teacher, directory, engine, None)


def _problem_of_rows(
    planned: Sequence[TeacherConfig],
    shows: Mapping[str, OwnPrompt | None],
    task: TaskConfig,
    rows: Sequence[Row] | None,
) -> str:
    """A sentence about the first row that no teacher takes, or that cannot be shown to the one that does; else an empty string. The rows of a
    procedural task cannot be checked before the run."""
    teachers = [teacher for teacher in planned if teacher.mode == "tokens"]
    all_taken = any(teacher.route is None for teacher in teachers)
    if not (task.facts.reads or task.facts.passed) or (all_taken and not any(shows.values())):
        return ""
    given = read_rows(task.kind, task.path) if rows is None else rows
    if problem := first_problem([(teacher, shows[teacher.name]) for teacher in teachers], given):
        return f"{task.source}, {problem}"
    return "" if all_taken or not teachers else _row_without_teacher(teachers, task, given)


def _row_without_teacher(teachers: Sequence[TeacherConfig], task: TaskConfig, rows: Sequence[Row]) -> str:
    for number, row in enumerate(rows, 1):
        if not any(teacher.takes(row) for teacher in teachers):
            columns = sorted({teacher.route.column for teacher in teachers if teacher.route})
            values = ", ".join(f"{column} = {row.get(column)!r}" for column in columns)
            return (
                f"no teacher takes row {number} of {task.source} ({values}); widen a route, add a [[teachers]] table without a "
                "route, or remove such rows"
            )
    return ""


def for_reading(config: RunConfig) -> RunConfig:
    """The config for `headrace eval`. It keeps only the teachers that score text, because their scores are part of the reward."""
    readers = tuple(teacher for teacher in config.teachers if teacher.mode == "text")
    return dataclasses.replace(config, teachers=readers, algo=AlgoConfig())


# -- the processes ----------------------------------------------------------------------------------------------------------


def _without_samples(telemetry: Telemetry) -> Telemetry:
    """Drops the statistics of teachers' engines: the run reports those of its own engine only. Everything else is recorded."""

    def record(fact: Fact) -> None:
        if not isinstance(fact, EngineSample):
            telemetry.record(fact)

    return dataclasses.replace(telemetry, record=record)


class TeacherEngines:
    """Opens the engines of teachers and reference concurrently, and closes them all."""

    def __init__(self, launcher: Launcher, telemetry: Telemetry) -> None:
        self._launcher, self._telemetry = launcher, _without_samples(telemetry)
        self.engines: list[Engine] = []

    async def open(self, who: str, model_dir: Path, config: EngineConfig, shadow: Shadowing | None = None) -> Engine:
        """Starts an engine. With `shadow` the trainer will send its weights; otherwise those in the directory are live on return."""
        transport = shadow.transport if shadow else None
        job = Job("engine", who, config.cores, transport.inherited if transport else ())
        suspects = Suspects(config.ticket_deaths)
        engine = ProcessEngine(self._launcher, job, config.max_deaths, self._telemetry, suspects)
        self.engines.append(engine)
        async with self._telemetry.waits.named("start", f"the {who}"):
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
    """Sends the student's older self to the engine that serves it as a teacher, whenever a new version of it is due."""

    def __init__(self, trainer: Trainer, engine: Engine, waits: Waits) -> None:
        self._trainer, self._engine, self._waits = trainer, engine, waits
        self._delivery: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()

    async def after_publish(self) -> None:
        """Publishes the older self if it is due. Its swap runs in the background. Raises the error of the previous swap."""
        if self._delivery:  # a publish overwrites the slot before last, so the last version must be live
            async with self._waits.named("trainer", "the swap in the teacher (of the version before)"):
                await self._delivery
        if update := await self._trainer.publish_shadow():
            self._delivery = asyncio.get_running_loop().create_task(self._deliver(update))
            self._begun.set()

    async def _deliver(self, update: WeightUpdate) -> None:
        async with self._waits.named("delivery", "the swap in the teacher"):
            await self._engine.load(update)

    async def watch(self) -> None:
        """Raises the error of a swap at once. Raised only at the next publish, the teacher would meanwhile be older than the run
        assumes."""
        while True:
            await self._begun.wait()
            self._begun.clear()
            assert self._delivery
            await asyncio.shield(self._delivery)

    def close(self) -> None:
        if self._delivery:
            self._delivery.cancel()


class PublishingTrainer:
    """Protocol `Trainer`: wraps a trainer, and publishes the student's older self after each of its publishes."""

    def __init__(self, trainer: Trainer, teaching: SelfTeaching) -> None:
        self._trainer, self._teaching = trainer, teaching
        self._copied = False
        self.step, self.score, self.capture, self.save = trainer.step, trainer.score, trainer.capture, trainer.save
        self.publish_shadow, self.begin_trial, self.end_trial = (
            trainer.publish_shadow,
            trainer.begin_trial,
            trainer.end_trial,
        )
        self.watch, self.kill, self.close = trainer.watch, trainer.kill, trainer.close

    async def copy(self, adapter: str = "") -> None:
        """Publishes the older self here, because the next step may have begun when `publish` returns."""
        await self._trainer.copy(adapter)
        await self._teaching.after_publish()
        self._copied = True

    async def publish(self, adapter: str = "") -> WeightUpdate:
        update = await self._trainer.publish(adapter)
        copied, self._copied = self._copied, False
        if not copied:
            await self._teaching.after_publish()
        return update


# -- all of it --------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Teaching:
    """Teachers and reference, with their engines running."""

    engines: TeacherEngines
    teachers: Sequence[Teacher]
    texts: Sequence[TextTeacher]
    reference: Engine | None
    self_teaching: SelfTeaching | None
    telemetry: Telemetry

    def rewarding(self, scorer: Scorer) -> Scorer:
        """Adds the rewards of teachers that score text. Used in training and in evaluation."""
        return TextScorer(scorer, self.texts, self.telemetry.waits) if self.texts else scorer

    def tracing(self, scorer: Scorer) -> Scorer:
        """Adds the log-probs of teachers and reference. Used in training only."""
        if not self.teachers and self.reference is None:
            return scorer
        return TraceScorer(scorer, self.teachers, self.reference, self.telemetry.waits, self.telemetry.warn)

    def publishing(self, trainer: Trainer) -> Trainer:
        """The run's trainer. If the student's older self is a teacher, the result publishes it too."""
        return PublishingTrainer(trainer, self.self_teaching) if self.self_teaching else trainer

    async def watch(self) -> None:
        """Raises the error that ends a teacher. Returns at once if there is none."""
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


async def open_teaching(
    config: RunConfig,
    planned_teachers: Sequence[PlannedTeacher],
    pools: Pools,
    encoder: ChatEncoder,
    telemetry: Telemetry,
    *,
    adapted: bool,
) -> Teaching:
    """Starts an engine for each teacher, and one for the reference. Raises ConfigError if a teacher's context is too short. `encoder`: the
    student's. `adapted`: whether the run's own engine also serves the initial model (LoRA). The reference then needs no process of its own."""
    engines = TeacherEngines(pools.launcher, telemetry)
    async with AsyncExitStack() as undo:
        undo.push_async_callback(engines.close)
        try:
            async with asyncio.TaskGroup() as starts:
                opening = [starts.create_task(_open(engines, planned, pools.shadow)) for planned in planned_teachers]
                referring = None
                if config.algo.reference_in_reward:
                    base = pools.engine if adapted else None
                    opens = _reference(config.engine_beside, engines, encoder.directory, base)
                    referring = starts.create_task(opens)
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        opened = [task.result() for task in opening]
        pairs = list(zip(planned_teachers, opened, strict=True))
        for planned, engine in pairs:
            check_teacher(f"teacher {planned.config.name}", engine.capabilities, config.algo.teacher_top)
            _check_room(planned, engine, pools.engine)
        own = [engine for planned, engine in pairs if planned.config.student]
        self_teaching = SelfTeaching(pools.trainer, own[0], telemetry.waits) if own else None
        undo.pop_all()
    top = config.algo.teacher_top
    return Teaching(
        engines=engines,
        teachers=[_teacher(planned, engine, top) for planned, engine in pairs if planned.config.mode == "tokens"],
        texts=[
            _text_teacher(planned, engine, config.task, encoder.has_ended)
            for planned, engine in pairs
            if planned.config.mode == "text"
        ],
        reference=referring.result() if referring else None,
        self_teaching=self_teaching,
        telemetry=telemetry,
    )


async def _open(engines: TeacherEngines, planned: PlannedTeacher, shadow: Shadowing | None) -> Engine:
    own = shadow if planned.config.student else None
    return await engines.open(f"teacher {planned.config.name}", planned.model_dir, planned.engine, own)


async def _reference(config: EngineConfig, engines: TeacherEngines, model_dir: Path, base: Engine | None) -> Engine:
    """The engine of the initial model: its own process, or `base`, the run's engine, which serves it without an adapter."""
    if base:
        return base
    own = dataclasses.replace(config.for_worker, max_adapters=0, routing=False)
    return await engines.open("reference", model_dir, own)


def _check_room(planned: PlannedTeacher, engine: Engine, student: Engine) -> None:
    room, needed = engine.capabilities.context_length, student.capabilities.context_length
    if planned.config.mode == "tokens" and room < needed:
        raise ConfigError(
            f"the teacher {planned.config.name} has a context of {room} tokens, fewer than the {needed} that the policy may "
            f"fill; lower engine.context_length to {room}, or choose a teacher with a longer context"
        )


def _teacher(planned: PlannedTeacher, engine: Engine, top: int) -> Teacher:
    takes = lambda prompt: planned.config.takes(prompt.columns)  # noqa: E731
    return Teacher(planned.config.name, engine, takes, top, planned.shows)


def _text_teacher(
    planned: PlannedTeacher, engine: Engine, task: TaskConfig, has_ended: Callable[[Completion], bool]
) -> TextTeacher:
    encoder, config = planned.encoder, planned.config
    assert encoder is not None
    system = config.system or task.system

    def encode_prompt(prompt: Prompt) -> tuple[int, ...]:
        if not encoder.has_template:
            return encoder.encode_text(prompt.text)
        shown = messages_of(prompt, task.prompt, system), tools_of(prompt.columns), arguments_of(prompt.columns)
        return encoder.encode_messages(*shown)[1]

    def encode_messages(messages: Sequence[Mapping[str, Any]], prompt: Prompt) -> tuple[int, ...]:
        shown = with_system(messages, config.system), (), arguments_of(prompt.columns)
        return encoder.encode_messages(*shown)[1]

    return TextTeacher(
        name=config.name,
        engine=engine,
        takes=lambda prompt: config.takes(prompt.columns),
        weight=config.weight,
        encode_prompt=encode_prompt,
        encode_messages=encode_messages,
        encode_completion=encoder.encode_completion,
        has_ended=has_ended,
    )


def messages_of(prompt: Prompt, column: str, system: str) -> list[dict[str, Any]]:
    """The row's conversation if it has one, else its question as one message. The task's solved examples are left out."""
    conversation = prompt.columns.get(column)
    messages = conversation if isinstance(conversation, list) else [{"role": "user", "content": prompt.text}]
    return [{"role": "system", "content": system}, *messages] if system else list(messages)
