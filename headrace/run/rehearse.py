"""The rehearsal of a run: finds every error that can be found before a model is loaded and before anything is written.

`headrace train` begins with it, `headrace train --dry-run` prints its result, and a resumed run does it before it changes its directory.
Complaints are collected, so that one start shows all of them.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from headrace.algo.config import AlgoConfig, is_user_function
from headrace.core.errors import ConfigError
from headrace.core.protocols import Task
from headrace.core.reports import Finding, Sight
from headrace.core.types import Completion, Episode, Prompt
from headrace.durable.journal import count_steps
from headrace.engine.native.served_how import served_how
from headrace.engine.remote.server_kind import server_kind
from headrace.engine.servers.installed import require
from headrace.episodes.sandbox.config import SandboxConfig
from headrace.episodes.scoring.config import RewardConfig
from headrace.episodes.scoring.extract import Extractor
from headrace.episodes.scoring.functions import RewardFunction
from headrace.episodes.scoring.job import is_async
from headrace.episodes.scoring.workers.processes import WorkerProcess, begin_worker
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.demonstrations import Demonstrations, read_demonstrations, unanswered
from headrace.facts.facts import FilesChecked, Warned
from headrace.loop.curriculum_config import CurriculumConfig
from headrace.loop.run_limits import SHORT
from headrace.models.chat import ChatEncoder
from headrace.models.resolve import check_model_dir
from headrace.native.resources import gib
from headrace.processes.frames import LONGEST
from headrace.run.auto.gpu_sizes import gpu_notes
from headrace.run.auto.measurer import Measurer, ProbeMeasurer, measure_share
from headrace.run.build import LoadedFiles, build_course, build_environment, build_scorer, build_task, loaded_model
from headrace.run.choosing import fit_minutes, settle, settle_adapter, settle_sizes
from headrace.run.config import RunConfig, read_config
from headrace.run.evaluation_sets import read_sets
from headrace.run.fleets.core_shares import nothing_to_lend, share_problems
from headrace.run.python_inputs import NO_INPUTS, PythonInputs
from headrace.run.quantised import correction_of, quantised_words
from headrace.run.rehearsal import machine as machines
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
from headrace.run.rehearsal.machine import Machine, place_problem
from headrace.run.rehearsal.memory_needs import (
    MemoryNeed,
    ModelShape,
    checkpoint_bytes,
    engine_needs,
    memory_plan,
    needs,
    notes,
    read_shape,
    refusals,
    warm_lines,
)
from headrace.run.rehearsal.preflight import preflight
from headrace.run.rehearsal.words import Lines, algorithm, memory_lines, page, shown_to_teacher
from headrace.run.run_directory import CONFIG, refuse_used
from headrace.run.seats import check_seats
from headrace.run.teaching import PlannedTeacher, plan_teachers
from headrace.run.warm_start import course_lines, described
from headrace.run.wording import headline, placement, untried
from headrace.settings.user_code import defines
from headrace.trainer.config import TrainConfig, change_of_rate, drawn, rate_remarks
from headrace.trainer.dealing.share import MOST_TRAJECTORIES, TOKEN_BYTES
from headrace.views.screen.start_line import StartSteps
from headrace.weight_sync.cuda_ipc import NO_GPU
from headrace.weight_sync.delta.efficiency import poor_settings

_ORDER = (
    "Run",
    "Warm start",
    "Demonstrations",
    "Prompts",
    "Teachers",
    "Environment",
    "Reward",
    "Evaluation sets",
    "Algorithm",
    "Where",
    "Memory",
)


@dataclass(kw_only=True)
class Rehearsal:
    """The result of a rehearsal."""

    config: RunConfig
    """The config, with chosen values for settings that it left open."""
    sections: dict[str, Lines] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Remarks on settings that work, but perhaps not as intended."""
    keys: dict[str, str] = field(default_factory=dict)
    """Keys of those notes that the run may withdraw."""
    problems: list[str] = field(default_factory=list)
    resumes: bool = False
    planned_teachers: list[PlannedTeacher] = field(default_factory=list)
    """The teachers whose models were found."""
    findings: list[Finding] = field(default_factory=list)
    """The preflight of the model's files."""
    sight: Sight | None = None
    """One row, as the model and as the reward see it."""
    prompt_tokens: int = 0
    """Length of a usual prompt."""
    steps: StartSteps = field(default_factory=StartSteps)
    """The work of the moment."""
    tried: dict[str, LoadedFiles] = field(default_factory=dict)
    """The parts that were loaded for each run, by the names of adapters; the name is empty if there is one run."""
    demonstrations: Demonstrations | None = None
    """The rows of the warm start, if the run begins with one."""
    served: str = ""
    """The way in which the native engine serves the model, and its speed; empty if that was not asked."""
    unmeasured: str = ""
    """The reason why nothing could be measured; empty if it was."""

    def page(self) -> str:
        """The result as text, 80 columns wide."""
        return page(
            dict(sorted(self.sections.items(), key=lambda item: _ORDER.index(item[0].split(",")[0]))), self.notes
        )

    def facts(self, t: float) -> list[FilesChecked | Warned]:
        """The facts with which a run begins. `t`: now, in the run's seconds."""
        checked = [FilesChecked(t, tuple(self.findings), self.sight)] if self.findings else []
        return [*checked, *(Warned(t, note, self.keys.get(note, "")) for note in self.notes)]

    @contextmanager
    def part(self) -> Iterator[None]:
        """Collects a ConfigError of this part, so that the next part is checked too."""
        try:
            yield
        except ConfigError as error:
            self.problems.append(str(error))

    def doubt(self, problem: str, certain: bool) -> None:
        """Refuses what is certain to fail. In a resumed run it only notes the problem, because the run has worked before."""
        if certain and not self.resumes:
            raise ConfigError(problem)
        self.notes.append(problem)

    def agree(self, findings: Sequence[Finding], model_dir: Path) -> None:
        """Takes what the preflight of a model found: contradictions are refused, remarks noted."""
        self.findings = [*findings]
        for finding in findings:
            with self.part():
                if finding.verdict == "refused":
                    self.doubt(f"{model_dir}: {finding.text}", certain=True)
            if finding.verdict == "remark" and finding.text not in self.notes:
                self.notes.append(finding.text)


