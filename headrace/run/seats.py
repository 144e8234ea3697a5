"""The seats of a run that are taken from elsewhere, by workers that join or that Ray places: of its engines and its trainer's ranks
(`orchestration.kind`), and of those who run the user's code (`seats.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.core.protocols import Job, Launcher
from headrace.episodes.environments.function import function_settings
from headrace.facts.telemetry import Telemetry
from headrace.native.resources import usable_cores
from headrace.processes.asked_process import HERE, OWN_SITE, Sites
from headrace.processes.joining.greeting import USER_CODE, Kind, Terms
from headrace.processes.joining.joined import Seats, SeatsWanted
from headrace.processes.joining.same_model import code_terms, terms_of
from headrace.processes.orchestration_config import OrchestrationConfig
from headrace.run.clients.hosted_site import HostedSite
from headrace.run.config import RunConfig
from headrace.run.fleets.core_shares import members_of
from headrace.run.hosts.user_host import RewardsLoaded, UserHostStart

# --- The machines on which a run's reward functions and environments run
# This one, and those of workers that join (`orchestration.scorers`, `orchestration.environments`).


@dataclass(frozen=True)
class UserSites:
    """The machines of each kind of code."""

    scorers: Sites = HERE
    environments: Sites = HERE
    hosts: Sequence[tuple[Kind, HostedSite]] = ()
    """Hosts elsewhere, by what they offer."""

    async def open(self, launcher: Launcher, config: RunConfig) -> None:
        """Returns when each has a worker. Raises StalledError and WorkerDied."""
        for kind, host in self.hosts:
            await host.open(launcher, start_of(config, kind))

    async def close(self) -> None:
        await asyncio.gather(*(host.close() for _, host in self.hosts))


ONLY_HERE = UserSites()


def user_sites(place: OrchestrationConfig, telemetry: Telemetry) -> UserSites:
    """The machines of a run. Those elsewhere are up after `open`."""
    hosts: list[tuple[Kind, HostedSite]] = []
    sites: dict[Kind, Sites] = {}
    for kind, names in place.hosts.items():
        own = [HostedSite(Job(kind, name), telemetry) for name in names]
        hosts += [(kind, site) for site in own]
        sites[kind] = _sites(kind, own, place.also_here, telemetry)
    return UserSites(sites.get("scorer", HERE), sites.get("environment", HERE), hosts)


def _sites(kind: Kind, hosts: Sequence[HostedSite], also_here: bool, telemetry: Telemetry) -> Sites:
    turned = asyncio.Event()

    async def until_up() -> None:
        async with telemetry.waits.named("the user's code", f"a worker that offers {kind}"):
            while not any(host.up for host in hosts):
                turned.clear()
                await turned.wait()

    sites = Sites([*hosts, *([OWN_SITE] if also_here else [])], until_up)
    sites.listen(turned.set)
    for host in hosts:
        host.changed = sites.changed
    return sites


def terms_of_code(config: RunConfig) -> dict[Kind, Terms]:
    """The user's files that workers must have, by what they offer. Raises ConfigError for one that cannot be read."""
    return {kind: code_terms(_files(config, kind)) for kind in USER_CODE if kind in config.orchestration.hosts}


def start_of(config: RunConfig, kind: Kind) -> UserHostStart:
    files = code_terms(_files(config, kind)).files
    if kind == "scorer":
        loads = [
            RewardsLoaded(tuple(spec.function for spec in run.reward.specs), run.sandbox.settings.as_text())
            for run in config.runs
            if run.reward.specs
        ]
        return UserHostStart(files=files, rewards=tuple(loads))
    settings = [function_settings(run.environment, run.sandbox.settings) for run in config.runs]
    return UserHostStart(files=files, environments=tuple(settings))


def _files(config: RunConfig, kind: Kind) -> Iterator[str]:
    """The paths of the files that the settings name."""
    for run in config.runs:
        named = [spec.function for spec in run.reward.specs]
        if kind == "environment":
            named = [run.environment.function or run.environment.name]
        for name in named:
            path = name if name.endswith(".py") else name.rpartition(":")[0]
            if path.endswith(".py"):
                yield path


# --- seats ------------------------------------------------------------


def check_seats(config: OrchestrationConfig) -> None:
    """Raises ConfigError for what a run can know before it listens anywhere."""
    if config.elsewhere or config.hosts:
        config.seating.check(config)


def local_cores(config: RunConfig) -> list[tuple[int, ...]]:
    """Returns the cores of each kind of worker that this process starts: of the engine, of the trainer."""
    engine = not (config.engine.is_server or config.orchestration.elsewhere or config.orchestration.bus)
    own = [config.engine.cores] * engine + [config.train.cores] * config.orchestration.trains_here
    return [tuple(cores) for cores in own]


def threads_elsewhere(config: RunConfig) -> int:
    """Returns the threads of an engine on another machine. 0: as many as that has cores."""
    if config.orchestration.place.reserves_cores:
        return config.engine.threads or usable_cores()
    return 0 if "engine.threads" in config.chosen.wishes else config.engine.threads


def threads_of_rank(config: RunConfig) -> int:
    """Returns the threads of a rank on another machine. 0: as many as that has cores for each of its ranks."""
    own = 0 if "train.threads" in config.chosen.wishes else config.train.threads
    if own or not config.orchestration.place.reserves_cores:
        return own
    return max(1, usable_cores() // config.train.parallel.ranks)


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
    wanted = SeatsWanted(
        settings=place,
        seats=seats_of(config),
        threads={"engine": threads_elsewhere(config), "trainer": threads_of_rank(config)},
        terms=terms_of(config.model.path, model_dir),
        code=terms_of_code(config),
        logs=logs,
        telemetry=telemetry,
    )
    async with place.seating.open(wanted) as seats:
        yield seats._replace(
            engines=seats.engines if place.elsewhere else local, trainer=seats.trainer if ranks_of(config) else local
        )


def _engines_of(config: RunConfig) -> list[str]:
    return [f"engine {name}".rstrip() for name in members_of(config.engine)]


def seats_of(config: RunConfig) -> dict[Kind, list[str]]:
    """Returns the names of the seats that are taken from elsewhere, by what their workers offer."""
    engines = _engines_of(config) if config.orchestration.elsewhere else []
    seats: dict[Kind, list[str]] = {"engine": engines, "trainer": ranks_of(config)}
    seats |= {kind: list(names) for kind, names in config.orchestration.hosts.items()}
    return {kind: names for kind, names in seats.items() if names}
