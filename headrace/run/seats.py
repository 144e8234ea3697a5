"""The seats of a run that are taken from elsewhere, by workers that join or that Ray places: of its engines and its trainer's ranks
(`orchestration.kind`), and of those who run the user's code (`user_sites.py`)."""

from __future__ import annotations

import secrets
import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from headrace.core.errors import ConfigError
from headrace.core.protocols import Launcher
from headrace.facts.telemetry import Telemetry
from headrace.native.cores import usable_cores
from headrace.processes.joining.greeting import Kind, Terms
from headrace.processes.joining.joined import JoinLauncher
from headrace.processes.joining.listener import Listener
from headrace.processes.joining.same_model import terms_of
from headrace.processes.placed.cluster import Cluster, NodeShare
from headrace.processes.placed.placed import PlacedLauncher
from headrace.run.config import RunConfig
from headrace.run.fleets.core_shares import members_of
from headrace.run.user_sites import terms_of_code
from headrace.run.worker.build import open_cluster
from headrace.settings.extras import install, is_installed
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


def check_seats(config: OrchestrationConfig) -> None:
    """Raises ConfigError for what a run can know before it listens anywhere."""
    if config.joined:
        secrets_of(config)
    if config.kind == "ray" and not is_installed("ray"):
        raise ConfigError(f'orchestration.kind = "ray" needs Ray, which is not installed: {install("ray")}')


class Seats(NamedTuple):
    engines: Launcher
    trainer: Launcher
    hosts: Launcher
    """Those of user hosts."""


def local_cores(config: RunConfig) -> list[tuple[int, ...]]:
    """Returns the cores of each kind of worker that this process starts: of the engine, of the trainer."""
    engine = not (config.engine.is_server or config.orchestration.elsewhere or config.orchestration.bus)
    own = [config.engine.cores] * engine + [config.train.cores] * config.orchestration.trains_here
    return [tuple(cores) for cores in own]


def threads_elsewhere(config: RunConfig) -> int:
    """Returns the threads of an engine on another machine. 0: as many as that has cores."""
    if config.orchestration.kind == "ray":  # the CPUs of its bundle
        return config.engine.threads or usable_cores()
    return 0 if "engine.threads" in config.chosen.wishes else config.engine.threads


