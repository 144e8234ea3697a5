"""Turns settings into the parts that play and score rollouts. Only this file names the controller's concrete classes.

It imports no torch. The concrete classes of the workers are named in `worker/build.py`, which runs in their processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headrace.algo.config import AlgoConfig
from headrace.core.errors import ConfigError
from headrace.core.protocols import EnvironmentKind, Observer, Scorer
from headrace.episodes.environments.gateway.turn_request import OpenedWith
from headrace.episodes.environments.kinds import environment_kind, named
from headrace.episodes.rollout import fork_problem
from headrace.episodes.scoring.extract import Decode
from headrace.episodes.scoring.functions import RewardFunction
from headrace.episodes.scoring.job import LoadedReward
from headrace.episodes.scoring.parts import ScoreLog
from headrace.episodes.scoring.teacher.stage import vocabulary_problem
from headrace.episodes.scoring.workers.processes import WorkerProcess
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.demonstrations import AnswerCourse, read_course
from headrace.episodes.tasks.prompts import RemarkedTask, open_task
from headrace.episodes.tasks.read import Row
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.loop_plan import LoopPlan
from headrace.models.chat import ChatEncoder
from headrace.models.resolve import resolve_model
from headrace.processes.asked_process import HERE, Sites
from headrace.run.config import RunConfig
from headrace.run.rehearsal.memory_needs import read_shape
from headrace.run.seats import ONLY_HERE, UserSites
from headrace.run.seeing import model_of
from headrace.run.teaching import PlannedTeacher, plan_teachers
from headrace.settings.extras import EXTRAS, install, is_installed
from headrace.settings.process_config import WatchConfig


def open_telemetry(watch: WatchConfig, observer: Observer, clock: Callable[[], float]) -> Telemetry:
    waits = Waits(observer.record, clock, watch.warn_after, watch.stop_after)
    return Telemetry(observer.record, clock, waits)


def plan_of(config: RunConfig, adapter: str) -> LoopPlan:
    """The plan of a run's loops. `adapter`: the one that they train; empty if they train all weights."""
    return LoopPlan(
        steps=config.train.steps,
        staleness=config.staleness,
        rollout=config.rollout,
        seed=config.seed,
        max_skipped_steps=config.train.max_skipped_steps,
        checkpoint_every=config.checkpoint.every,
        evaluate_every=config.eval.every,
        adapter=adapter,
        curriculum=config.curriculum,
        watch=config.watch,
        save_patience=config.checkpoint.patience,
        kv_gib=config.engine.sizes.kv_gib,
        remembers=config.algo.remembers,
        experience=config.algo.recipe.experience,
    )


def loaded_model(config: RunConfig, rows: Sequence[Row] | None = None, *, for_weights: bool = False) -> Path:
    """Returns the directory that the run's engine and trainer load. `rows`: those that were passed from Python; `for_weights`: of the weights alone,
    whose images are not needed. Raises ConfigError."""
    adapted = bool(config.lora.rank or config.adapters)
    return model_of(config.model.path, config.task, rows, adapted=adapted, for_weights=for_weights)


@dataclass(frozen=True, kw_only=True)
class LoadedFiles:
    """The files of a run, loaded: by a rehearsal that has tried them, or by `load_files`. No process is up for them."""

    encoder: ChatEncoder
    """The model's, as the reward wants its texts."""
    task: RemarkedTask
    """No prompt has been drawn of it."""
    planned_teachers: Sequence[PlannedTeacher]
    rewards: Sequence[LoadedReward] = ()
    """The reward functions of files, if they are known already."""


async def load_files(config: RunConfig, encoder: ChatEncoder, rows: Sequence[Row] | None = None) -> LoadedFiles:
    """`encoder`: of the model. `rows`: those that were passed from Python. Raises ConfigError for what cannot be used."""
    encoder = encoder.with_special_tokens(config.reward.special_tokens)
    task = await asyncio.to_thread(build_task, config.task, encoder, config.seed, rows)
    await asyncio.to_thread(check_models_beside, config.algo, encoder, config.engine.context_length)
    return LoadedFiles(encoder=encoder, task=task, planned_teachers=await plan_teachers(config, encoder, rows))


def check_models_beside(algo: AlgoConfig, encoder: ChatEncoder, context: int) -> None:
    """Raises ConfigError for a critic's own model, or a teacher of the trainer's, that does not read the policy's tokens, or not as many. `encoder`: the
    policy's; `context`: of the engine."""
    _check_reader("algo.critic.model", algo.recipe.critic.model if algo.has_critic else "", encoder, context)
    other = '. For a teacher with another tokenizer make [[teachers]] with mode = "text"'
    _check_reader("algo.distill.model", algo.recipe.distill.model, encoder, context, other)


def _check_reader(setting: str, path: str, encoder: ChatEncoder, context: int, other: str = "") -> None:
    if not path:
        return
    directory, given = resolve_model(path, setting=setting), f"{setting} = {path}"
    if problem := vocabulary_problem(encoder.vocabulary(), ChatEncoder(directory).vocabulary(), "other model"):
        raise ConfigError(
            f"{given} has another vocabulary than the policy, whose tokens it reads: {problem}. Use a model with the policy's tokenizer, or remove it{other}"
        )
    own, context = read_shape(directory), min(context, read_shape(encoder.directory).positions or context)
    if own.positions and own.positions < context:
        raise ConfigError(
            f"{given} was made for {own.positions} tokens, and rollouts may have {context}; lower engine.context_length, or use another model"
        )


