"""Opens all parts of a run, and joins them to a pipeline for each of its lanes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.algo.noise import NoiseWatch
from headrace.algo.training_rows import algorithm_of
from headrace.core.errors import ConfigError
from headrace.core.types import Prompt
from headrace.episodes.scoring.parts import ScoreLog
from headrace.episodes.scoring.reward_scorer import punished
from headrace.episodes.tasks.demonstrations import AnswerCourse
from headrace.facts.telemetry import Telemetry
from headrace.loop.assembly import MeasuredSet, RestoredState, assemble, restore_state
from headrace.loop.checkpoints import Snapshots
from headrace.loop.evaluation import PROBE, ROUNDING, TEXT, IdentityProbe, Quantised, pieces_of
from headrace.loop.loop_plan import LoopPlan
from headrace.loop.pipeline import Parts, Pipeline, earlier_metrics
from headrace.loop.run_limits import Minutes
from headrace.loop.turns import Utilisation
from headrace.models.chat import ChatEncoder
from headrace.processes.health.usage import watch_use
from headrace.run.build import LoadedFiles, Players, build_course, load_files, loaded_model, open_players, plan_of
from headrace.run.choosing import allowance_of
from headrace.run.clients.bus_engine import BusEngine
from headrace.run.config import RunConfig
from headrace.run.evaluation_sets import open_sets, read_sets
from headrace.run.lane import Lane
from headrace.run.pools import Pools, open_pools
from headrace.run.python_inputs import NO_INPUTS, PythonInputs
from headrace.run.rehearsal.first_rows import try_in_loop
from headrace.run.run_directory import Storage
from headrace.run.seats import UserSites, user_sites
from headrace.run.session import BuiltRun
from headrace.run.teaching import Teaching, open_teaching
from headrace.weight_sync.delta.efficiency import DeltaWatch

NO_FILES: Mapping[str, LoadedFiles] = {}


@asynccontextmanager
async def open_parts(
    config: RunConfig,
    lanes: Mapping[str, Lane],
    telemetry: Mapping[str, Telemetry],
    *,
    logs: Path,
    inputs: PythonInputs = NO_INPUTS,
    tried: Mapping[str, LoadedFiles] = NO_FILES,
) -> AsyncIterator[Mapping[str, Callable[[], BuiltRun]]]:
    """Trainer, engine, and on them a pipeline for each lane. All that can refuse the run happens before it yields. It yields a function
    for each lane which begins it, and only that changes the lane's directory.

    `telemetry`: of each lane; the empty name has that of the processes, which lanes share. `logs`: the directory for what these print. `tried`: what
    a rehearsal has loaded for each lane; without it all is loaded here."""
    shared, waits = telemetry[""], telemetry[""].waits
    async with AsyncExitStack() as undo:
        sites = user_sites(config.orchestration, shared, config.code_files)
        loaded: dict[str, _LoadedLane] = {}
        # Endless: a model or a data set may have to be downloaded.
        async with (
            waits.named("start", "the files of models, task and reward", endless=True)
            if "" in lanes
            else waits.named("start", "the files of models, tasks and rewards", endless=True)
        ):
            encoder = None if tried else await asyncio.to_thread(lambda: ChatEncoder(loaded_model(config, inputs.rows)))
            for name, lane in lanes.items():
                files = await load_files(lane.config, encoder, inputs.rows) if encoder else tried[name]
                loaded[name] = await _load(lane, name, files, inputs, sites=sites, telemetry=telemetry[name])
                undo.push_async_callback(loaded[name].ending.aclose)
        restore = {lane.adapter: at for lane in loaded.values() if (at := lane.storage.checkpoint)}
        model_dir = files.encoder.directory
        pools = await undo.enter_async_context(open_pools(config, model_dir, logs, shared, restore, sites=sites))
        if "" not in lanes:
            first = next(iter(loaded.values())).telemetry  # one record of the base weights is enough
            await _serve_base(pools, dataclasses.replace(shared, record=first.record))
        joined = {name: await lane.join(pools) for name, lane in loaded.items()}
        yield {name: lane.begin for name, lane in joined.items()}


async def _serve_base(pools: Pools, telemetry: Telemetry) -> None:
    async with telemetry.waits.named("start", "the base weights to be live"):
        await pools.serve_base(telemetry)


@dataclass(frozen=True, kw_only=True)
class _LoadedLane:
    """The parts that the user gives to a lane. No worker process is up for it yet."""

    config: RunConfig
    storage: Storage
    adapter: str
    """The one that the lane trains; empty if the engine serves full weights."""
    files: LoadedFiles
    course: AnswerCourse | None
    """The demonstrations beside the steps, if there are any."""
    players: Players
    scores: ScoreLog
    """The scores that an earlier process of this run was given."""
    prompts: Sequence[Prompt]
    """The held-out ones."""
    sets: Sequence[MeasuredSet]
    """The further evaluation sets."""
    telemetry: Telemetry
    ending: AsyncExitStack
    """Closes what is the lane's own."""

    async def join(self, pools: Pools) -> _JoinedLane:
        """Starts the teachers, and restores the state in which an earlier process left the lane. Raises ConfigError if either cannot be."""
        config, files, plan = self.config, self.files, plan_of(self.config, self.adapter)
        if self.course and config.algo.given_answers != "compared":
            plan = dataclasses.replace(plan, demonstrations=self.course.of_step)
        teaching = await open_teaching(
            config, files.planned_teachers, pools, files.encoder, self.telemetry, adapted=bool(self.adapter)
        )
        self.ending.push_async_callback(teaching.close)
        restored = restore_state(
            plan=plan,
            task=files.task,
            engine=pools.engine,
            partial=config.partial,
            telemetry=self.telemetry,
            saved=self.storage.saved,
        )
        return _JoinedLane(loaded=self, pools=pools, teaching=teaching, plan=plan, restored=restored)


