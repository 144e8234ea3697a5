"""Turns a config into parts, and the parts into a pipeline. Only this file names the controller's concrete classes.

It imports no torch. The concrete classes of the workers are named in `workers/build.py`, which runs in their processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headrace.algo.advantage.groups import algorithm_of
from headrace.algo.noise import NoiseWatch, inside_rounding
from headrace.core.errors import ConfigError
from headrace.core.playing import EnvironmentKind
from headrace.core.protocols import Observer, Scorer, Task
from headrace.core.types import Prompt
from headrace.durable.journal import JournalStep
from headrace.episodes.branching import fork_problem
from headrace.episodes.environments.gateway.opened_with import OpenedWith
from headrace.episodes.environments.kinds import environment_kind, named
from headrace.episodes.scoring.job import LoadedReward
from headrace.episodes.scoring.overlong import punished
from headrace.episodes.scoring.parts.score_log import ScoreLog
from headrace.episodes.scoring.parts.segmenting import Decode
from headrace.episodes.scoring.python_rewards import RewardFunction
from headrace.episodes.scoring.workers.processes import WorkerProcess
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.prompts import RemarkedTask, open_task
from headrace.episodes.tasks.read import Row
from headrace.facts.facts import Books, RunStarted
from headrace.facts.machine_mark import machine_mark
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.assembly import RestoredState, assemble, go_live, restore_state
from headrace.loop.identity import PROBE, ROUNDING, TEXT, IdentityProbe, pieces_of
from headrace.loop.minutes import Minutes
from headrace.loop.parts import Parts, earlier_metrics
from headrace.loop.pipeline import Pipeline
from headrace.loop.snapshots import Snapshots
from headrace.loop.utilisation import Utilisation
from headrace.models.chat import ChatEncoder, open_model
from headrace.processes.asked_process import HERE, Sites
from headrace.run.choosing import allowance_of
from headrace.run.clients.bus_engine import BusEngine
from headrace.run.config import RunConfig
from headrace.run.planned_loops import plan_of
from headrace.run.pools import Pools, open_pools
from headrace.run.python_inputs import PythonInputs
from headrace.run.rehearsal.reward import try_in_loop
from headrace.run.storage import Storage
from headrace.run.teaching import PlannedTeacher, Student, open_teaching, plan_teachers, reward_weights
from headrace.run.user_sites import ONLY_HERE, UserSites, user_sites
from headrace.run.wording import headline, placement, weight_way
from headrace.settings.extras import EXTRAS, install, is_installed
from headrace.weight_sync.delta.watch import DeltaWatch


def open_telemetry(config: RunConfig, observer: Observer, clock: Callable[[], float]) -> Telemetry:
    waits = Waits(observer.record, clock, config.watch.warn_after, config.watch.stop_after)
    return Telemetry(observer.record, clock, waits)


@dataclass(kw_only=True)
class BuiltRun:
    """A run whose processes are up and whose pipeline is assembled."""

    pools: Pools
    parts: Parts
    pipeline: Pipeline
    redo: Sequence[JournalStep]
    """The steps after the checkpoint, which the trainer must repeat before anything else."""
    outdated: Mapping[int, Sequence[str]]
    """See `SavedRun.outdated`."""
    utilisation: Utilisation
    config: RunConfig
    adapter: str
    """The adapter that is trained; empty if the engine serves full weights."""

    def started(self, step: int) -> RunStarted:
        """`step`: number of optimizer steps done."""
        config, buffer = self.config, self.parts.buffer
        books = Books(buffer.accounting(), tuple(buffer.in_flight), buffer.ready)
        return RunStarted(
            t=self.parts.telemetry.clock(),
            name=config.name,
            headline=headline(config),
            seed=config.seed,
            steps=config.train.steps,
            groups_per_step=config.staleness.groups_per_step,
            group_size=config.rollout.group_size,
            slots=config.staleness.generating,
            window=config.staleness.window,
            max_lag=config.staleness.lag_bound,
            where=placement(config, self.pools.engine.capabilities.path),
            resumed_at=step,
            books=books,
            machine=machine_mark(config.train.cores, config.train.threads),
            max_tokens=config.rollout.max_tokens,
            chosen=config.chosen.why,
            prices=config.observe.prices,
            weights=weight_way(config),
        )

    async def go_live(self) -> None:
        """Publishes the trainer's weights, loads them into the engine, and proves that they are the same (C3)."""
        telemetry = self.parts.telemetry
        serve_base = partial(self.pools.serve_base, telemetry) if self.adapter else None
        rounding = await go_live(self.parts, self.adapter, serve_base)
        for sentence in inside_rounding(self.config.algo, rounding, self.config.rollout.max_tokens):
            telemetry.warn(sentence)
        if self.config.orchestration.placement != "shared" and not self.config.orchestration.lend:  # there it may sleep
            self.pools.reserve()

    async def close(self) -> None:
        await self.parts.environment.close()
        await self.parts.scorer.close()
        await self.pools.close()