async def rehearse(
    config: RunConfig,
    inputs: PythonInputs = NO_INPUTS,
    resume: Path | None = None,
    thorough: bool = False,
    measurer: Measurer | None = None,
) -> Rehearsal:
    """Raises ConfigError with all complaints, one per line.

    `inputs`: as for `run.train`. `resume`: the directory of the run to resume. Uncertain problems (memory, prompts that are too long) are
    then only noted, because the run has worked before, and no settings are chosen, because they were chosen then. `thorough`: also ask
    torch for facts that are only printed. `measurer`: measures this machine; by default with a short probe.
    """
    found = Rehearsal(config=config, resumes=bool(resume))
    async with found.steps.shown() if config.observe.terminal != "off" else nullcontext():
        await _rehearse(found, inputs, resume, thorough, measurer or ProbeMeasurer())
    if found.problems:
        raise ConfigError("\n".join(dict.fromkeys(found.problems)))
    found.sections["Run"] = _run(found.config)
    for run in found.config.runs if thorough else ():
        found.sections["Run"] = [*found.sections["Run"], *_rate(found, run.name, run.train, resume)]
    return found


async def _rehearse(
    found: Rehearsal, inputs: PythonInputs, resume: Path | None, thorough: bool, measurer: Measurer
) -> None:
    config = found.config
    with found.part():
        _place(config, resume)
    probe = machines.ask_torch() if thorough or machines.may_have_gpu() else None
    model_dir: Path | None = None
    try:
        with found.part(), found.steps.doing(f"finding the model {config.model.path}"):
            model_dir = await asyncio.to_thread(loaded_model, config, inputs.rows)
            if not resume:
                config = found.config = settle_adapter(config, model_dir)
        for run in config.runs:
            await _task_and_reward(found, run, model_dir, inputs)
        with found.part():
            machine = await asyncio.to_thread(machines.inspect_machine, probe)
            if model_dir and not resume:
                with found.steps.doing("measuring this machine"):
                    await asyncio.to_thread(_choose, found, machine, model_dir, measurer)
                with found.part(), found.steps.doing("asking how the engine serves this model"):
                    found.served = await asyncio.to_thread(served_how, model_dir, found.config.engine)
            if model_dir:
                _machine_and_memory(found, machine, model_dir)
    finally:
        _end(probe)


