"""The two processes of a run, trainer and engine, and the transport between them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from headrace.core.errors import StalledError, WorkerDied
from headrace.core.printing import say
from headrace.core.protocols import Engine, Launcher, Trainer
from headrace.core.weights import Manifest
from headrace.engine.config import EngineConfig
from headrace.engine.fleet.fleet import Fleet
from headrace.engine.remote.sleeping_server import SleepingServer
from headrace.episodes.scoring.teacher.config import TeacherConfig
from headrace.facts.facts import WeightsLive
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.turns import DeviceShare, SharedDevices
from headrace.processes.orchestration_config import OrchestrationConfig
from headrace.run.clients.bus_engine import BusEngine
from headrace.run.clients.process_engine import ProcessEngine
from headrace.run.clients.process_trainer import ProcessTrainer
from headrace.run.config import RunConfig
from headrace.run.learning_problems import teacher_engine
from headrace.run.needs import check_needs, check_parity
from headrace.run.seats import ONLY_HERE, UserSites, open_seats, ranks_of, threads_of_rank
from headrace.run.starting import engine_on_bus, start_engine, transport_of
from headrace.run.worker.build import open_launcher
from headrace.run.worker.worker_messages import AdapterStart, ShadowStart, TrainerReady, TrainerStart
from headrace.weight_sync.kind import TransportKind
from headrace.weight_sync.shared_memory import SharedMemory


@dataclass(frozen=True)
class Shadowing:
    """The publishing of the student's older self to the engine that serves it."""

    manifest: Manifest
    transport: TransportKind


@dataclass(kw_only=True)
class Pools:
    """Trainer and engine after they have started. The trainer's weights are not live yet. Several pipelines may share them."""

    trainer: Trainer
    engine: Engine
    launcher: Launcher
    trainer_dtype: str
    """The dtype that the trainer computes in."""
    same_arithmetic: bool
    """Whether engine and trainer compute one forward pass, bit for bit."""
    shadow: Shadowing | None
    """The publishing of the student's older self; None if it is no teacher."""
    place: Callable[[], Awaitable[None]] | None = None
    """The watch over the place that workers elsewhere come from; None if it needs none."""
    turns: DeviceShare = field(default_factory=DeviceShare)
    """The trainer's time, which all pipelines that share it take in turns."""
    _serving: asyncio.Lock = field(default_factory=asyncio.Lock)
    _base_is_live: bool = False
    _reserving: asyncio.Future[None] | None = None

    async def serve_base(self, telemetry: Telemetry) -> None:
        """Publishes the frozen base weights that adapters need in the engine. Only the first call does anything."""
        async with self._serving:
            if not self._base_is_live:
                update = await self.trainer.publish()
                await self.turns.over()
                load = await self.engine.load(update)
                telemetry.record(WeightsLive(telemetry.clock(), update, load))
                self._base_is_live = True

    def reserve(self) -> None:
        """Lets the trainer get ready for its first step while rollouts are sampled for it. If it dies of that, whoever calls it next hears so."""
        if isinstance(self.trainer, ProcessTrainer):
            self._reserving = asyncio.ensure_future(self.trainer.reserve())
            self._reserving.add_done_callback(lambda done: done.cancelled() or done.exception())

    def kill(self) -> None:
        """Kills the processes instead of asking them to end."""
        self.trainer.kill()
        self.engine.kill()