async def _load(
    lane: Lane, name: str, files: LoadedFiles, inputs: PythonInputs, *, sites: UserSites, telemetry: Telemetry
) -> _LoadedLane:
    """Raises ConfigError for input of the user that cannot be used. Called before the workers are started, because starting takes seconds."""
    config = lane.config
    if config.orchestration.bus and inputs.rewards:
        raise ConfigError(
            "a function that was passed from Python cannot be called by rollout hosts (orchestration.bus); put it into a file, and name it there and "
            'here: reward.function = "my_rewards.py:exact"'
        )
    scores = ScoreLog({endpoint.name: endpoint.mark for endpoint in config.reward.endpoints})
    async with AsyncExitStack() as ending:
        opening = open_players(
            config,
            files.encoder,
            telemetry,
            rewards=inputs.rewards,
            loaded=files.rewards,
            logs=lane.directory.logs,
            sites=sites,
            scores=scores,
        )
        players = await ending.enter_async_context(opening)
        await try_in_loop(
            inputs.rewards,
            players.scorer,
            files.task,
            answer=config.task.answer,
            group_size=config.rollout.group_size,
            encode=files.encoder.encode_completion,
        )
        read = await asyncio.to_thread(read_sets, config, files.encoder, files.task, inputs.rows)
        sets = open_sets(read, files.encoder, telemetry, logs=lane.directory.logs, sites=sites)
        return _LoadedLane(
            config=config,
            storage=lane.storage,
            adapter=name or config.lora.served_name,
            files=files,
            course=await asyncio.to_thread(build_course, config, files.encoder),
            players=players,
            scores=scores,
            prompts=await asyncio.to_thread(files.task.held_out, config.eval.prompts),
            sets=await ending.enter_async_context(sets),
            telemetry=telemetry,
            ending=ending.pop_all(),
        )