async def try_files(config: RunConfig, inputs: PythonInputs = NO_INPUTS) -> Rehearsal:
    """Returns the part of a rehearsal that concerns the files of the model, the rows and the reward. Its `problems` are not raised."""
    found = Rehearsal(config=config)
    with found.part():
        model_dir = await asyncio.to_thread(loaded_model, config, inputs.rows)
        config = found.config = settle_adapter(config, model_dir)
        await _task_and_reward(found, config, model_dir, inputs, needs_reward=False)
    return found


def _end(probe: subprocess.Popen[str] | None) -> None:
    if probe and probe.poll() is None:
        probe.kill()
        probe.communicate()


# --- the directory -----------------------------------------------------------------------------------------------------


def _place(config: RunConfig, resume: Path | None) -> None:
    if problem := place_problem(resume or config.run_dir, config.out):
        raise ConfigError(problem)
    if not resume:
        refuse_used(config.run_dir)
    check_seats(config.orchestration)


def _run(config: RunConfig) -> Lines:
    staleness, rollout = config.staleness, config.rollout
    return [
        ("", headline(config)),
        ("steps", f"{config.train.steps}, each of {staleness.groups_per_step} groups x {rollout.group_size} rollouts"),
        (
            "lag",
            f"{staleness.slots} tickets: no token is older than {staleness.lag_bound} optimizer step(s) when it is trained",
        ),
        ("directory", str(config.run_dir)),
    ]


def _rate(found: Rehearsal, name: str, train: TrainConfig, resume: Path | None) -> Lines:
    """The learning rate over the steps, and a note if it goes on otherwise than a run that is resumed would have."""
    before, done, several = None, 0, bool(found.config.adapters)
    own = resume / name if resume and several else resume
    if own and (own / CONFIG).exists():  # an adapter's is missing if the run was killed at its start
        before, done = read_config(own / CONFIG).train, count_steps(own)
        if message := change_of_rate(before, train, done):
            found.notes.append(f"{name}: {message}" if several else message)
    curve = drawn(train, before, done).splitlines()
    lines = [f"{name}: {curve[0]}" if several else curve[0], *curve[1:]]
    return [("" if number else "rate", line) for number, line in enumerate(lines)]


# --- the task and the reward -------------------------------------------------------------------------------------------


async def _task_and_reward(
    found: Rehearsal, config: RunConfig, model_dir: Path | None, inputs: PythonInputs, *, needs_reward: bool = True
) -> None:
    several = f", {config.name}" if found.config.adapters else ""
    found.notes += [
        f"{config.name}: {remark}" if several else remark for remark in rate_remarks(config.train, config.lora)
    ]
    with found.part():
        _own_functions(config.algo)
        found.sections[f"Algorithm{several}"] = algorithm(config.algorithm)
        if sentence := quantised_words(config.engine, config.algo, config.watch):
            found.sections[f"Algorithm{several}"] = [*algorithm(config.algorithm), ("quantised", sentence)]
            if not correction_of(config.algo):
                found.notes.append(f"{sentence}. docs/quantised.md shows what that costs")
    if model_dir is None:
        return
    async with _reward_worker(config.reward, config.sandbox, inputs.rewards) as beginning:
        await _tried(found, config, model_dir, inputs, beginning, needs_reward=needs_reward)
    with found.part():
        await _sets(found, config, inputs, needs_reward=needs_reward)


