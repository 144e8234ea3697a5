"""The trial of what a run learns from: its rows, prompts, teachers, environment and reward are loaded and tried once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from headrace.algo.config import AlgoConfig, is_user_function
from headrace.core.errors import ConfigError
from headrace.core.protocols import Task
from headrace.core.reports import Sight
from headrace.core.types import Completion, Episode, Prompt
from headrace.episodes.sandbox.config import SandboxConfig
from headrace.episodes.scoring.config import RewardConfig
from headrace.episodes.scoring.extract import Extractor
from headrace.episodes.scoring.functions import RewardFunction
from headrace.episodes.scoring.job import is_async
from headrace.episodes.scoring.workers.processes import WorkerProcess, begin_worker
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.demonstrations import read_demonstrations, unanswered
from headrace.loop.curriculum_config import CurriculumConfig
from headrace.models.chat import ChatEncoder
from headrace.models.resolve import check_model_dir
from headrace.run.build import (
    LoadedFiles,
    build_course,
    build_environment,
    build_scorer,
    build_task,
    check_models_beside,
)
from headrace.run.config import RunConfig
from headrace.run.evaluation_sets import read_sets
from headrace.run.learning_problems import correction_of, quantised_words
from headrace.run.python_inputs import PythonInputs
from headrace.run.rehearsal.first_rows import (
    RewardTrial,
    angles_problem,
    episode_lines,
    first_prompts,
    length_problem,
    lengths,
    reward_lines,
    sight_of,
    stand_in,
    try_environment,
    try_reward,
)
from headrace.run.rehearsal.memory_needs import (
    ModelShape,
    read_shape,
)
from headrace.run.rehearsal.preflight import preflight
from headrace.run.rehearsal.words import Lines, algorithm, shown_to_teacher
from headrace.run.rehearsed import Rehearsal
from headrace.run.teaching import PlannedTeacher, plan_teachers
from headrace.run.warm_start import course_lines, described
from headrace.settings.user_code import defines
from headrace.trainer.config import rate_remarks


async def task_and_reward(
    found: Rehearsal, config: RunConfig, model_dir: Path | None, inputs: PythonInputs, *, needs_reward: bool = True
) -> None:
    """Tries the files of the model, the task and the reward of a run, or of one of its adapters."""
    trial = _RowTrial(found=found, config=config, inputs=inputs, needs_reward=needs_reward)
    found.notes += [
        f"{config.name}: {remark}" if trial.several else remark for remark in rate_remarks(config.train, config.lora)
    ]
    with found.part():
        _own_functions(config.algo)
        found.sections[f"Algorithm{trial.several}"] = algorithm(config.algorithm)
        if sentence := quantised_words(config.engine, config.algo, config.watch):
            found.sections[f"Algorithm{trial.several}"] = [*algorithm(config.algorithm), ("quantised", sentence)]
            if not correction_of(config.algo):
                found.notes.append(f"{sentence}. docs/quantised.md shows what that costs")
    if model_dir is None:
        return
    async with _reward_worker(config.reward, config.sandbox, inputs.rewards) as beginning:
        with found.part():
            await trial.run(model_dir, beginning)
    with found.part():
        await trial.sets()


@dataclass(frozen=True, kw_only=True)
class _RowTrial:
    """The trial of one run, or of one adapter's part of it."""

    found: Rehearsal
    config: RunConfig
    inputs: PythonInputs
    needs_reward: bool

    @property
    def adapter(self) -> str:
        return self.config.name if self.found.config.adapters else ""

    @property
    def several(self) -> str:
        """The end of the titles of its sections, if there are several."""
        return f", {self.adapter}" if self.adapter else ""

    async def run(self, model_dir: Path, beginning: asyncio.Task[WorkerProcess] | None) -> None:
        """Tries the files of the model, the task, and the reward. `beginning`: the process of its functions."""
        found, config, inputs, several = self.found, self.config, self.inputs, self.several
        encoder = await self._encoder(model_dir)
        with found.steps.doing(f"reading the task {config.task.name or Path(config.task.path).name}".rstrip()):
            task = await asyncio.to_thread(build_task, config.task, encoder, config.seed, inputs.rows)
        found.agree(
            await asyncio.to_thread(
                preflight,
                encoder.using(config.task.rendering),
                chat=config.task.chat,
                turns=config.environment.in_processes,
                lora=config.lora,
                engine=config.engine.kind,
                several=bool(found.config.adapters),
                system=bool(config.task.system),
            ),
            model_dir,
        )
        prompts = await asyncio.to_thread(first_prompts, task, config.eval.prompts)
        found.notes += await asyncio.to_thread(task.remarks)
        found.sections[f"Prompts{several}"] = _prompts(
            found,
            config.curriculum,
            read_shape(model_dir),
            encoder,
            prompts,
            context=config.engine.context_length,
            most=config.rollout.max_tokens,
        )
        await self._given_answers(encoder.using(config.task.rendering), prompts)
        await asyncio.to_thread(check_models_beside, config.algo, encoder, config.engine.context_length)
        found.planned_teachers += (planned := await plan_teachers(config, encoder, inputs.rows))
        await _shown(found, planned, task, encoder, most=config.rollout.max_tokens)
        episode: Episode | None = None
        if config.environment.is_handed_out:
            found.sections[f"Environment{several}"] = [("", "agents elsewhere play the rollouts: nothing was tried")]
        elif config.environment.in_processes:
            with found.steps.doing("playing a rollout in the environment"):
                episode, lines = await _environment(config, prompts[0], encoder)
            found.sections[f"Environment{several}"] = lines
        tried: RewardTrial | None = None
        if self.needs_reward or config.reward.given:
            with found.steps.doing("trying the reward"):
                begun = await beginning if beginning else None
                lines, tried = await _reward(config, inputs.rewards, prompts[0], encoder, episode=episode, begun=begun)
            found.sections[f"Reward{several}"] = lines
        found.sight = _sight(config.task, config.reward, encoder, prompts[0], episode=episode, tried=tried)
        loaded = beginning.result().functions if beginning else ()
        found.tried[self.adapter] = LoadedFiles(encoder=encoder, task=task, planned_teachers=planned, rewards=loaded)

    async def sets(self) -> None:
        """Reads the further evaluation sets, and tries what each has of its own, and the reward, on its first prompt."""
        found, config, inputs = self.found, self.config, self.inputs
        if not config.eval.sets or not (files := found.tried.get(self.adapter)):
            return
        encoder, lines = files.encoder, list[tuple[str, str]]()
        with found.steps.doing("reading the evaluation sets"):
            sets = await asyncio.to_thread(read_sets, config, encoder, files.task, inputs.rows)
        for one in sets:
            run, named = one.run, f"the evaluation set {one.config.name}"
            found.notes += one.remarks
            seen = lengths(one.prompts, config.engine.context_length - config.rollout.max_tokens)
            if problem := length_problem(seen, config.rollout.max_tokens, config.engine.context_length, 0):
                found.doubt(f"{named}: {problem}", certain=seen.too_long == seen.looked_at)
            lines.append((one.config.name, f"{one.words}, prompts of {seen.shortest} to {seen.longest} tokens"))
            episode: Episode | None = None
            if run.environment.in_processes and one.has_own_environment:
                with found.steps.doing(f"playing a rollout of {named}"):
                    episode, played = await _environment(run, one.prompts[0], encoder)
                lines += played
            unknown = run.environment.in_processes and not episode
            if self.needs_reward and (run.reward.given or inputs.rewards) and not unknown:
                rewards = () if one.config.reward else inputs.rewards
                with found.steps.doing(f"trying the reward on {named}"):
                    tried, _ = await _reward(run, rewards, one.prompts[0], encoder, episode=episode, begun=None)
                lines += tried
        found.sections[f"Evaluation sets{self.several}"] = lines

    async def _encoder(self, model_dir: Path) -> ChatEncoder:
        config = self.config
        check_model_dir(model_dir, need_chat_template=config.task.chat)
        with self.found.steps.doing("reading the tokenizer"):
            encoder = await asyncio.to_thread(ChatEncoder, model_dir)
        if (constraint := config.rollout.constraint.constraint) and not config.engine.is_server:
            await asyncio.to_thread(encoder.try_constraint, constraint)
        return encoder.with_special_tokens(config.reward.special_tokens)

    async def _given_answers(self, encoder: ChatEncoder, prompts: Sequence[Prompt]) -> None:
        """Reads the given answers: those beside the steps, and those of the warm start, which a run that is resumed has behind it."""
        found, config = self.found, self.config
        if course := await asyncio.to_thread(build_course, config, encoder):
            found.sections["Demonstrations"] = course_lines(config.algo, config.train.steps, course, encoder)
            found.notes += unanswered(course, prompts) if config.algo.given_answers == "compared" else ()
        if not config.warm_start.path or found.resumes:
            return
        own, task, room = config.warm_start, config.task, config.engine.context_length
        with found.part(), found.steps.doing("reading the rows of the warm start"):
            found.demonstrations = await asyncio.to_thread(
                read_demonstrations, own, task, encoder, seed=config.seed, context=room
            )
            found.sections["Warm start"] = described(config, found.demonstrations, encoder)


