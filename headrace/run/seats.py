"""The seats of a run that are taken from elsewhere, by workers that join or that Ray places: of its engines and its trainer's ranks
(`orchestration.kind`), and of those who run the user's code (`user_sites.py`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.core.protocols import Launcher
from headrace.facts.telemetry import Telemetry
from headrace.native.resources import usable_cores
from headrace.processes.joining.greeting import Kind
from headrace.processes.joining.joined import Seats, SeatsWanted
from headrace.processes.joining.same_model import terms_of
from headrace.processes.orchestration_config import OrchestrationConfig
from headrace.run.config import RunConfig
from headrace.run.fleets.core_shares import members_of
from headrace.run.user_sites import terms_of_code


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
