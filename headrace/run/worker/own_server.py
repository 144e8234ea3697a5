"""The server of an engine, started on the machine that uses it: the run's own, a rollout host's, or that of a worker elsewhere.

It imports no `RunConfig`: a worker is told what the run's server needs (`ServerNeeds`) in its start message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.core.weights import Manifest
from headrace.engine.config import EngineConfig
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.remote_engine import RemoteEngine
from headrace.engine.remote.server_kind import Described, Place, server_kind
from headrace.engine.remote.sleeping_server import SleepingServer
from headrace.engine.servers.installed import require
from headrace.engine.servers.server_process import Command, ServerProcess, command
from headrace.facts.telemetry import Telemetry
from headrace.run.rehearsal.memory_needs import read_shape
from headrace.run.worker.worker_messages import ServerNeeds
from headrace.weight_sync.files import CarriedWeights
from headrace.weight_sync.transport import AnyTransport


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The things around a server's engine, on the machine that uses it."""

    model_dir: Path
    transport: AnyTransport
    logs: Path
    """The directory for what the server prints."""
    telemetry: Telemetry
    kept: str = ""
    """The place of what it prints, for people (`ServerProcess`)."""
    sleeps: bool = False
    """Whether engine and trainer take turns on one device."""
    keeps_base: bool = False
    """Whether the base model never changes (`SleepingServer`)."""


def server_process(settings: EngineConfig, needs: ServerNeeds, around: Surroundings, name: str = "") -> ServerProcess:
    """Returns the process of a server that is not started yet. `name`: that of a member of a fleet. Raises ConfigError if its interpreter lacks what it
    needs."""
    kind, transport = server_kind(settings.kind), around.transport
    own_part = kind.fetches and not transport.writes_files
    opening = transport.access == {"memory": "cuda"}
    found = require(settings.kind, settings.python, own_part)
    experts = read_shape(around.model_dir).experts
    if problem := kind.cannot_serve(found, experts, sleeping=around.sleeps, opening=opening):
        raise ConfigError(problem)

    def make(port: int, token: str, token_file: Path) -> Command:
        place = Place(
            model=around.model_dir,
            port=port,
            token=token,
            token_file=token_file,
            adapters=needs.adapters,
            rank=needs.rank,
            adapted=needs.adapted,
            fetches=own_part,
            sleeps=around.sleeps,
        )
        return command(settings, found, place)

    return ServerProcess(settings.kind, name, around.logs, make, kept=around.kept)


@dataclass(frozen=True)
class EngineOverServer:
    """The engine over a server, and what brings weights to it."""

    engine: RemoteEngine
    carrier: CarriedWeights | None

    def prepare(self, manifests: Mapping[str, Manifest]) -> None:
        """Called with the layouts of all weights that will be published, before the first of them."""
        if self.carrier:
            self.carrier.open(manifests)


def engine_over(
    settings: EngineConfig,
    needs: ServerNeeds,
    around: Surroundings,
    *,
    connection: Connection,
    host: ServerProcess | None,
    patience: float,
) -> EngineOverServer:
    """`host`: the process of a server that is started here; None for one that is running. Where the server can only read files and the transport
    brings bytes, they are written into some on this machine."""
    kind, transport = server_kind(settings.kind), around.transport
    reads_here = kind.fetches or transport.writes_files
    carrier = None if reads_here else CarriedWeights(transport, kind.copies_tied)
    make: Callable[..., RemoteEngine] = RemoteEngine
    if around.sleeps:
        make = functools.partial(SleepingServer, keeps_base=around.keeps_base)
    engine = make(
        connection,
        kind.dialect(Described(around.model_dir, needs.check_every, transport.access)),
        patience=patience,
        max_deaths=settings.max_deaths,
        telemetry=around.telemetry,
        host=host,
        carrier=carrier,
    )
    return EngineOverServer(engine, carrier)