@asynccontextmanager
async def _reward_worker(
    reward: RewardConfig, sandbox: SandboxConfig, rewards: Sequence[RewardFunction]
) -> AsyncIterator[asyncio.Task[WorkerProcess] | None]:
    """The start of a process with the reward functions, while the caller loads the rest. It ends with this context."""
    if rewards or not reward.specs or reward.from_python:
        yield None
        return
    with TemporaryDirectory() as logs:
        starting = begin_worker(reward.named, sandbox.settings.as_text(), Path(logs) / "scorer.log")
        beginning = asyncio.create_task(starting)
        try:
            yield beginning
        finally:
            beginning.cancel()
            await asyncio.wait([beginning])
            if not beginning.cancelled() and not beginning.exception():
                await beginning.result().close()


def _sight(
    task: TaskConfig,
    reward: RewardConfig,
    encoder: ChatEncoder,
    prompt: Prompt,
    *,
    episode: Episode | None,
    tried: RewardTrial | None,
) -> Sight:
    if episode:  # what an environment made of the row
        turn = episode.turns[0]
        prompt, completion = msgspec.structs.replace(prompt, tokens=turn.context), turn.completion.tokens
    else:
        text, _ = stand_in(prompt, answer=task.answer, extracts=reward.extracts)
        completion = encoder.encode_completion(text, True)
    given = None
    if len(reward.specs) == 1 and (kind := reward.specs[0].extract) and not episode:
        given = Extractor(kind)(Completion(completion, (), (), "stop", encoder.decode(completion)))
    message = tried.words if tried else ""
    return sight_of(encoder, prompt, completion, system=task.system, given=given, reward=message)