@asynccontextmanager
async def open_pools(
    config: RunConfig,
    model_dir: Path,
    logs: Path,
    telemetry: Telemetry,
    restore: Mapping[str, Path],
    *,
    sites: UserSites = ONLY_HERE,
) -> AsyncIterator[Pools]:
    """Opens engine and trainer, and gives them as soon as both are ready. `restore`: checkpoints by adapter; full weights have the empty
    name. `sites`: are opened too, and closed with the pools."""
    async with AsyncExitStack() as undo:
        transports = [transport_of(config, logs)]
        undo.callback(transports[0].close)
        if any(teacher.student for teacher in config.teachers):
            transports.append(SharedMemory.open())
            undo.callback(transports[1].close)
        launcher = open_launcher(logs)
        on_bus = engine_on_bus(config, model_dir, transports[0], logs.parent, telemetry)
        if on_bus:
            await _launch_first(on_bus.engine, undo)
        seats = await undo.enter_async_context(open_seats(config, model_dir, launcher, logs, telemetry))
        undo.push_async_callback(sites.close)
        await sites.open(seats.hosts, config)
        started: list[Engine | Trainer] = []
        undo.push_async_exit(partial(_close, started, telemetry.waits))
        starting = on_bus or start_engine(
            config,
            model_dir=model_dir,
            launcher=seats.engines,
            here=launcher,
            transport=transports[0],
            logs=logs,
            telemetry=telemetry,
        )
        engine = starting.engine
        started.append(engine)
        await starting.launch()  # a server that does not come has a deadline, and a sentence, of its own
        start = trainer_start(config, model_dir, restore, *transports)
        shared = logs.parent if ranks_of(config.orchestration, config.train) else None
        trainer = ProcessTrainer(seats.trainer, start, config.train.cores, shared, waits=telemetry.waits)
        started.append(trainer)
        async with telemetry.waits.named("start", "the trainer to load the model"):
            ready: TrainerReady = await trainer.open()
        for note in trainer.notes:
            telemetry.warn(note)
        async with telemetry.waits.named("start", "the engine to make room for it"):
            await starting.finish(ready.manifests, sum(map(bool, config.trained)))
        check_needs(engine.capabilities, config)
        yield Pools(
            trainer=trainer,
            engine=engine,
            launcher=launcher,
            trainer_dtype=ready.dtype,
            same_arithmetic=check_parity(engine.capabilities, ready.arithmetic, config.train.parity),
            place=seats.watch,
            shadow=Shadowing(ready.shadow, transports[1]) if ready.shadow else None,
            turns=DeviceShare(devices_of(config.orchestration, engine, trainer, telemetry)),
        )


async def _launch_first(engine: BusEngine, undo: AsyncExitStack) -> None:
    """Hosts stay as long as the run gives signs of life, and whoever takes its seats may be waited for."""
    undo.push_async_callback(engine.close)
    await engine.launch()


async def _close(started: Collection[Engine | Trainer], waits: Waits, _: object, error: object, __: object) -> None:
    for engine in started:
        if isinstance(engine, BusEngine):
            engine.trainer_died = isinstance(error, WorkerDied) and error.who == "trainer"
    await close_within(waits, asyncio.gather(*(engine.close() for engine in started)))


async def close_within(waits: Waits, closing: Awaitable[Any]) -> None:
    """Waits until processes are closed. Those that cannot be killed are told, and hide no error."""
    try:
        async with waits.named("closing", "the worker processes"):
            await closing
    except StalledError as error:
        say(error)


def devices_of(
    place: OrchestrationConfig, engine: Engine, trainer: ProcessTrainer, telemetry: Telemetry
) -> SharedDevices | None:
    """The devices that engine and trainer share, or that the trainer lends; None if each has its own."""
    if place.lend:
        assert isinstance(engine, Fleet), "an engine on lent devices is a member of one"
        lent = engine.on_lent_devices(place.give_way)
        return SharedDevices(lent, trainer, keep=False, telemetry=telemetry, lent=True)
    if place.placement != "shared":
        return None
    assert isinstance(engine, ProcessEngine | SleepingServer), "`check` refuses all others"
    return SharedDevices(engine, trainer, keep=place.kv == "host", telemetry=telemetry)


def trainer_start(
    config: RunConfig,
    model_dir: Path,
    restore: Mapping[str, Path],
    transport: TransportKind,
    shadow: TransportKind | None = None,
) -> TrainerStart:
    """`restore`: as in `open_pools`; `shadow`: the transport of the student's older self, if that is a teacher."""
    threads = (
        threads_of_rank(config.orchestration, config.train, config.chosen)
        if ranks_of(config.orchestration, config.train)
        else config.train.threads
    )
    return TrainerStart(
        model_dir=str(model_dir),
        train=dataclasses.asdict(dataclasses.replace(config.train, threads=threads)),
        algo=dataclasses.asdict(config.algorithm),
        seed=config.seed,
        serving_dtype=config.engine.serving_dtype,
        keep_routing=config.rollout.keep_routing,
        transport=transport,
        restore={name: str(checkpoint.absolute()) for name, checkpoint in restore.items()},
        shadow=_shadow(config.teachers, config.engine, shadow) if shadow else None,
        adapters={
            name: AdapterStart(
                dataclasses.asdict(run.train), dataclasses.asdict(run.algorithm), dataclasses.asdict(run.lora)
            )
            for name, run in config.trained.items()
            if run.lora.rank
        },
        ranks=config.train.parallel.ranks,
    )


def _shadow(teachers: Sequence[TeacherConfig], engine: EngineConfig, transport: TransportKind) -> ShadowStart | None:
    """The trainer's start message for the teacher that is the student's older self; None if there is none."""
    for teacher in teachers:
        if teacher.student:
            dtype = teacher_engine(engine, teacher).serving_dtype
            return ShadowStart(teacher.student, teacher.every, teacher.decay, dtype, transport)
    return None
