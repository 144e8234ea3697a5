"""Deterministic simulation testing: a whole run with all its lives, faults included, from one seed, in milliseconds.

Pipeline, buffer, staleness, interrupts, recovery, journal, passes, checkpoints, facts and the clients of the worker processes
are those of a run. Worker processes, sockets, clock and disk are simulated (`dst_processes.py`, `faults.py`). A run that is
killed goes on from what lies on its disk, until it has finished; `dst_checks.py` watches every fact of it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.algo.config import AlgoConfig
from headrace.algo.groups import algorithm_of
from headrace.buffer import Buffer
from headrace.errors import HeadraceError, StalledError, WorkerDied
from headrace.observe.facts import Books, RunEnded, RunStarted, WeightsLive
from headrace.observe.recorder import Recorder
from headrace.observe.waits import Waits
from headrace.orchestration.checkpoint import Checkpoints
from headrace.orchestration.clients import ProcessEngine, ProcessTrainer
from headrace.orchestration.evaluation import Evaluator
from headrace.orchestration.identity import IdentityProbe
from headrace.orchestration.messages import EngineStart, TrainerStart
from headrace.orchestration.parts import Parts, Plan, told_of
from headrace.orchestration.pipeline import Pipeline
from headrace.orchestration.recovery import read_past, recover
from headrace.orchestration.session import run_clock
from headrace.orchestration.snapshots import Snapshots, load_controller
from headrace.orchestration.storage import Storage
from headrace.partial import Interrupts, PartialConfig
from headrace.process_config import EvalConfig, WatchConfig
from headrace.protocols import Task
from headrace.rollout import RolloutConfig
from headrace.simulate.distributions import fixed
from headrace.simulate.dst_checks import Ledger, Referee
from headrace.simulate.dst_engine import SimulatedEngineProcess
from headrace.simulate.dst_processes import Chance, SimulatedWorker
from headrace.simulate.dst_scorer import SeededScorer
from headrace.simulate.dst_trainer import SimulatedTrainerProcess
from headrace.simulate.faults import Disk, Fault, Killed, Kind, some_faults
from headrace.simulate.surroundings import SimulatedTask
from headrace.staleness import StalenessConfig
from headrace.types import Struct
from headrace.virtual_time import VirtualTimeLoop

PATIENCE = 600.0
"""Virtual seconds until a wait stops the run. Without a fault nothing takes that long."""

ENDLESS = 40_000
"""Turns of the loop in one life. Without a mistake a life takes a tenth of that at most."""

Mode = Literal["inflight", "stream", "abort_resume", "save_resume", "drain", "barrier", "cancel_group"]
MODES: tuple[Mode, ...] = (
    "inflight", "stream", "abort_resume", "save_resume", "drain", "barrier", "cancel_group",
)  # fmt: skip


class Case(Struct, frozen=True):
    """One run: its settings, its schedule (`seed`) and its faults. Equal cases run equally."""

    seed: int
    mode: Mode = "inflight"
    overdue: Literal["wait", "trim", "drop", "cancel"] = "wait"
    order: Literal["stalest", "finished"] = "stalest"
    groups: int = 2
    max_lag: int = 1
    window: int = 1
    group_size: int = 2
    steps: int = 5
    checkpoint_every: int = 2
    evaluate_every: int = 0
    stored: int = 0
    skips: bool = False
    """Some steps have a gradient that is not finite."""
    faults: tuple[Fault, ...] = ()

    @property
    def staleness(self) -> StalenessConfig:
        return StalenessConfig(
            groups_per_step=self.groups,
            max_lag=self.max_lag,
            window=self.window,
            order=self.order,
            overdue=self.overdue,
            stored=self.stored,
        )

    @property
    def loses_nothing(self) -> bool:
        """Whether which prompts are trained depends on nothing but their rewards."""
        return self.overdue == "wait" and self.mode != "cancel_group" and not self.skips

    @property
    def synchronous(self) -> bool:
        """Whether the weights depend on nothing but settings and seed."""
        return self.max_lag == 0 and self.overdue == "wait" and self.mode != "cancel_group"


def case_of(seed: int) -> Case:
    rng = random.Random(seed)
    groups, max_lag = rng.choice([1, 2, 2, 3]), rng.choice([0, 1, 1, 2, 3])
    overdue = rng.choice(["wait", "wait", "wait", "trim", "drop", "cancel"])
    window = rng.randint(1, max_lag * groups + 1) if overdue == "wait" and rng.random() < 0.5 else 1
    steps, size = rng.choice([3, 4, 6]), rng.choice([2, 2, 3, 4])
    operations = 40 + steps * groups * (10 + 3 * size)
    return Case(
        seed,
        rng.choice(MODES),
        overdue,  # type: ignore[arg-type]
        rng.choice(["stalest", "finished"]),
        groups,
        max_lag,
        window,
        size,
        steps,
        rng.choice([0, 1, 2, 2, 3]),
        rng.choice([0, 0, 1, 2]),
        0 if overdue == "wait" else groups * rng.choice([1, 2, 4]),
        rng.random() < 0.1,
        some_faults(rng, operations),
    )


class Life:
    """One process of the controller, from its start to its end, its kill or an error."""

    def __init__(self, case: Case, number: int, ledger: Ledger, disk: Disk, directory: Path) -> None:
        self._case, self._number, self._ledger, self._disk, self._directory = case, number, ledger, disk, directory
        faults = tuple(one for one in case.faults if one.life == number)
        self.chance = Chance(f"{case.seed}/{number}", faults, PATIENCE)
        self._memory: dict[int, str] = {}
        self._engine_turns, self._trainer_turns = itertools.count(), itertools.count()
        self.finished = False

    async def run(self) -> None:
        self._open()
        recorder = self._recorder
        past, buffer = self._storage.past, self._buffer
        trainer, engine = self._workers()
        try:
            async with self._waits.named("start", "the worker processes"):
                await trainer.open()
                await engine.launch()
                await engine.open(EngineStart("", {}, {}))
            pipeline = self._join(trainer, engine)
            await pipeline.redo(self._redo)
            recorder.record(self._started(pipeline.step))
            self._ledger.resumes(past, buffer, self._parts.interrupts, self._plan)
            await self._go_live()
            self._misfortunes(pipeline)
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
            raise
        finally:
            saved = self._parts.snapshots.saved_step == pipeline.step
            books = self._buffer.accounting(in_checkpoint=saved)
            with suppress(HeadraceError):
                self._recorder.record(RunEnded(self._clock(), reason, pipeline.step, books, 0.0, 0.0))
        self.finished = reason == "finished"

    def _open(self) -> None:
        case, directory = self._case, self._directory
        checkpoints = Checkpoints(directory / "checkpoints", keep=2)
        checkpoint = past = None
        if self._number:
            checkpoint, complaints = checkpoints.newest_good()
            assert not complaints, f"C7: {complaints}"
            past = read_past(directory, load_controller(checkpoint) if checkpoint else None, True)
            assert not past.rewinds, f"C7: {past.complaints}"
        self._clock = run_clock(past.seconds if past else 0.0)
        self._recorder = Recorder(directory, (), past.resume if past else None, waits=True)
        self._storage = Storage(directory, self._recorder, checkpoints, True, checkpoint, past)
        self._buffer = Buffer(case.staleness, case.steps * case.groups)
        self._referee = Referee(self._recorder, self._buffer, self._ledger, case.staleness, self._disk)
        self._waits = Waits(self._referee.record, self._clock, PATIENCE / 2, PATIENCE)

    def _workers(self) -> tuple[ProcessTrainer, ProcessEngine]:
        chance, memory, truth = self.chance, self._memory, self._ledger.truth

        def engine_process() -> SimulatedEngineProcess:
            return SimulatedEngineProcess(chance, memory, truth, lambda: next(self._engine_turns))

        def trainer_process() -> SimulatedTrainerProcess:
            return SimulatedTrainerProcess(chance, memory, lambda: next(self._trainer_turns), self._case.skips)

        class Engine(ProcessEngine):
            async def launch(self) -> None:
                self.worker = SimulatedWorker("engine", engine_process, chance, self._on_push)
                await self.worker.start("engine", [], [])

        checkpoint = self._storage.checkpoint
        start = TrainerStart("", {}, {}, 0, "", False, {"": str(checkpoint)} if checkpoint else {})
        trainer = ProcessTrainer(start, [], -1, Path("simulated.log"))
        trainer.worker = SimulatedWorker("trainer", trainer_process, chance)
        max_deaths = chance.random.choice([0, 1, 3])
        return trainer, Engine([], -1, Path("simulated.log"), max_deaths, self._referee, self._clock)

    def _join(self, trainer: ProcessTrainer, engine: ProcessEngine) -> Pipeline:
        case, clock, referee, storage = self._case, self._clock, self._referee, self._storage
        rollout = RolloutConfig(group_size=case.group_size, max_tokens=6, patience=1000)
        every = case.checkpoint_every, case.evaluate_every
        never = WatchConfig(failed_pause=1.0, outages=1000)  # what fails here was made to fail
        plan = Plan(case.steps, case.staleness, rollout, case.seed, 1000, *every, watch=never)
        self._plan = plan
        task: Task = SimulatedTask(fixed(3), case.seed)
        waits = self._waits
        interrupts = Interrupts(engine, PartialConfig(mode=case.mode), waits, clock)
        past = storage.past
        self._redo = recover(past, task, self._buffer, interrupts, plan) if past else []
        storage.begin()
        engine.listen(storage.passes.write)
        engine.listen(self._told)
        scorer = SeededScorer(case.seed, self.chance)
        held_out = task.held_out(2) if case.evaluate_every else []
        no_text = lambda tokens: ""  # noqa: E731
        self._parts = Parts(
            task=task,
            engine=engine,
            interrupts=interrupts,
            trainer=trainer,
            scorer=scorer,
            observer=referee,
            journal=storage.journal,
            buffer=self._buffer,
            algorithm=algorithm_of(AlgoConfig(name="dr_grpo"), rollout.max_tokens),
            decode=no_text,
            waits=waits,
            snapshots=Snapshots(
                storage.checkpoints,
                storage.passes,
                referee,
                clock,
                "",
                storage.saved_step,
            ),
            probe=IdentityProbe([1, 2, 3], 2, 1e-9, referee, clock),
            evaluator=Evaluator(
                interrupts.once, scorer, referee, held_out, EvalConfig(samples=1), rollout, no_text, waits, clock
            ),
        )
        return Pipeline(self._parts, plan, clock, past.saved_step if past else 0, told_of(storage.recorder.state))

    def _told(self, output: bytes) -> None:
        if not self._disk.dead:
            self._ledger.told(output)

    def _started(self, step: int) -> RunStarted:
        case, buffer = self._case, self._buffer
        books = Books(buffer.accounting(), tuple(buffer.in_flight), buffer.ready)
        slots, bound = case.staleness.generating, case.staleness.lag_bound
        return RunStarted(
            self._clock(), "simulated", "", case.seed, case.steps, case.groups, case.group_size, slots, case.window,
            bound, {}, step, books,
        )  # fmt: skip

    async def _go_live(self) -> None:
        parts = self._parts
        async with parts.waits.named("start", "the first weights to be live"):
            update = await parts.trainer.publish()
            load = await parts.engine.load(update)
        parts.observer.record(WeightsLive(self._clock(), update, load))

    def _misfortunes(self, pipeline: Pipeline) -> None:
        loop = asyncio.get_running_loop()
        for fault in self._case.faults:
            if fault.life == self._number and fault.kind in ("interrupt", "jump"):
                act = pipeline.interrupt if fault.kind == "interrupt" else self._jump
                loop.call_later(fault.at / 100, self._befall, fault, act)

    def _befall(self, fault: Fault, act: Any) -> None:
        self.chance.befell.append(fault)
        act()

    def _jump(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.jump(PATIENCE * 0.7)


def trial(case: Case) -> Ledger:
    """Runs a case to its end and returns what happened. Raises `AssertionError` where a contract does not hold."""
    ledger = Ledger(case.group_size)
    with tempfile.TemporaryDirectory(dir=_fast_directory()) as name:
        lives = 0
        while not _live(case, lives, ledger, name):
            lives += 1
            assert lives <= len(case.faults) + 1, "C6: the run does not end, though nothing goes wrong any more"
        ledger.finish(Path(name), case.steps, case.groups)
    if case.loses_nothing:
        ledger.trained_all(case.seed, case.steps * case.groups)
    if case.synchronous and case.faults and ledger.weights:
        undisturbed = trial(msgspec.structs.replace(case, faults=()))
        assert ledger.weights == undisturbed.weights, "C7: other weights than the undisturbed run's"
    return ledger


def _fast_directory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _live(case: Case, number: int, ledger: Ledger, name: str) -> bool:
    """Whether the run is finished."""
    disk = Disk(Path(name), [one for one in case.faults if one.life == number])
    with disk.mounted() as directory:
        life = Life(case, number, ledger, disk, directory)
        try:
            until_done(life.run(), disk)
        except Killed:
            ledger.killed += 1
        except HeadraceError as error:
            kinds = {fault.kind for fault in life.chance.befell}
            assert _explained(error, kinds, disk), f"C6: nothing explains that it stopped: {error!r}"
            ledger.stopped.append(str(error))
        ledger.befell += life.chance.befell
        ledger.passes_lost |= disk.was_full
    return life.finished and not disk.dead


def _explained(error: HeadraceError, kinds: set[Kind], disk: Disk) -> bool:
    if isinstance(error, StalledError):
        return any(kind.endswith(("hangs", "slow")) or kind in ("jump", "lose") for kind in kinds)
    if isinstance(error, WorkerDied):
        return bool(kinds & {"engine_dies", "trainer_dies", "lose"})
    return disk.was_full


class _Loop(VirtualTimeLoop):
    def __init__(self, disk: Disk) -> None:
        super().__init__()
        self._disk, self._turns = disk, 0

    def _run_once(self) -> None:
        if self._disk.dead:  # a task group would still tidy up
            raise Killed
        self._turns += 1
        assert self._turns < ENDLESS, "C6: the loop turns and turns, and nothing comes of it"
        super()._run_once()  # type: ignore[misc]


def until_done(main: Coroutine[Any, Any, None], disk: Disk) -> None:
    """As `virtual_time.run`, but a kill leaves everything as it is: nothing is cancelled, nothing is closed in order."""
    loop = _Loop(disk)
    lost: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: lost.append(context))
    task = loop.create_task(main)
    try:
        loop.run_until_complete(task)
    finally:
        _forget(loop)
    assert not lost, f"C6: nobody heard of {lost[0]}"


def _forget(loop: VirtualTimeLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        for _ in range(3):  # one that waits in its clean-up does not end at once
            with suppress(BaseException):
                task.get_coro().close()
    loop.close()