def _own_functions(algo: AlgoConfig) -> None:
    """Checks that the user's own loss and advantage exist. Their files are not executed here, because a loss imports torch."""
    for setting, spec in (("advantage", algo.recipe.advantage), ("loss", str(algo.recipe.loss))):
        if is_user_function(spec) and (problem := defines(spec)):
            raise ConfigError(f"algo.{setting} = {spec}: {problem}")


def _prompts(
    found: Rehearsal,
    curriculum: CurriculumConfig,
    shape: ModelShape,
    encoder: ChatEncoder,
    prompts: Sequence[Prompt],
    *,
    context: int,
    most: int,
) -> Lines:
    """`context`: of the engine; `most`: tokens that a rollout may have."""
    if problem := angles_problem(context, shape.steady):
        found.doubt(problem, certain=True)
    room = min(context, shape.positions or context) - most
    seen = lengths(prompts, room)
    found.prompt_tokens = seen.median
    if problem := length_problem(seen, most, context, shape.positions):
        found.doubt(problem, certain=seen.too_long == seen.looked_at)
    message = f"{seen.shortest} to {seen.longest} tokens, median {seen.median}; there is room for {room}"
    first = encoder.written(prompts[0].tokens)
    return [
        ("next", f"{curriculum.words} (curriculum.kind = {curriculum.kind})"),
        ("lengths", f"{message} ({seen.looked_at} looked at)"),
        *([("images", _of_images(prompts))] if any(prompt.images for prompt in prompts) else []),
        ("the first", first),
        ("", f"({prompts[0].id})"),
    ]