def build_course(config: RunConfig, encoder: ChatEncoder) -> AnswerCourse | None:
    """Reads the demonstrations beside the steps of a run, if it has any. Raises ConfigError for a row that cannot be trained."""
    own, room = config.demonstrations, config.engine.context_length
    if not own.path:
        return None
    return read_course(own, config.task, encoder.using(config.task.rendering), seed=config.seed, context=room)


@dataclass(frozen=True, kw_only=True)
class Players:
    """The parts that play and score rollouts: the user's code, and what stands for it."""

    environment: EnvironmentKind
    scorer: Scorer


@asynccontextmanager
async def open_players(
    config: RunConfig,
    encoder: ChatEncoder,
    telemetry: Telemetry,
    *,
    rewards: Sequence[RewardFunction] = (),
    loaded: Sequence[LoadedReward] = (),
    logs: Path | None = None,
    sites: UserSites = ONLY_HERE,
    scores: ScoreLog | None = None,
) -> AsyncIterator[Players]:
    """`rewards`: functions that were passed from Python; `loaded`: those of files, if a rehearsal has loaded them. `logs`: the directory for
    what they print. `scores`: see `RewardScorer`."""
    async with AsyncExitStack() as undo:
        log = logs and logs / "scorer.log"
        make = partial(build_scorer, config, rewards, log, sites=sites.scorers, loaded=loaded)
        scorer = await asyncio.to_thread(make, decode=encoder.decode, telemetry=telemetry, scores=scores)
        undo.push_async_callback(scorer.close)
        log = logs and logs / "environment.log"
        environment = await asyncio.to_thread(build_environment, config, encoder, log, sites.environments)
        undo.push_async_callback(environment.close)
        yield Players(environment=environment, scorer=scorer)


def build_environment(
    config: RunConfig, encoder: ChatEncoder, log: Path | None = None, sites: Sites = HERE
) -> EnvironmentKind:
    """`encoder`: of the model. `log` receives what the code of the environment prints; `sites`: the machines on which functions and libraries run. Raises ConfigError if it cannot be loaded."""
    environment, system = config.environment, config.task.system
    encoder = encoder.using(config.task.rendering)
    if not environment.in_processes:
        return environment_kind(environment.kind)
    alone, rollout = not config.reward.given and not config.taught, config.rollout
    if not (asks := environment.gateway_kind):
        from headrace.episodes.environments.function import open_function

        settings: dict[str, Any] = {
            "system": system,
            "alone": alone,
            "sandbox": config.sandbox.settings,
            "sites": sites,
        }
        kind = open_function(environment, encoder, log=log, **settings)
        if problem := fork_problem(rollout.forks, kind, environment.setting, environment.export_remedy):
            raise ConfigError(problem)
        return kind
    if not is_installed(EXTRAS["serve"].module):
        raise ConfigError(f"{environment.setting} needs a server for its turns: {install('serve')}")
    if log is None and asks.is_handed_out:
        raise ConfigError(
            f"{environment.setting} hands out the rollouts of a run, and this is none; the run measures held-out prompts by itself (eval.every)"
        )
    opened = OpenedWith(
        config=environment,
        encoder=encoder,
        system=system,
        sampling={name: getattr(rollout, name) for name in ("temperature", "top_p", "top_k", "min_p")},
        stop=rollout.stop,
        alone=alone,
        log=log,
        seeds=config.task.facts.draws_seeds,
        held_out=config.task.held_out,
        name=config.name,
        steps=config.train.steps,
        group_size=rollout.group_size,
        groups_per_step=config.staleness.groups_per_step,
        longest=environment.max_tokens or config.engine.context_length,
    )
    made: EnvironmentKind = named(asks.opens)(opened)
    return made


def build_task(
    config: TaskConfig,
    encoder: ChatEncoder,
    seed: int,
    rows: Sequence[Row] | None = None,
    *,
    measured: bool = False,
) -> RemarkedTask:
    """`rows`: the rows that were passed from Python, if any. `measured`: whether all rows of its file are held out."""
    return open_task(config, seed, encoder.using(config.rendering), rows, measured=measured)


def build_scorer(
    config: RunConfig,
    rewards: Sequence[RewardFunction] = (),
    log: Path | None = None,
    *,
    decode: Decode | None = None,
    telemetry: Telemetry | None = None,
    scores: ScoreLog | None = None,
    sites: Sites = HERE,
    begun: WorkerProcess | None = None,
    loaded: Sequence[LoadedReward] = (),
) -> Scorer:
    """A scorer of the config's functions (or of `rewards`, which were passed from Python), services and judges. A run whose environment
    gives the reward, or that only learns from teachers, has none; its scorer gives no reward. `decode` and all that follow: see
    `RewardScorer`."""
    from headrace.episodes.scoring.reward_scorer import RewardScorer
    from headrace.episodes.scoring.teacher.stage import NoReward

    given = config.reward.given or rewards
    if config.environment.rewards and not given:
        return NoReward()
    if config.taught and not given:
        if asking := [teacher.name for teacher in config.teachers if teacher.reads_sibling]:
            raise ConfigError(
                f"the prompt of the teacher {asking[0]} shows another completion that was right, and nothing gives a reward; set reward.function, or show "
                "it a column of the row"
            )
        if config.eval.prompts and all(teacher.mode == "tokens" for teacher in config.teachers):
            raise ConfigError(
                f"eval.prompts = {config.eval.prompts} measures a reward, and nothing gives one; set reward.function (the "
                f"algorithm {config.algo.name} does not learn from it), or eval.prompts = 0"
            )
        return NoReward()
    others: dict[str, Any] = {"decode": decode, "telemetry": telemetry, "scores": scores, "sites": sites}
    known: dict[str, Any] = {"begun": begun, "loaded": loaded}
    return RewardScorer(config.reward, rewards, log=log, sandbox=config.sandbox.settings, **others, **known)
