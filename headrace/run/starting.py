"""The start of the run's engine, of any kind, in parallel with the trainer's, and its transport of weights."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.core.protocols import Job, Launcher
from headrace.core.weights import Manifest
from headrace.durable.atomic_files import kept_id, replace_file
from headrace.engine.config import EngineConfig
from headrace.engine.fleet.member import MemberEngine
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.outages import SILENT
from headrace.engine.remote.remote_engine import check_state
from headrace.engine.remote.server_kind import open_control, server_kind
from headrace.facts.telemetry import Telemetry
from headrace.loop.own_groups import Suspects
from headrace.processes.joining.same_model import digests, terms_of
from headrace.processes.orchestration_config import OrchestrationConfig
from headrace.run.clients.bus_engine import BusEngine
from headrace.run.clients.process_engine import LentProcess, ProcessEngine
from headrace.run.config import RunConfig
from headrace.run.fleets.core_shares import settings_of_lent
from headrace.run.fleets.fleet_start import LENT, Starting, come, start_fleet
from headrace.run.hosts.bus.bus_port import Bus
from headrace.run.hosts.bus.open_bus import open_for_run
from headrace.run.hosts.bus_messages import GroupSizes, RunNotice
from headrace.run.rehearsal.memory_needs import read_shape
from headrace.run.resume_rules import contents_of, mark_of, meaning
from headrace.run.seats import threads_elsewhere
from headrace.run.worker.own_server import Surroundings, engine_over, server_process
from headrace.run.worker.worker_messages import EngineStart, ServerNeeds
from headrace.settings.secrets import read_token
from headrace.version import __version__
from headrace.web.tls import TlsIdentity, first_certificate
from headrace.weight_sync.config import WeightSyncConfig, reached_at
from headrace.weight_sync.kind import Opening, TransportKind


def transport_of(config: RunConfig, logs: Path) -> TransportKind:
    """Returns the transport of weights to the run's own engine. `logs`: the run's log directory, beside which files may lie."""
    transport = config.way.transport
    place: OrchestrationConfig | WeightSyncConfig = config.orchestration
    place = place if place.cert else config.weight_sync
    shared = config.engine.shared_dir
    if transport.writes_files and shared and not Path(shared).is_dir():
        raise ConfigError(f"engine.shared_dir = {shared} is not a directory here; make it, or leave it out")
    opening = Opening(
        form=config.weight_sync.form,
        host=reached_at(config.weight_sync, config.ends),
        tls=TlsIdentity(first_certificate(Path(place.cert)), place.cert, place.key)
        if place.cert and transport.encrypts
        else None,
        directory=_files_of(config.name, shared, logs),
        repeat_tied=config.engine.is_server and server_kind(config.engine.kind).copies_tied,
    )
    return transport.open(opening)


def _files_of(name: str, shared: str, logs: Path) -> Path:
    """Returns the directory of a run's weights. Others that share `shared` may have its name: another run, or an evaluation of this one."""
    if not shared:
        return logs.absolute() / f"{name}-weights"
    return Path(shared) / f"{name}-{kept_id(logs / 'shared_weights')}-weights"


def start_engine(
    config: RunConfig,
    *,
    model_dir: Path,
    launcher: Launcher,
    transport: TransportKind,
    logs: Path,
    telemetry: Telemetry,
    here: Launcher | None = None,
) -> Starting:
    """The engines of a run without a bus. `launcher`: of the engines, wherever they are; `here`: of this machine, if that is another. `logs`: the directory
    for what processes print."""
    suspects, routing = Suspects(config.engine.ticket_deaths), config.rollout.keep_routing

    def start(engine_config: EngineConfig, name: str, member_telemetry: Telemetry) -> Starting[MemberEngine]:
        if elsewhere := config.orchestration.elsewhere:  # its machine has cores of its own, which members do not share
            threads = threads_elsewhere(config.orchestration, config.engine, config.chosen)
            engine_config = dataclasses.replace(engine_config, threads=threads)
        if engine_config.is_server and not elsewhere:
            member = dataclasses.replace(config, engine=engine_config)
            return _server(
                member, name, model_dir=model_dir, transport=transport, logs=logs, telemetry=member_telemetry
            )
        who = f"engine {name}".rstrip()
        engine = functools.partial(ProcessEngine, launcher, telemetry=member_telemetry, suspects=suspects)
        asleep = config.orchestration.placement == "shared"
        return _process(
            engine_config,
            who,
            engine,
            model_dir=model_dir,
            transport=transport,
            asleep=asleep,
            routing=routing,
            server=needs_of_server(config, model_dir) if engine_config.is_server else None,
        )

    def start_lent(member_telemetry: Telemetry) -> Starting[MemberEngine]:
        own = settings_of_lent(config.engine, config.train)
        engine = functools.partial(LentProcess, here or launcher, telemetry=member_telemetry, suspects=suspects)
        return _process(
            own, f"engine {LENT}", engine, model_dir=model_dir, transport=transport, asleep=True, routing=routing
        )

    lent = start_lent if config.orchestration.lend else None
    if not config.engine.is_fleet and not lent:
        return start(config.engine, "", telemetry)
    return start_fleet(config.engine, logs.parent, start, telemetry, lent)


SILENT_BUS = "the bus does not answer"
"""The key of the warning about it."""