@dataclass(frozen=True, kw_only=True)
class TriedParts:
    """Parts that a rehearsal has loaded and tried, and that the run goes on with."""

    encoder: ChatEncoder
    task: RemarkedTask
    """The task as it was before the rehearsal drew from it."""
    planned_teachers: Sequence[PlannedTeacher]
    loaded: Sequence[LoadedReward] = ()
    """The reward functions of files, if there are any."""


@dataclass(kw_only=True)
class PreparedRun:
    """The parts of a run that need no worker process."""

    model_dir: Path
    encoder: ChatEncoder
    task: Task
    scorer: Scorer
    scores: ScoreLog
    """The scores that an earlier process of this run was given."""
    prompts: Sequence[Prompt]
    planned_teachers: Sequence[PlannedTeacher]
    environment: EnvironmentKind


async def prepare(
    config: RunConfig,
    model_dir: Path,
    encoder: ChatEncoder,
    *,
    inputs: PythonInputs,
    logs: Path,
    telemetry: Telemetry,
    sites: UserSites = ONLY_HERE,
    tried: TriedParts | None = None,
) -> PreparedRun:
    """Loads and checks the user's input, but for what `tried` has. It runs before the processes are started, because starting takes seconds."""
    encoder = tried.encoder if tried else encoder.with_special_tokens(config.reward.special_tokens)
    if config.orchestration.bus and inputs.rewards:
        raise ConfigError(
            "a function that was passed from Python cannot be called by rollout hosts (orchestration.bus); put it into a file, and name it there and "
            'here: reward.function = "my_rewards.py:exact"'
        )
    task = tried.task if tried else await asyncio.to_thread(build_task, config.task, encoder, config.seed, inputs.rows)
    scores = ScoreLog({one.name: one.mark for one in config.reward.endpoints})
    loaded = tried.loaded if tried else ()
    make = partial(build_scorer, config, inputs.rewards, logs / "scorer.log", sites=sites.scorers, loaded=loaded)
    scorer = await asyncio.to_thread(make, decode=encoder.decode, telemetry=telemetry, scores=scores)
    answer, size = config.task.answer, config.rollout.group_size
    await try_in_loop(
        inputs.rewards, scorer, task=task, answer=answer, group_size=size, encode=encoder.encode_completion
    )
    planned_teachers = tried.planned_teachers if tried else await plan_teachers(config, model_dir, encoder, inputs.rows)
    prompts = await asyncio.to_thread(task.held_out, config.eval.prompts)
    own, log = sites.environments, logs / "environment.log"
    return PreparedRun(
        model_dir=model_dir,
        encoder=encoder,
        task=task,
        scorer=scorer,
        scores=scores,
        prompts=prompts,
        planned_teachers=planned_teachers,
        environment=await asyncio.to_thread(build_environment, config, encoder, log, own),
    )


async def build(
    config: RunConfig,
    logs: Path,
    storage: Storage,
    inputs: PythonInputs,
    telemetry: Telemetry,
    *,
    tried: TriedParts | None = None,
) -> BuiltRun:
    """`tried`: what a rehearsal has loaded; the rest is loaded here."""
    # Endless: a model or a data set may have to be downloaded.
    async with telemetry.waits.named("start", "the files of models, task and reward", endless=True):
        model_dir, encoder = (tried.encoder.directory, tried.encoder) if tried else await open_model(config.model.path)
        sites = user_sites(config, telemetry)
        more = {"sites": sites, "tried": tried}
        prepared = await prepare(config, model_dir, encoder, inputs=inputs, logs=logs, telemetry=telemetry, **more)  # type: ignore[arg-type]
    async with AsyncExitStack() as undo:
        undo.push_async_callback(prepared.scorer.close)
        undo.push_async_callback(prepared.environment.close)
        adapter = config.lora.served_name
        restore = {adapter: storage.checkpoint} if storage.checkpoint else {}
        pools = await open_pools(config, prepared.model_dir, logs, telemetry, restore, sites=sites)
        undo.push_async_callback(pools.close)
        begin = await join(config, prepared, pools=pools, adapter=adapter, storage=storage, telemetry=telemetry)
        built = begin()
        undo.pop_all()
    return built


async def join(
    config: RunConfig, prepared: PreparedRun, *, pools: Pools, adapter: str, storage: Storage, telemetry: Telemetry
) -> Callable[[], BuiltRun]:
    """Joins a pipeline to pools that are up. `adapter`: the one that it trains; empty if the engine serves full weights.

    Everything that can refuse the run happens here. The function that is returned begins the run, and only that changes its directory."""
    student = Student(
        model_dir=prepared.model_dir,
        trainer=pools.trainer,
        engine=pools.engine,
        serves_base=bool(adapter),
        shadow=pools.shadow,
        launcher=pools.launcher,
        has_ended=prepared.encoder.has_ended,
    )
    pools.teaching = await open_teaching(config, prepared.planned_teachers, student, telemetry)
    restored = restore_state(
        plan=plan_of(config, adapter),
        task=prepared.task,
        engine=pools.engine,
        partial=config.partial,
        telemetry=telemetry,
        saved=storage.saved,
    )

    def begin() -> BuiltRun:
        storage.begin(restored.outlived)
        prepared.scores.open(storage.run_dir, telemetry.warn)
        pools.engine.listen(storage.passes.write)
        restored.notebook.listen(storage.passes.note)
        return _built(
            config,
            prepared,
            pools=pools,
            adapter=adapter,
            storage=storage,
            restored=restored,
            telemetry=telemetry,
        )

    return begin


