"""The seats of a run that are taken from elsewhere, by workers that join or that Ray places: of its engines and its trainer's ranks
(`orchestration.kind`), and of those who run the user's code (`seats.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.core.protocols import Job, Launcher
from headrace.engine.config import EngineConfig
from headrace.episodes.environments.function import function_settings
from headrace.facts.telemetry import Telemetry
from headrace.native.resources import usable_cores
from headrace.processes.asked_process import HERE, OwnSite, Site, Sites
from headrace.processes.joining.greeting import USER_CODE, Kind, Terms
from headrace.processes.joining.joined import Seats, SeatsWanted, Team
from headrace.processes.joining.same_model import changed_code, code_terms, terms_of
from headrace.processes.orchestration_config import OrchestrationConfig
from headrace.run.clients.hosted_site import HostedSite
from headrace.run.config import RunConfig
from headrace.run.fleets.core_shares import members_of
from headrace.run.hosts.user_host import RewardsLoaded, UserHostStart
from headrace.settings.process_config import ChosenConfig
from headrace.trainer.config import TrainConfig
from headrace.trainer.parallel import ParallelConfig

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


def own_sites(files: Mapping[str, Iterable[str]]) -> UserSites:
    """This machine alone. It starts no process once the user's `files` (`RunConfig.code_files`) are others: that would compute something else than
    those before it. Raises ConfigError for a file that cannot be read."""
    scorers, environments = (Sites([_here(files[kind])]) for kind in USER_CODE)
    return UserSites(scorers, environments)


def _here(files: Iterable[str]) -> OwnSite:
    return OwnSite(partial(changed_code, code_terms(files)))


def user_sites(place: OrchestrationConfig, telemetry: Telemetry, files: Mapping[str, Iterable[str]]) -> UserSites:
    """The machines of a run. Those elsewhere are up after `open`. `files`: as for `own_sites`, and it raises what that does."""
    alone = own_sites(files)
    hosts: list[tuple[Kind, HostedSite]] = []
    sites: dict[Kind, Sites] = {"scorer": alone.scorers, "environment": alone.environments}
    for kind, names in place.hosts.items():
        there = [HostedSite(Job(kind, name), telemetry) for name in names]
        hosts += [(kind, site) for site in there]
        sites[kind] = _sites(kind, there, sites[kind].every if place.also_here else (), telemetry)
    return UserSites(sites["scorer"], sites["environment"], hosts)


def _sites(kind: Kind, hosts: Sequence[HostedSite], own: Sequence[Site], telemetry: Telemetry) -> Sites:
    turned = asyncio.Event()

    async def until_up() -> None:
        async with telemetry.waits.named("the user's code", f"a worker that offers {kind}"):
            while not any(host.up for host in hosts):
                turned.clear()
                await turned.wait()

    sites = Sites([*hosts, *own], until_up)
    sites.listen(turned.set)
    for host in hosts:
        host.changed = sites.changed
    return sites


def terms_of_code(config: RunConfig) -> dict[Kind, Terms]:
    """The user's files that workers must have, by what they offer. Raises ConfigError for one that cannot be read."""
    return {kind: code_terms(config.code_files[kind]) for kind in USER_CODE if kind in config.orchestration.hosts}


def start_of(config: RunConfig, kind: Kind) -> UserHostStart:
    code = terms_of_code(config)[kind]
    if kind == "scorer":
        loads = [
            RewardsLoaded(tuple(spec.function for spec in run.reward.specs), run.sandbox.settings.as_text())
            for run in config.runs
            if run.reward.specs
        ]
        return UserHostStart(code=code, rewards=tuple(loads))
    settings = [function_settings(run.environment, run.sandbox.settings) for run in config.runs]
    return UserHostStart(code=code, environments=tuple(settings))


# --- seats ------------------------------------------------------------


def check_seats(config: OrchestrationConfig) -> None:
    """Raises ConfigError for what a run can know before it listens anywhere."""
    if config.takes_workers:
        config.seating.check(config)


def local_cores(place: OrchestrationConfig, engine: EngineConfig, train: TrainConfig) -> list[tuple[int, ...]]:
    """Returns the cores of each kind of worker that this process starts: of the engine, of the trainer."""
    starts_engine = not (engine.is_server or place.elsewhere or place.bus)
    own = [engine.cores] * starts_engine + [train.cores] * place.trains_here
    return [tuple(cores) for cores in own]


def threads_elsewhere(place: OrchestrationConfig, engine: EngineConfig, chosen: ChosenConfig) -> int:
    """Returns the threads of an engine on another machine. 0: as many as that has cores."""
    if place.place.reserves_cores:
        return engine.threads or usable_cores()
    return 0 if "engine.threads" in chosen.wishes else engine.threads


def threads_of_rank(place: OrchestrationConfig, train: TrainConfig, chosen: ChosenConfig) -> int:
    """Returns the threads of a rank on another machine. 0: as many as that has cores for each of its ranks."""
    own = 0 if "train.threads" in chosen.wishes else train.threads
    if own or not place.place.reserves_cores:
        return own
    return max(1, usable_cores() // train.parallel.ranks)


def team_of(parallel: ParallelConfig) -> Team:
    """Returns the neighbouring ranks that exchange much for every layer (`process_trainer.apart` refuses or warns of machines between them)."""
    if parallel.tensor > 1:
        return Team(parallel.tensor)
    return Team(max(parallel.context, parallel.expert), must=False)


def ranks_of(place: OrchestrationConfig, train: TrainConfig) -> list[str]:
    """Returns the seats of the trainer that are taken from elsewhere."""
    ranks = train.parallel.ranks
    if place.trains_here:
        return []
    return ["trainer"] if ranks == 1 else [f"trainer rank {rank}" for rank in range(ranks)]


@asynccontextmanager
async def open_seats(
    config: RunConfig, model_dir: Path, local: Launcher, logs: Path, telemetry: Telemetry
) -> AsyncIterator[Seats]:
    """The launchers of the run's workers: `local`, or such whose workers come from elsewhere. Raises ConfigError if it cannot listen there, or if
    no cluster can place them."""
    place, engine, train = config.orchestration, config.engine, config.train
    if not place.takes_workers:
        yield Seats(local, local, local)
        return
    check_seats(place)
    wanted = SeatsWanted(
        settings=place,
        seats=seats_of(place, engine, train),
        team=team_of(train.parallel),
        threads={
            "engine": threads_elsewhere(place, engine, config.chosen),
            "trainer": threads_of_rank(place, train, config.chosen),
        },
        terms=terms_of(config.model.path, model_dir),
        code=terms_of_code(config),
        logs=logs,
        telemetry=telemetry,
    )
    async with place.seating.open(wanted) as seats:
        yield seats._replace(
            engines=seats.engines if place.elsewhere else local,
            trainer=seats.trainer if ranks_of(place, train) else local,
        )


def seats_of(place: OrchestrationConfig, engine: EngineConfig, train: TrainConfig) -> dict[Kind, list[str]]:
    """Returns the names of the seats that are taken from elsewhere, by what their workers offer."""
    engines = [f"engine {name}".rstrip() for name in members_of(engine)] if place.elsewhere else []
    seats: dict[Kind, list[str]] = {"engine": engines, "trainer": ranks_of(place, train)}
    seats |= {kind: list(names) for kind, names in place.hosts.items()}
    return {kind: names for kind, names in seats.items() if names}