async def _tried(
    found: Rehearsal,
    config: RunConfig,
    model_dir: Path,
    inputs: PythonInputs,
    beginning: asyncio.Task[WorkerProcess] | None,
    *,
    needs_reward: bool,
) -> None:
    """Tries the files of the model, the task, and the reward. `beginning`: the process of its functions."""
    several = f", {config.name}" if found.config.adapters else ""
    with found.part():
        encoder = await _encoder(found, config, model_dir)
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
        await _given_answers(found, config, encoder.using(config.task.rendering), prompts)
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
        if needs_reward or config.reward.given:
            with found.steps.doing("trying the reward"):
                begun = await beginning if beginning else None
                lines, tried = await _reward(config, inputs.rewards, prompts[0], encoder, episode=episode, begun=begun)
            found.sections[f"Reward{several}"] = lines
        found.sight = _sight(config.task, config.reward, encoder, prompts[0], episode=episode, tried=tried)
        name = config.name if several else ""
        loaded = beginning.result().functions if beginning else ()
        found.tried[name] = LoadedFiles(encoder=encoder, task=task, planned_teachers=planned, rewards=loaded)


async def _sets(found: Rehearsal, config: RunConfig, inputs: PythonInputs, *, needs_reward: bool) -> None:
    """Reads the further evaluation sets, and tries what each has of its own, and the reward, on its first prompt."""
    name = config.name if found.config.adapters else ""
    if not config.eval.sets or not (files := found.tried.get(name)):
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
        if needs_reward and (run.reward.given or inputs.rewards) and not unknown:
            rewards = () if one.config.reward else inputs.rewards
            with found.steps.doing(f"trying the reward on {named}"):
                tried, _ = await _reward(run, rewards, one.prompts[0], encoder, episode=episode, begun=None)
            lines += tried
    found.sections[", ".join(["Evaluation sets", *filter(None, [name])])] = lines


async def _encoder(found: Rehearsal, config: RunConfig, model_dir: Path) -> ChatEncoder:
    check_model_dir(model_dir, need_chat_template=config.task.chat)
    with found.steps.doing("reading the tokenizer"):
        encoder = await asyncio.to_thread(ChatEncoder, model_dir)
    if (constraint := config.rollout.constraint.constraint) and not config.engine.is_server:
        await asyncio.to_thread(encoder.try_constraint, constraint)
    return encoder.with_special_tokens(config.reward.special_tokens)


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


async def _given_answers(found: Rehearsal, config: RunConfig, encoder: ChatEncoder, prompts: Sequence[Prompt]) -> None:
    """Reads the given answers: those beside the steps, and those of the warm start, which a run that is resumed has behind it."""
    if course := await asyncio.to_thread(build_course, config, encoder):
        found.sections["Demonstrations"] = course_lines(config, course, encoder)
        found.notes += unanswered(course, prompts) if config.algo.given_answers == "compared" else ()
    if not config.warm_start.path or found.resumes:
        return
    own, task, room = config.warm_start, config.task, config.engine.context_length
    with found.part(), found.steps.doing("reading the rows of the warm start"):
        found.demonstrations = await asyncio.to_thread(
            read_demonstrations, own, task, encoder, seed=config.seed, context=room
        )
        found.sections["Warm start"] = described(config, found.demonstrations, encoder)


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


# --- the machine and its memory ----------------------------------------------------------------------------------------


def _choose(found: Rehearsal, machine: Machine, model_dir: Path, measurer: Measurer) -> None:
    """Chooses the settings that are left open, and puts them into the config."""
    shape = read_shape(model_dir)
    settled = settle(found.config, model_dir, machine, shape.parameters, measurer)
    beside = _others(found, machine, model_dir, shape)
    config = settle_sizes(settled, shape, machine, found.prompt_tokens, _on_gpu(beside))
    settled = replace(settled, config=config)
    found.config, found.unmeasured = settled.config, settled.figures.problem
    if not found.config.train.minutes:
        return
    size = checkpoint_bytes(shape, memory_plan(found.config, machine))
    fitted = fit_minutes(settled, measure_share(machine.cores), size, found.prompt_tokens)
    found.config = fitted.config
    found.notes += fitted.notes
    found.keys |= dict.fromkeys(fitted.notes, SHORT)