def _built(
    config: RunConfig,
    prepared: PreparedRun,
    *,
    pools: Pools,
    adapter: str,
    storage: Storage,
    restored: RestoredState,
    telemetry: Telemetry,
) -> BuiltRun:
    encoder, plan, saved = prepared.encoder, plan_of(config, adapter), storage.saved
    assert pools.teaching is not None
    rewarding = pools.teaching.rewarding(prepared.scorer)
    parts = assemble(
        plan=plan,
        restored=restored,
        telemetry=telemetry,
        engine=pools.engine,
        trainer=pools.teaching.publishing(pools.trainer),
        environment=prepared.environment,
        scorer=pools.teaching.tracing(
            punished(config.reward.soft_overlong_punishment, config.rollout.max_tokens, rewarding)
        ),
        evaluated_by=rewarding,
        held_out=prepared.prompts,
        evaluation=config.eval,
        journal=storage.journal,
        algorithm=algorithm_of(config.algo, config.longest_rollout, reward_weights(config)),
        decode=encoder.decode,
        snapshots=Snapshots(
            checkpoints=storage.checkpoints,
            passes=storage.passes,
            telemetry=telemetry,
            adapter=adapter,
            saved_step=storage.saved_step,
            made_by=storage.made_by,
            digest=storage.recorder.digest,
        ),
        probe=_probe(config, encoder, pools, telemetry, adapter),
        turns=pools.turns,
        noise=NoiseWatch(config.algo),
        deltas=DeltaWatch(config.weight_sync.form, config.engine.serving_dtype),
        minutes=Minutes(allowance_of(config), storage.keep_steps, telemetry.record, telemetry.clock),
        sentinels=(pools.teaching.watch,),
        elsewhere=pools.engine.groups(restored.buffer.in_flight) if isinstance(pools.engine, BusEngine) else None,
    )
    pipeline = Pipeline(parts, plan, restored.step, earlier_metrics(storage.recorder.state))
    return BuiltRun(
        pools=pools,
        parts=parts,
        pipeline=pipeline,
        redo=restored.redo,
        outdated=saved.outdated if saved else {},
        utilisation=Utilisation(pools.engine, pools.turns, telemetry),
        config=config,
        adapter=adapter,
    )


def _probe(config: RunConfig, encoder: ChatEncoder, pools: Pools, telemetry: Telemetry, adapter: str) -> IdentityProbe:
    room = pools.engine.capabilities.context_length
    dtype = max(config.engine.serving_dtype, pools.trainer_dtype, key=ROUNDING.__getitem__)
    return IdentityProbe(
        encoder.encode_text(PROBE)[:room],
        config.watch.identity_every,
        dtype,
        telemetry,
        adapter=adapter,
        # Rollout hosts come and go: those that come later would not have been tried.
        trial=pieces_of(encoder.encode_text(TEXT), room) if config.watch.trial and not config.orchestration.bus else (),
        served=config.engine.is_server,
        exact=pools.same_arithmetic,
    )


def build_environment(
    config: RunConfig, encoder: ChatEncoder, log: Path | None = None, sites: Sites = HERE
) -> EnvironmentKind:
    """`encoder`: of the model. `log` receives what the code of the environment prints; `sites`: the machines on which functions and libraries run. Raises ConfigError if it cannot be loaded."""
    environment, system = config.environment, config.task.system
    encoder = encoder.using(config.task.rendering)
    if not environment.in_processes:
        return environment_kind(environment.kind)
    alone, rollout = not config.reward.given and not config.teachers, config.rollout
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


def build_task(config: TaskConfig, encoder: ChatEncoder, seed: int, rows: Sequence[Row] | None = None) -> RemarkedTask:
    """`rows`: the rows that were passed from Python, if any."""
    return open_task(config, seed, encoder.using(config.rendering), rows)


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
    if config.teachers and not given:
        if config.eval.prompts and all(one.mode == "tokens" for one in config.teachers):
            raise ConfigError(
                f"eval.prompts = {config.eval.prompts} measures a reward, and nothing gives one; set reward.function (the "
                f"algorithm {config.algo.name} does not learn from it), or eval.prompts = 0"
            )
        return NoReward()
    others: dict[str, Any] = {"decode": decode, "telemetry": telemetry, "scores": scores, "sites": sites}
    known: dict[str, Any] = {"begun": begun, "loaded": loaded}
    return RewardScorer(config.reward, rewards, log=log, sandbox=config.sandbox.settings, **others, **known)