def threads_of_rank(config: RunConfig) -> int:
    """Returns the threads of a rank on another machine. 0: as many as that has cores for each of its ranks."""
    own = 0 if "train.threads" in config.chosen.wishes else config.train.threads
    if own or config.orchestration.kind != "ray":
        return own
    return max(1, usable_cores() // config.train.parallel.ranks)  # the CPUs of its bundle


def ranks_of(config: RunConfig) -> list[str]:
    """Returns the seats of the trainer that are taken from elsewhere."""
    ranks = config.train.parallel.ranks
    if config.orchestration.trains_here:
        return []
    return ["trainer"] if ranks == 1 else [f"trainer rank {rank}" for rank in range(ranks)]


@asynccontextmanager
async def open_seats(
    config: RunConfig, model_dir: Path, local: Launcher, logs: Path, telemetry: Telemetry
) -> AsyncIterator[Seats]:
    """The launchers of the run's workers: `local`, or such whose workers come from elsewhere. Raises ConfigError if it cannot listen there, or if
    no cluster can place them."""
    place = config.orchestration
    if not place.elsewhere and not place.hosts:
        yield Seats(local, local, local)
        return
    check_seats(place)
    terms = terms_of(config.model.path, model_dir)
    opened = _joining(config, terms, logs, telemetry) if place.joined else _placed(config, terms, logs, telemetry)
    async with opened as seats:
        yield seats._replace(
            engines=seats.engines if place.elsewhere else local, trainer=seats.trainer if ranks_of(config) else local
        )


@asynccontextmanager
async def _joining(config: RunConfig, terms: Terms, logs: Path, telemetry: Telemetry) -> AsyncIterator[Seats]:
    place = config.orchestration
    token, tls = secrets_of(place)
    opening = Listener(
        token,
        place.host,
        place.port,
        terms=terms,
        kinds=list(seats_of(config)),
        code=terms_of_code(config),
        tls=tls,
        reconnect=place.reconnect,
        say=telemetry.warn,
    )
    async with _listening(place, opening, telemetry) as listener:
        if not tls and place.host not in LOCAL_HOSTS:
            telemetry.warn(
                f"workers connect to {listener.address} without TLS: whoever can read the network between the machines can read the token; use "
                "a private network, or set orchestration.cert and orchestration.key"
            )
        telemetry.warn(invitation(config, listener.address))
        launcher = JoinLauncher(listener, telemetry, away=place.reconnect, logs=logs)
        yield Seats(launcher, launcher, launcher)


@asynccontextmanager
async def _placed(config: RunConfig, terms: Terms, logs: Path, telemetry: Telemetry) -> AsyncIterator[Seats]:
    place = config.orchestration
    cluster = open_cluster(place.address)
    listener = Listener(secrets.token_hex(16), place.host, place.port, say=telemetry.warn)
    async with _listening(place, listener, telemetry), aclosing(cluster):
        await cluster.open()
        if problem := await reach_problem(place, cluster):
            raise ConfigError(problem)

        def launcher(bundle: NodeShare) -> PlacedLauncher:
            return PlacedLauncher(cluster, listener, bundle=bundle, terms=terms, logs=logs, telemetry=telemetry)

        engines = launcher(NodeShare(threads_elsewhere(config), place.gpus))
        ranks = launcher(NodeShare(threads_of_rank(config), place.rank_gpus))
        await ranks.open(ranks_of(config))  # they wait for each other, so that they are placed first
        await engines.open(_engines_of(config))
        yield Seats(engines, ranks, engines)


async def reach_problem(config: OrchestrationConfig, cluster: Cluster) -> str:
    """Returns why nodes of the cluster cannot reach the run; empty if they may be able to."""
    ours = await cluster.own_address()
    others = {node.address for node in await cluster.nodes()} - {ours}
    if not others or config.host not in LOCAL_HOSTS:
        return ""
    return (
        f"the cluster has nodes on other machines ({', '.join(sorted(others))}), which cannot reach orchestration.listen = {config.listen}; set "
        f'it to an address of this machine on their network, such as "{ours}:0"'
    )


@asynccontextmanager
async def _listening(config: OrchestrationConfig, listener: Listener, telemetry: Telemetry) -> AsyncIterator[Listener]:
    try:
        await listener.open()
    except OSError as error:
        raise ConfigError(
            f"orchestration.listen = {config.listen}: {error.strerror or error}; choose another port, or an address of this machine"
        ) from None
    try:
        yield listener
    finally:
        await listener.close()
        if listener.turned_away:
            counts = ", ".join(f"{reason} {count}" for reason, count in sorted(listener.turned_away.items()))
            telemetry.warn(f"connections that were turned away at {listener.address}: {counts}")


def _engines_of(config: RunConfig) -> list[str]:
    return [f"engine {name}".rstrip() for name in members_of(config.engine)]


def seats_of(config: RunConfig) -> dict[Kind, list[str]]:
    """Returns the names of the seats that are taken from elsewhere, by what their workers offer."""
    engines = _engines_of(config) if config.orchestration.elsewhere else []
    seats: dict[Kind, list[str]] = {"engine": engines, "trainer": ranks_of(config)}
    seats |= {kind: list(names) for kind, names in config.orchestration.hosts.items()}
    return {kind: names for kind, names in seats.items() if names}


def invitation(config: RunConfig, address: str) -> str:
    seats = seats_of(config)
    ca = " --ca CERTIFICATE" if config.orchestration.cert else ""
    offers = ", or ".join("trainer and --again for a rank" if kind == "trainer" else kind for kind in seats)
    return (
        f"missing until they join: {', '.join(name for names in seats.values() for name in names)}. Start each with: headrace worker --connect "
        f"{address} --token-file {config.orchestration.token_file} --offers {offers}{ca}"
    )