def _machine_and_memory(found: Rehearsal, machine: Machine, model_dir: Path) -> None:
    config, shape = found.config, read_shape(model_dir)
    plan = memory_plan(config, machine)
    resolved = replace(
        config,
        engine=replace(config.engine, device=plan.engine_device),
        train=replace(config.train, device=plan.train_device, dtype=plan.train_dtype)  # type: ignore[arg-type]
        if plan.trains
        else config.train,
    )
    why = {**({"not measured": found.unmeasured} if found.unmeasured else {}), **config.chosen.why}
    found.sections["Where"] = [
        *placement(resolved, found.served or "path chosen when the model is read").items(),
        *why.items(),
    ]
    wanted = [*needs(shape, plan), *_others(found, machine, model_dir, shape)]
    size = checkpoint_bytes(shape, plan)
    found.sections["Memory"] = [
        *memory_lines(wanted, machine),
        *warm_lines(shape, plan),
        ("on disk", f"{gib(size)} a checkpoint, at most {config.checkpoint.keep + 1} at a time"),
    ]
    problems = list(refusals(wanted, shape, plan, machine))
    if plan.published == "cuda" and "cpu" in (plan.engine_device, plan.train_device):
        problems.append(NO_GPU)
    if not config.orchestration.elsewhere:  # else each has a machine of its own
        problems += share_problems(config.engine, plan.engine_device)
    problems += nothing_to_lend(config, plan.engine_device, plan.train_device)
    problems += _step_problems(config, shape)
    for problem in problems:
        found.doubt(problem, certain=True)
    form, dtype = config.weight_sync.form, config.engine.serving_dtype
    found.notes += poor_settings(form, dtype, adapted=bool(config.lora.rank))
    found.notes += untried(config)
    if not problems:
        found.notes += notes(wanted, machine, plan.shared or plan.lent)
        found.notes += gpu_notes(wanted, machine, config)
    if config.engine.starts_server:
        server = require(config.engine.kind, config.engine.python, not config.way.transport.writes_files)
        kind, opening = server_kind(config.engine.kind), plan.published == "cuda"
        if problem := kind.cannot_serve(server, shape.experts, sleeping=plan.shared, opening=opening):
            found.doubt(problem, certain=True)
        line = ("server", f"{server.python}, {config.engine.kind} {server.version}".rstrip())
        found.sections["Where"] = [*found.sections["Where"], line]


def _step_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Yields what cannot be sent to the trainer once a step has been sampled."""
    routed = shape.layers * shape.chosen * (1 if shape.experts <= 256 else 2) if config.rollout.keep_routing else 0
    longest = min(config.longest_rollout, config.engine.context_length or config.longest_rollout)
    if (size := longest * (TOKEN_BYTES + routed)) > LONGEST:
        experts = ", or set rollout.keep_routing = false" if routed else ""
        yield (
            f"a rollout of {longest} tokens can become a row of {size / 1e9:.1f} GB, and a message to the trainer has at most {LONGEST / 1e9:.1f} GB; "
            f"lower rollout.max_tokens or engine.context_length{experts}"
        )
    rollouts = config.staleness.groups_per_step * config.rollout.group_size
    if rollouts >= MOST_TRAJECTORIES:
        yield (
            f"a step of {rollouts} rollouts has more than the {MOST_TRAJECTORIES - 1} that ranks can tell apart; lower "
            "staleness.groups_per_step or rollout.group_size"
        )


def _others(found: Rehearsal, machine: Machine, model_dir: Path, shape: ModelShape) -> Iterator[MemoryNeed]:
    """The memory of the engines of teachers and reference."""
    for planned in found.planned_teachers:
        device = machine.device(f"the teacher {planned.config.name}: engine.device", planned.engine.device)
        yield from engine_needs(f"teacher {planned.config.name}", read_shape(planned.model_dir), planned.engine, device)
    if found.config.algo.reference_in_reward and not found.config.lora.served_name:
        engine = found.config.engine_beside.for_worker
        yield from engine_needs("reference", shape, engine, machine.device("engine.device", engine.device))


def _on_gpu(others: Iterator[MemoryNeed]) -> tuple[float, ...]:
    """The bytes on the GPU of each process that has some there."""
    held: dict[str, float] = {}
    for need in others:
        if need.where == "cuda":
            held[need.who] = held.get(need.who, 0.0) + need.bytes
    return tuple(held.values())
