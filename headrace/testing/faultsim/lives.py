"""Deterministic simulation testing: a whole run with all its lives, faults included, from one seed, in milliseconds.

Pipeline, buffer, staleness, interrupts, recovery, journal, passes, checkpoints, facts and the clients of the worker processes
are those of a run. Worker processes, sockets, clock and disk are simulated (`chance.py`, `faults.py`). A killed run is resumed from its
disk until it has finished; `checks.py` checks every fact of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec

from headrace.algo.config import AlgoConfig
from headrace.algo.training_rows import algorithm_of
from headrace.core.errors import HeadraceError, StalledError, WorkerDied
from headrace.core.protocols import Engine, Job, Task
from headrace.core.steps import StepOutput
from headrace.durable.journal import Journal
from headrace.engine.fleet.fleet import Fleet
from headrace.engine.fleet.rotation import FleetPatience
from headrace.episodes.rollout import ForksConfig, RolloutConfig
from headrace.facts.facts import Books, RunEnded, RunStarted
from headrace.facts.index_file import DIGEST, NumbersIndex, thinned
from headrace.facts.recorder import Recorder
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.assembly import assemble, go_live, restore_state
from headrace.loop.checkpoints import Checkpoints, Snapshots, load_controller
from headrace.loop.evaluation import IdentityProbe
from headrace.loop.loop_plan import LoopPlan
from headrace.loop.own_groups import Suspects
from headrace.loop.partial import PartialConfig
from headrace.loop.pipeline import Pipeline, earlier_metrics
from headrace.loop.recovery import SavedRun, read_saved_run
from headrace.loop.turns import DeviceShare, SharedDevices
from headrace.loop.world.virtual_time import VirtualTimeLoop
from headrace.run.clients.process_engine import LentProcess, ProcessEngine
from headrace.run.clients.process_trainer import ProcessTrainer
from headrace.run.run_directory import Storage
from headrace.run.session import run_clock
from headrace.run.worker.worker_messages import EngineStart
from headrace.settings.process_config import EvalConfig, WatchConfig
from headrace.testing.fake_worker import FakeLauncher, bare_start
from headrace.testing.faultsim.case import Case
from headrace.testing.faultsim.chance import Chance, OneAtATime
from headrace.testing.faultsim.checks import Referee, RunHistory
from headrace.testing.faultsim.engine_worker import MAX_TOKENS, TICKET_DEATHS, SimulatedEngineProcess
from headrace.testing.faultsim.faults import Disk, Fault, Killed, Kind, until_done
from headrace.testing.faultsim.oracles import WatchedBuffer
from headrace.testing.faultsim.scorer import SeededScorer, ServedScorer
from headrace.testing.faultsim.trainer_worker import SimulatedTrainerProcess

PATIENCE = 600.0
"""Virtual seconds after which a wait stops the run. Without a fault no wait takes that long."""

SILENCE = 30.0
"""Virtual seconds after which a fleet goes on without a member that does not answer."""


class Life:
    """One process of the controller, from its start to its end, its kill or an error."""

    def __init__(self, case: Case, number: int, history: RunHistory, disk: Disk, directory: Path) -> None:
        self._case, self._number, self._history, self._disk, self._directory = case, number, history, disk, directory
        faults = tuple(fault for fault in case.faults if fault.life == number)
        self.chance = Chance(f"{case.seed}/{number}", faults, PATIENCE)
        self._memory: dict[int, str] = {}
        self._turn_counts = itertools.count().__next__, itertools.count().__next__
        self.devices = OneAtATime(bool(case.shared) or case.lent)
        self.finished = False

    async def run(self) -> None:
        self._open()
        recorder = self._recorder
        trainer, parts = self._workers()
        engine: Engine = parts[0]
        try:
            async with self._telemetry.waits.named("start", "the worker processes"):
                await trainer.open()
                engine = await self._engine(parts)
            pipeline = self._join(trainer, engine)
            await pipeline.redo(self._restored.redo)
            recorder.record(self._started(pipeline.step))
            self._referee.resumes(pipeline.step, self._parts.interrupts, self._plan)
            excused = self._history.passes_lost or not self._history.truth.remembers
            self._history.notes.resumes(self._parts.notebook, self._buffer.in_flight, excused)
            await go_live(self._parts)
            self._misfortunes(pipeline, parts)
            await self._pipeline_to_its_end(pipeline)
        finally:
            await engine.close()
            await trainer.close()
            self._storage.close()

    async def _pipeline_to_its_end(self, pipeline: Pipeline) -> None:
        reason = "finished"
        try:
            await pipeline.run()
            reason = "interrupted" if pipeline.interrupted else reason
        except HeadraceError as error:
            reason = str(error)
            self._referee.stops(error)
            raise
        finally:
            saved = self._parts.snapshots.saved_step == pipeline.step
            books = self._buffer.accounting(in_checkpoint=saved)
            with suppress(HeadraceError):
                self._recorder.record(
                    RunEnded(
                        t=self._clock(),
                        reason=reason,
                        step=pipeline.step,
                        accounting=books,
                        engine_idle=0.0,
                        trainer_idle=0.0,
                    )
                )
        if not self._disk.dead:
            self._left_behind(saved, pipeline.step)
        self.finished = reason == "finished"
        if self.finished and not self._disk.dead:
            assert books.in_pipeline + books.in_checkpoint == 0, f"C2: the run has finished, and {books} is left over"
            assert not (kept := self._parts.interrupts.tokens.so_far()), (
                f"memory: {list(kept)} are kept, and nobody needs them"
            )

    def _left_behind(self, saved: bool, step: int) -> None:
        sealed = any(path.name == f"step-{step:06d}" for path in self._storage.checkpoints.all())
        assert sealed or not saved, f"C7: the run counts on a checkpoint of step {step}, and there is none"

    def _open(self) -> None:
        case, directory = self._case, self._directory
        self._checkpoints = Checkpoints(directory / "checkpoints", keep=2)
        checkpoint, saved = self._behind() if self._number else (None, None)
        self._clock = run_clock(saved.seconds if saved else 0.0)
        self._recorder = self._recorded(checkpoint, saved)
        self._storage = Storage(
            run_dir=directory,
            recorder=self._recorder,
            checkpoints=self._checkpoints,
            flush=True,
            checkpoint=checkpoint,
            saved=saved,
            segment=case.segment,
        )
        self._buffer = WatchedBuffer(case.staleness, case.steps * case.groups, experience=case.experience)
        self._referee = Referee(case, self._storage, self._buffer, self._history, self._disk)
        waits = Waits(self._referee.record, self._clock, PATIENCE / 2, PATIENCE)
        self._telemetry = Telemetry(self._referee.record, self._clock, waits)

    def _recorded(self, checkpoint: Path | None, saved: SavedRun | None) -> Recorder:
        """Opens the metrics from the sums of the checkpoint, which are those of reading everything."""
        if saved is None:
            return Recorder(self._directory, waits=True, index=NumbersIndex(self._directory))
        sums = dataclasses.replace(saved.resume, digest=checkpoint / DIGEST if checkpoint else None)
        recorder = Recorder(self._directory, (), sums, waits=True, index=NumbersIndex(self._directory))
        read = Recorder(self._directory, (), saved.resume, waits=True)
        known, counted = (msgspec.msgpack.encode(thinned(each.state)) for each in (recorder, read))
        damaged = recorder.unreadable != read.unreadable  # before the checkpoint
        assert known == counted or damaged, "C7: other sums than those of all facts"
        self._history.from_sums += not recorder.state.whole
        return recorder

    def _behind(self) -> tuple[Path | None, SavedRun]:
        """Returns what the lives before this one left on the disk."""
        history, checkpoints = self._history, self._checkpoints
        checkpoint, complaints = checkpoints.newest_good()
        newest = checkpoints.all()[-1:]
        assert checkpoint or not newest, f"C7: no checkpoint can be used: {complaints}"
        assert bool(complaints) == any(map(history.is_spoiled, newest)), f"C7: {complaints}"
        saved = read_saved_run(
            self._directory, load_controller(checkpoint) if checkpoint else None, not history.changes
        )
        rewinds = history.damaged or history.changes or (history.rotten and saved.rewinds)
        assert saved.complaints or not history.damaged, "C7: damage of the journal is not reported"
        assert saved.rewinds == rewinds, (
            f"C7: is what came after the checkpoint set aside? {saved.rewinds}: {saved.complaints}"
        )
        return checkpoint, saved

    def _workers(self) -> tuple[ProcessTrainer, list[ProcessEngine]]:
        chance, memory, devices = self.chance, self._memory, self.devices
        first, second, truth, case = *self._turn_counts, self._history.truth, self._case
        engine = lambda on: SimulatedEngineProcess(chance, memory, truth, first, devices=on, poisoned=case.poisoned)  # noqa: E731
        own = OneAtATime(False) if case.lent else devices
        trained = lambda: SimulatedTrainerProcess(chance, memory, second, case.skips, devices)  # noqa: E731
        launcher = FakeLauncher({"engine": lambda: engine(own), "trainer": trained}, chance)
        checkpoint = self._storage.checkpoint
        start = bare_start(restore={"": str(checkpoint)} if checkpoint else {})
        trainer = ProcessTrainer(launcher, start, waits=self._telemetry.waits)
        max_deaths = TICKET_DEATHS if self._case.poisoned else chance.random.choice([0, 1, 3])
        if any(fault.kind == "engine_lost" and fault.life == self._number for fault in self._case.faults):
            max_deaths = 0
        parts, suspects = range(self._case.members), Suspects(TICKET_DEATHS)
        job = Job("engine", "engine")
        engines = [ProcessEngine(launcher, job, max_deaths, self._telemetry, suspects) for _ in parts]
        if case.lent:
            launcher = FakeLauncher({"engine": lambda: engine(devices)}, chance)
            engines.append(LentProcess(launcher, job, max_deaths, self._telemetry, suspects))
        return trainer, engines

    async def _engine(self, parts: list[ProcessEngine]) -> Engine:
        """Opens the engine of the case."""
        lent = parts[-1] if self._case.lent else None
        for part in parts:
            await part.launch()
            await part.open(EngineStart("", {}, {}, asleep=bool(self._case.shared) or part is lent))
        if len(parts) == 1:
            return parts[0]
        names = {str(number): part for number, part in enumerate(parts)}
        fleet = Fleet(names, FleetPatience(PATIENCE, SILENCE), self._telemetry, [*names][-1] if lent else None)
        await fleet.open()
        return fleet

    def _join(self, trainer: ProcessTrainer, engine: Engine) -> Pipeline:
        case, referee, storage = self._case, self._referee, self._storage
        forks = ForksConfig(alternatives=case.alternatives)
        rollout = RolloutConfig(group_size=case.group_size, max_tokens=MAX_TOKENS, forks=forks, patience=1000)
        plan = self._plan = self._plan_of(rollout)
        task: Task = case.task()
        self._restored = restore_state(
            plan=plan,
            task=task,
            engine=engine,
            partial=PartialConfig(mode=case.mode),
            telemetry=self._telemetry,
            saved=storage.saved,
            buffer=self._buffer,
        )
        storage.begin(self._restored.outlived)
        referee.begins(self.chance)
        engine.listen(storage.passes.write)
        self._restored.notebook.listen(self._history.notes.watching(storage.passes.note, lambda: self._disk.dead))
        engine.listen(self._told)
        scorer = self._scorer()
        held_out = task.held_out(2) if case.evaluate_every else []
        self._parts = assemble(
            plan=plan,
            restored=self._restored,
            telemetry=self._telemetry,
            engine=engine,
            trainer=trainer,
            environment=self._history.notes.environment(case, self._number),
            scorer=scorer,
            evaluated_by=scorer,
            held_out=held_out,
            evaluation=EvalConfig(samples=1),
            algorithm=algorithm_of(AlgoConfig(name="dr_grpo"), rollout.max_tokens),
            decode=lambda tokens: "",
            journal=cast(Journal, referee.journal),
            snapshots=Snapshots(
                storage.checkpoints,
                storage.passes,
                self._telemetry,
                saved_step=storage.saved_step,
                digest=storage.recorder.digest,
            ),
            probe=IdentityProbe([1, 2, 3], 2, "float32", self._telemetry),
            turns=self._turns(trainer, engine),
        )
        referee.saved_step = lambda: self._parts.snapshots.saved_step
        return Pipeline(self._parts, plan, self._restored.step, earlier_metrics(storage.recorder.state))

    def _turns(self, trainer: ProcessTrainer, engine: Engine) -> DeviceShare:
        case, telemetry = self._case, self._telemetry
        if case.lent:
            lent = cast(Fleet, engine).on_lent_devices(SILENCE)
            return DeviceShare(SharedDevices(lent, trainer, keep=False, telemetry=telemetry, lent=True))
        keep, process_engine = case.shared == "host", cast(ProcessEngine, engine)
        return DeviceShare(
            SharedDevices(process_engine, trainer, keep=keep, telemetry=telemetry) if case.shared else None
        )

    def _scorer(self) -> SeededScorer:
        case = self._case
        if not case.served:
            return SeededScorer(case.seed, self.chance, case.stragglers)
        heard = self._history.scores.begin(self._disk)
        scorer = ServedScorer(case.seed, self.chance, case.stragglers, self._telemetry, heard)
        scorer.open(self._directory)
        return scorer

    def _plan_of(self, rollout: RolloutConfig) -> LoopPlan:
        return LoopPlan(
            steps=self._case.steps,
            staleness=self._case.staleness,
            rollout=rollout,
            seed=self._case.seed,
            max_skipped_steps=1000,
            checkpoint_every=self._case.checkpoint_every,
            evaluate_every=self._case.evaluate_every,
            curriculum=self._case.choosing,
            experience=self._case.experience,
            watch=WatchConfig(failed_pause=1.0, outages=1000),  # failures here are intended
        )

    def _told(self, output: StepOutput) -> None:
        if not self._disk.dead:
            self._history.received(output)

    def _started(self, step: int) -> RunStarted:
        case, buffer = self._case, self._buffer
        books = Books(buffer.accounting(), tuple(buffer.in_flight), buffer.ready)
        slots, bound = case.staleness.generating, case.staleness.lag_bound
        return RunStarted(
            t=self._clock(), name="simulated", headline="", seed=case.seed, steps=case.steps, groups_per_step=case.groups, group_size=case.group_size, slots=slots, window=case.window,
            max_lag=bound, where={}, resumed_at=step, books=books,
        )  # fmt: skip

    def _misfortunes(self, pipeline: Pipeline, engines: Sequence[Engine]) -> None:
        loop = asyncio.get_running_loop()
        for fault in self._case.faults:
            lost = engines[int(fault.share * len(engines))]
            acts = {"interrupt": pipeline.interrupt, "jump": self._jump, "engine_lost": lost.kill}
            if fault.life == self._number and fault.kind in acts:
                loop.call_later(fault.at / 100, self._befall, fault, acts[fault.kind])

    def _befall(self, fault: Fault, act: Any) -> None:
        self.chance.befell.append(fault)
        act()

    def _jump(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.jump(PATIENCE * 0.7)


def trial(case: Case) -> RunHistory:
    """Runs a case to its end and returns what happened. Raises `AssertionError` where a contract does not hold."""
    gc.collect()  # what others have left (an HTTP client whose finalizer starts a task, say) must not go in our loop, where nobody hears of it
    history = RunHistory(case.shape, several=case.has_fleet)
    with tempfile.TemporaryDirectory(dir=_fast_directory()) as name:
        lives = 0
        while not _live(case, lives, history, name):
            lives += 1
            assert lives <= len(case.faults) + 1, "C6: the run does not end, though nothing goes wrong any more"
        history.finish(Path(name), case.steps, case.groups)
    if case.loses_nothing:
        history.trained_all(case.seed, case.steps * case.groups)
    if case.synchronous and case.faults and history.weights:
        undisturbed = trial(msgspec.structs.replace(case, faults=()))
        assert history.weights == undisturbed.weights, "C7: other weights than the undisturbed run's"
    return history


def _fast_directory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _live(case: Case, number: int, history: RunHistory, name: str) -> bool:
    """Runs one life. Returns whether the run is finished."""
    faults = [fault for fault in case.faults if fault.life == number]
    history.meanwhile(Path(name), faults)
    disk = Disk(Path(name), faults)
    with disk.mounted() as directory:
        life = Life(case, number, history, disk, directory)
        try:
            until_done(life.run(), disk)
        except Killed:
            history.killed += 1
        except HeadraceError as error:
            kinds = {fault.kind for fault in life.chance.befell}
            kinds |= {"engine_dies"} if case.poisoned else set()
            assert _explained(error, kinds, disk, case.has_fleet), f"C6: nothing explains that it stopped: {error!r}"
            history.stopped.append(str(error))
        assert not life.devices.wrong, f"devices: {life.devices.wrong[0]}"
        history.befell += life.chance.befell
        history.passes_lost |= disk.was_full or disk.lost_power
        history.lost_power |= disk.lost_power
    disk.lose()
    return life.finished and not disk.dead


def _explained(error: HeadraceError, kinds: set[Kind], disk: Disk, fleet: bool) -> bool:
    if fleet and isinstance(error, WorkerDied) and kinds & {"engine_hangs", "engine_slow", "jump"}:
        return True  # nobody was left in its rotation
    hangs = isinstance(error, WorkerDied) and error.how.startswith("hangs: ")
    if hangs or isinstance(error, StalledError):
        return any(kind.endswith(("hangs", "slow")) or kind in ("jump", "lose") for kind in kinds)
    if isinstance(error, WorkerDied):
        # On a full disk a member whose reports cannot be written is ended, and its error says so.
        full = fleet and disk.was_full and "No space left" in str(error)
        return full or bool(kinds & {"engine_dies", "engine_lost", "trainer_dies", "lose"})
    return disk.was_full
