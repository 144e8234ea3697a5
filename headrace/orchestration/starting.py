"""The run's engine, whatever it is: how weights reach it, and how it is brought up beside the trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config import RunConfig
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.dialect import Dialect
from headrace.engine.remote.headrace import HeadraceDialect
from headrace.engine.remote.remote_engine import RemoteEngine, check_state
from headrace.engine.remote.vllm import VllmDialect
from headrace.engine.remote.vllm_facts import open_routes
from headrace.errors import ConfigError
from headrace.observe.telemetry import Telemetry
from headrace.orchestration.clients.process_engine import ProcessEngine
from headrace.orchestration.workers.build import open_files, open_transport
from headrace.orchestration.workers.messages import EngineStart
from headrace.protocols import Engine, Job, Launcher, Transport
from headrace.settings.secrets import read_token
from headrace.weights import Manifest

DIALECTS: dict[str, Callable[[], Dialect]] = {"headrace": HeadraceDialect, "vllm": VllmDialect}
"""By `engine.kind`."""


@dataclass(frozen=True)
class Starting:
    """An engine that is not up yet."""

    engine: Engine
    launch: Callable[[], Awaitable[None]]
    """What can be done beside the trainer's start. Raises ConfigError for a server that does not go with the run."""
    finish: Callable[[Mapping[str, Manifest], int], Awaitable[None]]
    """With the layout of all that will be published, and the number of adapters."""


def transport_of(config: RunConfig, logs: Path) -> Transport:
    """How weights reach the run's own engine. `logs`: the run's directory for them, beside which files may travel."""
    if not config.engine.is_server:
        return open_transport()
    shared = config.engine.shared_dir
    if shared and not Path(shared).is_dir():
        raise ConfigError(f"engine.shared_dir = {shared} is no directory here; make it, or leave it out")
    return open_files((Path(shared) if shared else logs.absolute()) / f"{config.name}-weights")


def start_engine(
    config: RunConfig,
    *,
    model_dir: Path,
    launcher: Launcher,
    transport: Transport,
    telemetry: Telemetry,
) -> Starting:
    if config.engine.is_server:
        return _server(config, telemetry)
    job = Job("engine", "engine", config.engine.cores, transport.inherited)
    engine = ProcessEngine(launcher, job, config.engine.max_deaths, telemetry)

    async def finish(manifests: Mapping[str, Manifest], adapters: int) -> None:
        await engine.open(EngineStart(str(model_dir), _engine_settings(config, adapters), dict(manifests), transport))

    return Starting(engine, engine.launch, finish)


def _engine_settings(config: RunConfig, adapters: int) -> dict[str, Any]:
    """What the run needs is switched on in the engine, which refuses at its start what it cannot do."""
    routing = config.engine.routing or config.rollout.keep_routing
    room = max(config.engine.max_adapters, adapters)
    return dataclasses.asdict(dataclasses.replace(config.engine, routing=routing, max_adapters=room))


def _server(config: RunConfig, telemetry: Telemetry) -> Starting:
    settings, (url,) = config.engine, config.engine.urls
    token = read_token(Path(settings.token_file), "engine.token_file") if settings.token_file else ""
    engine = RemoteEngine(
        Connection(url, token),
        DIALECTS[settings.kind](),
        patience=settings.patience,
        max_deaths=settings.max_deaths,
        telemetry=telemetry,
    )

    async def launch() -> None:
        if settings.kind == "vllm" and (warning := open_routes(url)):
            telemetry.warn(warning)
        check_state(await engine.open(), settings.serving_dtype, settings.context_length, url)

    async def finish(manifests: Mapping[str, Manifest], adapters: int) -> None:
        """The layout comes with the files, and what the server can do is its own business."""

    return Starting(engine, launch, finish)
