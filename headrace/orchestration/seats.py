"""The seats of a run's engines that are taken from elsewhere (`orchestration.kind = "join"`)."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.config import RunConfig
from headrace.errors import ConfigError
from headrace.observe.telemetry import Telemetry
from headrace.orchestration.fleets.core_shares import members_of
from headrace.orchestration.workers.joining.joined import JoinLauncher
from headrace.orchestration.workers.joining.listener import Listener
from headrace.orchestration.workers.joining.same_model import terms_of
from headrace.protocols import Launcher
from headrace.settings.process_config import LOCAL_HOSTS, OrchestrationConfig
from headrace.settings.secrets import read_token
from headrace.web.tls import server_context


def secrets_of(config: OrchestrationConfig) -> tuple[str, ssl.SSLContext | None]:
    """Returns the token, and the context of TLS if there is one. Raises ConfigError for files that cannot be used."""
    token = read_token(Path(config.token_file), "orchestration.token_file")
    if len(token) < 16:
        raise ConfigError(
            f"orchestration.token_file {config.token_file} holds a token that could be guessed; use at least 16 random characters "
            f"(openssl rand -hex 32 > {config.token_file})"
        )
    return token, server_context(Path(config.cert), Path(config.key)) if config.cert else None


@asynccontextmanager
async def open_seats(
    config: RunConfig, model_dir: Path, local: Launcher, telemetry: Telemetry
) -> AsyncIterator[Launcher]:
    """The launcher of the run's engines: `local`, or one whose workers come from elsewhere. Raises ConfigError if it cannot listen there."""
    place = config.orchestration
    if not place.joins:
        yield local
        return
    token, tls = secrets_of(place)
    terms = terms_of(config.model.path, model_dir)
    listener = Listener(token, place.host, place.port, terms=terms, tls=tls, say=telemetry.warn)
    try:
        await listener.open()
    except OSError as error:
        raise ConfigError(
            f"orchestration.listen = {place.listen}: {error.strerror or error}; choose another port, or an address of this machine"
        ) from None
    if not tls and place.host not in LOCAL_HOSTS:
        telemetry.warn(
            f"workers connect to {listener.address} without TLS: whoever can read the network between the machines can read the token; use a "
            "private network, or set orchestration.cert and orchestration.key"
        )
    telemetry.warn(_invitation(config, listener.address))
    try:
        yield JoinLauncher(listener, telemetry)
    finally:
        await listener.close()
        if listener.turned_away:
            counts = ", ".join(f"{reason} {count}" for reason, count in sorted(listener.turned_away.items()))
            telemetry.warn(f"connections that were turned away at {listener.address}: {counts}")


def _invitation(config: RunConfig, address: str) -> str:
    names = ", ".join(f"engine {name}".rstrip() for name in members_of(config.engine))
    ca = " --ca CERTIFICATE" if config.orchestration.cert else ""
    return (
        f"missing until they join: {names}. Start each with: headrace worker --connect {address} --token-file "
        f"{config.orchestration.token_file} --offers engine{ca}"
    )