def engine_on_bus(
    config: RunConfig, model_dir: Path, transport: TransportKind, run_dir: Path, telemetry: Telemetry
) -> Starting[BusEngine] | None:
    """Returns the engine that a run has behind its bus, which is not launched yet; None for a run without a bus."""
    place = config.orchestration
    if not place.bus:
        return None

    async def opened() -> tuple[Bus, str]:
        return await open_for_run(
            place.bus,
            name_on_bus(run_dir, config.name),
            password=read_token(Path(place.token_file), "orchestration.token_file") if place.token_file else "",
            forgets=place.bus_forgets,
            say=functools.partial(telemetry.warn, key=SILENT_BUS),
            again=lambda message: telemetry.withdraw(SILENT_BUS),
        )

    sizes, suspects = GroupSizes(config.rollout.group_size, config.eval.samples), Suspects(config.engine.ticket_deaths)
    engine = BusEngine(place.bus, opened, config.lora.served_name, telemetry, sizes=sizes, suspects=suspects)

    async def finish(manifests: Mapping[str, Manifest], adapters: int) -> None:
        terms = terms_of(config.model.path, model_dir)
        contents = await asyncio.to_thread(contents_of, config)
        with_sets = await asyncio.to_thread(contents_of, config, of_sets=True)
        notice = RunNotice(
            session="",
            version=__version__,
            config=dataclasses.asdict(config),
            model=terms.model,
            files=terms.files,
            manifests=dict(manifests),
            transport=transport,
            adapters=adapters,
            adapter=config.lora.served_name,
            mark=mark_of(meaning(config, contents)),
            contents=with_sets,
        )
        await engine.open(notice)

    return Starting(engine, engine.launch, finish)


def name_on_bus(run_dir: Path, name: str) -> str:
    """The name of a run on its bus: its own, and digits that no other run has. A resumed run has the same, and so has one whose directory was
    moved. A copy of the directory is another run: its tickets have the same numbers, and answers to one must not be trained by the other."""
    path, directory = run_dir / "bus_name", str(run_dir.stat().st_ino)
    written = path.read_text().split() if path.is_file() else []
    if written[1:] != [directory]:
        written = [f"{name}-{secrets.token_hex(4)}", directory]
        replace_file(path, "\n".join(written).encode())
    return written[0]


def _process(
    config: EngineConfig,
    who: str,
    make: Callable[[Job, int], ProcessEngine],
    *,
    model_dir: Path,
    transport: TransportKind,
    asleep: bool,
    routing: bool,
    server: ServerNeeds | None = None,
) -> Starting[MemberEngine]:
    """`routing`: whether the run keeps the experts that the engine chose. `server`: what the server needs that the worker starts, if it is one."""
    engine = make(Job("engine", who, config.cores, transport.inherited), config.max_deaths)

    async def finish(manifests: Mapping[str, Manifest], adapters: int) -> None:
        """Switches on all that the run needs. The engine refuses at its start what it cannot do."""
        room = max(config.max_adapters, adapters)
        settings = dataclasses.replace(config, routing=config.routing or routing, max_adapters=room)
        files = await asyncio.to_thread(digests, model_dir)
        own = dataclasses.asdict(settings)
        start = EngineStart(str(model_dir), own, dict(manifests), transport, asleep=asleep, files=files, server=server)
        await engine.open(start)

    return Starting(engine, engine.launch, finish)


def needs_of_server(config: RunConfig, model_dir: Path) -> ServerNeeds:
    loras = [run.lora for run in config.runs]
    serves = max(config.engine.max_adapters, config.adapters_served) > 0
    adapted = set().union(*map(read_shape(model_dir).adapted, loras)) if serves else ()
    return ServerNeeds(
        adapters=int(config.adapters_served),
        rank=max(lora.rank for lora in loras),
        adapted=tuple(sorted(adapted)),
        check_every=config.watch.identity_every,
    )


def _server(
    config: RunConfig, name: str, *, model_dir: Path, transport: TransportKind, logs: Path, telemetry: Telemetry
) -> Starting[MemberEngine]:
    """`name`: that of a member of a fleet, which goes on without it for as long as others serve."""
    settings, needs = config.engine, needs_of_server(config, model_dir)
    around = Surroundings(
        model_dir=model_dir,
        transport=transport,
        logs=logs,
        telemetry=telemetry,
        sleeps=config.orchestration.placement == "shared",
        keeps_base=config.ends.adapters,
    )
    host = server_process(settings, needs, around, name) if settings.starts_server else None
    waits_alone = bool(name) and host is None  # one of its own is started anew
    if host:
        url, token = host.url, host.token
    else:
        (url,) = settings.urls
        token = read_token(Path(settings.token_file), "engine.token_file") if settings.token_file else ""
    patience = math.inf if waits_alone else settings.patience
    served = engine_over(settings, needs, around, connection=Connection(url, token), host=host, patience=patience)
    engine = served.engine

    async def launch() -> None:
        state = await come(engine.open(), url, settings.patience) if waits_alone else await engine.open()
        check_state(state, settings.serving_dtype, settings.context_length, url)
        await _warn_of_strangers(settings.kind, url, telemetry)

    async def finish(manifests: Mapping[str, Manifest], adapters: int) -> None:
        """The layout is in files, and a server that fetches asks for it."""
        served.prepare(manifests)

    return Starting(engine, launch, finish)


async def _warn_of_strangers(kind: str, url: str, telemetry: Telemetry) -> None:
    stranger = Connection(url)
    try:
        if warning := await open_control(kind, url, stranger, SILENT):
            telemetry.warn(warning)
    finally:
        await stranger.close()