async def _shown(
    found: Rehearsal, teachers: Sequence[PlannedTeacher], task: Task, encoder: ChatEncoder, *, most: int
) -> None:
    """Writes the first prompts as teachers with their own read them; they read none of the held-out ones. `most`: tokens that a rollout may have."""
    if not any(planned.shows for planned in teachers):
        return
    prompts = await asyncio.to_thread(first_prompts, task, 0)
    for planned in teachers:
        taken = [prompt for prompt in prompts if planned.config.takes(prompt.columns)]
        if planned.shows and taken:
            name, context = planned.config.name, planned.engine.context_length
            lines, problem, certain = shown_to_teacher(
                name, planned.shows, taken, encoder.written, context=context, most=most
            )
            if problem:
                found.doubt(problem, certain)
            found.sections["Teachers"] = [*found.sections.get("Teachers", ()), *lines]


def _of_images(prompts: Sequence[Prompt]) -> str:
    counts = [len(prompt.images) for prompt in prompts]
    each = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return f"{each} in a prompt; their features are computed, and what sees is frozen"


async def _environment(config: RunConfig, prompt: Prompt, encoder: ChatEncoder) -> tuple[Episode, Lines]:
    """Plays one episode with a fixed text in place of each reply."""
    with TemporaryDirectory() as logs:
        log = Path(logs) / "environment.log"
        kind = await asyncio.to_thread(build_environment, config, encoder, log)
        try:
            seed, answer = config.seed, config.task.answer
            played = await try_environment(
                kind, prompt, seed, answer=answer, encode=encoder.encode_completion, decode=encoder.decode
            )
        finally:
            await kind.close()
        printed = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    first = encoder.written(played.episode.turns[0].context)
    remarks = [("", remark) for remark in kind.remarks()]
    return played.episode, [
        *episode_lines(played, first, config.algo.recipe.credit),
        *remarks,
        *(("it printed", line) for line in printed[:3]),
    ]


async def _reward(
    config: RunConfig,
    rewards: Sequence[RewardFunction],
    prompt: Prompt,
    encoder: ChatEncoder,
    *,
    episode: Episode | None,
    begun: WorkerProcess | None,
) -> tuple[Lines, RewardTrial | None]:
    """`begun`: the process of the functions, if they are of files."""
    if any(map(is_async, rewards)):  # an open connection belongs to the run's event loop, where `prepare` calls it
        message = "an async function from Python: it is called once when the run starts, before the model is loaded"
        return [("", message)], None
    with TemporaryDirectory() as logs:
        log = Path(logs) / "scorer.log"
        scorer = await asyncio.to_thread(
            partial(
                build_scorer,
                replace(config, reward=config.reward.for_trial),
                rewards,
                log,
                decode=encoder.decode,
                begun=begun,
            )
        )
        try:
            if not config.reward.given and not rewards:
                alone = (
                    "the environment's own"
                    if config.environment.rewards
                    else "none: the run learns only from its teachers"
                )
                return [("", alone)], None
            size = config.rollout.group_size
            tried = await try_reward(
                scorer,
                prompt,
                answer=config.task.answer,
                extracts=config.reward.extracts,
                group_size=size,
                encode=encoder.encode_completion,
                episode=episode,
                compares=bool(config.reward.comparing),
                services=[endpoint.name for endpoint in config.reward.endpoints],
            )
        finally:
            await scorer.close()
        log = begun.log if begun and begun.log else log
        printed = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    lines = [("" if number else "returned", line) for number, line in enumerate(reward_lines(tried))]
    return [*lines, *(("it printed", line) for line in printed[:3])], tried
