"""The two processes of a run, trainer and engine, and the transport between them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.core.protocols import Engine, Launcher, Trainer
from headrace.engine.fleet.fleet import Fleet
from headrace.facts.facts import WeightsLive
from headrace.facts.telemetry import Telemetry
from headrace.loop.turns import SharedDevices, Turns
from headrace.run.clients.process_engine import ProcessEngine
from headrace.run.clients.process_trainer import ProcessTrainer
from headrace.run.config import RunConfig, adapter_runs
from headrace.run.needs import check_needs, check_parity
from headrace.run.seats import open_seats, ranks_of, threads_of_rank
from headrace.run.starting import start_engine, transport_of
from headrace.run.teaching import Shadowing, Teaching, shadow_of
from headrace.run.user_sites import ONLY_HERE, UserSites
from headrace.run.worker.build import open_launcher
from headrace.run.worker.worker_messages import AdapterStart, TrainerReady, TrainerStart
from headrace.weight_sync.kind import TransportKind
from headrace.weight_sync.shared_memory import SharedMemory


@dataclass(kw_only=True)
class Pools:
    """Trainer and engine after they have started. The trainer's weights are not live yet."""

    trainer: Trainer
    engine: Engine
    launcher: Launcher
    transports: Sequence[TransportKind]
    trainer_dtype: str
    """The dtype that the trainer computes in."""
    same_arithmetic: bool
    """Whether engine and trainer compute one forward pass, bit for bit."""
    shadow: Shadowing | None
    """The publishing of the student's older self; None if it is no teacher."""
    teaching: Teaching | None = None
    lent: bool = False
    """Whether the processes are shared by several pipelines. `close` then leaves them running; their owner closes them."""
    turns: Turns = field(default_factory=Turns)
    """The trainer's time, which all pipelines that share it take in turns."""
    ending: AsyncExitStack = field(default_factory=AsyncExitStack)
    """The last that is closed, after the workers."""
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

    def lend(self) -> Pools:
        """A view for one of several pipelines that share the processes."""
        return dataclasses.replace(self, teaching=None, lent=True)

    def kill(self) -> None:
        """Kills the processes instead of asking them to end. `close` must still be called."""
        self.trainer.kill()
        self.engine.kill()
        if self.teaching:
            self.teaching.kill()

    async def close(self) -> None:
        others = [self.teaching.close()] if self.teaching else []
        if self.lent:
            await asyncio.gather(*others)
            return
        await asyncio.gather(self.engine.close(), self.trainer.close(), *others)
        for transport in self.transports:
            transport.close()
        await self.ending.aclose()


async def open_pools(
    config: RunConfig,
    model_dir: Path,
    logs: Path,
    telemetry: Telemetry,
    restore: Mapping[str, Path],
    *,
    sites: UserSites = ONLY_HERE,
) -> Pools:
    """Starts both processes and waits until both are ready. `restore`: checkpoints by adapter; full weights have the empty name. `sites`: are
    opened too, and closed with the pools."""
    async with AsyncExitStack() as undo:
        transports = [transport_of(config, logs)]
        undo.callback(transports[0].close)
        if any(teacher.student for teacher in config.teachers):
            transports.append(SharedMemory.open())
            undo.callback(transports[1].close)
        launcher = open_launcher(logs)
        ending = await undo.enter_async_context(AsyncExitStack())
        seats = await ending.enter_async_context(open_seats(config, model_dir, launcher, logs, telemetry))
        ending.push_async_callback(sites.close)
        await sites.open(seats.hosts, config)
        starting = start_engine(
            config,
            model_dir=model_dir,
            launcher=seats.engines,
            here=launcher,
            transport=transports[0],
            logs=logs,
            telemetry=telemetry,
        )
        engine = starting.engine
        undo.push_async_callback(engine.close)
        await starting.launch()  # a server that does not come has a deadline, and a sentence, of its own
        started = trainer_start(config, model_dir, restore, *transports)
        shared = logs.parent if ranks_of(config) else None
        trainer = ProcessTrainer(seats.trainer, started, config.train.cores, shared, waits=telemetry.waits)
        undo.push_async_callback(trainer.close)
        async with telemetry.waits.named("start", "the trainer to load the model"):
            ready: TrainerReady = await trainer.open()
        async with telemetry.waits.named("start", "the engine to make room for it"):
            await starting.finish(ready.manifests, sum(map(bool, trained_in(config))))
        check_needs(engine.capabilities, config)
        same_arithmetic = check_parity(engine.capabilities, ready.arithmetic, config)
        ending = ending.pop_all()
        undo.pop_all()
    shadow = Shadowing(ready.shadow, transports[1]) if ready.shadow else None
    return Pools(
        trainer=trainer,
        engine=engine,
        launcher=launcher,
        transports=transports,
        trainer_dtype=ready.dtype,
        same_arithmetic=same_arithmetic,
        shadow=shadow,
        turns=Turns(devices_of(config, engine, trainer, telemetry)),
        ending=ending,
    )


def devices_of(
    config: RunConfig, engine: Engine, trainer: ProcessTrainer, telemetry: Telemetry
) -> SharedDevices | None:
    """The devices that engine and trainer share, or that the trainer lends; None if each has its own."""
    place = config.orchestration
    if place.lend:
        assert isinstance(engine, Fleet), "an engine on lent devices is a member of one"
        lent = engine.on_lent_devices(place.give_way)
        return SharedDevices(lent, trainer, keep=False, telemetry=telemetry, lent=True)
    if place.placement != "shared":
        return None
    assert isinstance(engine, ProcessEngine), "`check` refuses all others"
    return SharedDevices(engine, trainer, keep=place.kv == "host", telemetry=telemetry)


def trainer_start(
    config: RunConfig,
    model_dir: Path,
    restore: Mapping[str, Path],
    transport: TransportKind,
    shadow: TransportKind | None = None,
) -> TrainerStart:
    """`restore`: as in `open_pools`; `shadow`: the transport of the student's older self, if that is a teacher."""
    threads = threads_of_rank(config) if ranks_of(config) else config.train.threads
    return TrainerStart(
        model_dir=str(model_dir),
        train=dataclasses.asdict(dataclasses.replace(config.train, threads=threads)),
        algo=algo_settings(config),
        seed=config.seed,
        serving_dtype=config.engine.serving_dtype,
        keep_routing=config.rollout.keep_routing,
        transport=transport,
        restore={name: str(checkpoint.absolute()) for name, checkpoint in restore.items()},
        shadow=shadow_of(config, shadow) if shadow else None,
        adapters={name: _assignment(run) for name, run in trained_in(config).items() if run.lora.rank},
        ranks=config.train.parallel.ranks,
    )


def trained_in(config: RunConfig) -> dict[str, RunConfig]:
    """The config of everything that is trained, by its name in trainer and engine. Full weights have the empty name."""
    if config.adapters:
        return {run.name: run for run in adapter_runs(config)}
    return {config.lora.served_name: config}


def algo_settings(config: RunConfig) -> dict[str, Any]:
    return dataclasses.asdict(config.algo.with_length(config.rollout.max_tokens))


def _assignment(config: RunConfig) -> AdapterStart:
    return AdapterStart(dataclasses.asdict(config.train), algo_settings(config), dataclasses.asdict(config.lora))