@dataclass(frozen=True, kw_only=True)
class _JoinedLane:
    """A lane whose workers are up. Nothing can refuse it any more."""

    loaded: _LoadedLane
    pools: Pools
    teaching: Teaching
    plan: LoopPlan
    restored: RestoredState

    def begin(self) -> BuiltRun:
        """Opens the lane's files for writing, and assembles its pipeline."""
        loaded, pools, restored, storage = self.loaded, self.pools, self.restored, self.loaded.storage
        storage.begin(restored.outlived)
        loaded.scores.open(storage.run_dir, loaded.telemetry.warn)
        pools.engine.listen(storage.passes.write)
        restored.notebook.listen(storage.passes.note)
        parts = self._assembled()
        return BuiltRun(
            config=loaded.config,
            adapter=loaded.adapter,
            pools=pools,
            teaching=self.teaching,
            parts=parts,
            pipeline=Pipeline(parts, self.plan, restored.step, earlier_metrics(storage.recorder.state)),
            redo=restored.redo,
            outdated=storage.saved.outdated if storage.saved else {},
            utilisation=Utilisation(pools.engine, pools.turns, loaded.telemetry),
            close=loaded.ending.aclose,
        )

    def _assembled(self) -> Parts:
        loaded, pools = self.loaded, self.pools
        config, storage, telemetry = loaded.config, loaded.storage, loaded.telemetry
        rewarding = self.teaching.rewarding(loaded.players.scorer)
        penalised = punished(config.reward.soft_overlong_punishment, config.rollout.max_tokens, rewarding)
        return assemble(
            plan=self.plan,
            restored=self.restored,
            telemetry=telemetry,
            engine=pools.engine,
            trainer=self.teaching.publishing(pools.trainer),
            environment=loaded.players.environment,
            scorer=self.teaching.tracing(penalised),
            evaluated_by=rewarding,
            held_out=loaded.prompts,
            sets=loaded.sets,
            evaluation=config.eval,
            journal=storage.journal,
            algorithm=algorithm_of(
                config.algo,
                config.longest_rollout,
                config.reward_weights,
                loaded.course.rows if loaded.course else (),
            ),
            decode=loaded.files.encoder.decode,
            snapshots=Snapshots(
                checkpoints=storage.checkpoints,
                passes=storage.passes,
                telemetry=telemetry,
                adapter=loaded.adapter,
                saved_step=storage.saved_step,
                made_by=storage.made_by,
                digest=storage.recorder.digest,
            ),
            probe=self._probe(),
            turns=pools.turns,
            noise=NoiseWatch(config.algo),
            deltas=DeltaWatch(config.weight_sync.form, config.engine.serving_dtype),
            minutes=Minutes(
                allowance_of(config.train, config.chosen), storage.keep_steps, telemetry.record, telemetry.clock
            ),
            sentinels=(
                self.teaching.watch,
                partial(watch_use, telemetry.record, telemetry.clock),
                *([pools.place] if pools.place else []),
            ),
            elsewhere=pools.engine.groups(self.restored.buffer.in_flight)
            if isinstance(pools.engine, BusEngine)
            else None,
        )

    def _probe(self) -> IdentityProbe:
        config, encoder, pools = self.loaded.config, self.loaded.files.encoder, self.pools
        room = pools.engine.capabilities.context_length
        dtype = max(config.engine.serving_dtype, pools.trainer_dtype, key=ROUNDING.__getitem__)
        return IdentityProbe(
            encoder.encode_text(PROBE)[:room],
            config.watch.identity_every,
            dtype,
            self.loaded.telemetry,
            adapter=self.loaded.adapter,
            # Rollout hosts come and go: those that come later would not have been tried.
            trial=pieces_of(encoder.encode_text(TEXT), room)
            if config.watch.trial and not config.orchestration.bus
            else (),
            served=config.engine.is_server,
            exact=pools.same_arithmetic,
            quantised=Quantised(
                config.engine.weights, config.watch.mismatch, pieces_of(encoder.encode_text(TEXT), room)
            )
            if config.engine.weights != "published"
            else None,
        )
