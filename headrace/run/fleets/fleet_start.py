"""The start of a fleet: of all its members at once, and of one that is added later."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from headrace.core.errors import ConfigError, WorkerDied
from headrace.core.protocols import Engine
from headrace.core.weights import Manifest
from headrace.engine.config import EngineConfig
from headrace.engine.fleet.fleet import Fleet, in_common
from headrace.engine.fleet.member import MemberEngine
from headrace.engine.fleet.rotation import FleetPatience
from headrace.facts.facts import EngineSample, Fact
from headrace.facts.telemetry import Telemetry
from headrace.run.fleets import pool_door
from headrace.run.fleets.core_shares import members_of
from headrace.run.fleets.pool_door import PoolDoor

LENT = "lent"
"""The name of the member on the trainer's devices."""

E = TypeVar("E", bound=Engine, covariant=True)
T = TypeVar("T")

QUESTIONS = 100
"""Members that are asked for their statistics in one second. Each question and its answer take the controller about 0.2 ms."""


@dataclass(frozen=True)
class Starting(Generic[E]):
    """An engine that is not up yet."""

    engine: E
    launch: Callable[[], Awaitable[None]]
    """The part of the start that can run beside the trainer's. Raises ConfigError for a server that does not fit the run."""
    finish: Callable[[Mapping[str, Manifest], int], Awaitable[None]]
    """The rest of the start. Its arguments are the layouts of all weights that will be published, and the number of adapters."""


class _Fleet(Fleet):
    """A fleet with a door in the run's directory."""

    door: PoolDoor

    async def close(self) -> None:
        await self.door.close()
        await super().close()


class Start(Protocol):
    def __call__(self, engine_config: EngineConfig, name: str, member_telemetry: Telemetry) -> Starting[MemberEngine]:
        """Makes the engine of these settings. `name`: that of the member."""


def start_fleet(
    settings: EngineConfig,
    run_dir: Path,
    start: Start,
    telemetry: Telemetry,
    lent: Callable[[Telemetry], Starting[MemberEngine]] | None = None,
) -> Starting[Engine]:
    """`lent`: starts an engine more, on devices that the trainer lends."""
    own = dataclasses.replace(settings, urls=pool_door.urls_of(run_dir, settings.urls))
    member_telemetry = _without_samples(telemetry)
    members = members_of(own)
    if "" in members and own.urls:  # one server may be left of several
        members = {own.urls[0]: members[""]}
    starting = {name or "1": start(member, name, member_telemetry) for name, member in members.items()}
    if lent:
        starting[LENT] = lent(member_telemetry)
    patience = FleetPatience(settings.patience, settings.member_patience, every=max(1.0, len(members) / QUESTIONS))
    parts = {name: engine.engine for name, engine in starting.items()}
    fleet = _Fleet(parts, patience, telemetry, LENT if lent else None)

    async def join(url: str) -> MemberEngine:
        """Raises HeadraceError for a server that does not come, or does not go with the run."""
        joining = start(dataclasses.replace(settings, urls=(url,)), url, member_telemetry)
        try:
            await joining.launch()
            await joining.finish({}, 0)
            if lacks := _lacks(fleet, joining.engine):
                raise ConfigError(f"{url} cannot do what the fleet can: {lacks}")
        except BaseException:
            await joining.engine.close()
            raise
        return joining.engine

    fleet.door = PoolDoor(run_dir, fleet, join if settings.urls else None, settings.urls)

    async def launch() -> None:
        await asyncio.gather(*(engine.launch() for engine in starting.values()))

    async def finish(manifests: Mapping[str, Manifest], adapters: int) -> None:
        await asyncio.gather(*(engine.finish(manifests, adapters) for engine in starting.values()))
        await fleet.open()
        await fleet.door.open()

    return Starting(fleet, launch, finish)


def _lacks(fleet: Fleet, part: MemberEngine) -> str:
    """The abilities that the fleet has without the engine, and would not have with it."""
    has, would = fleet.capabilities, in_common([fleet.capabilities, part.capabilities])
    names = [name for name in has.__struct_fields__ if name not in ("path", "rows", "kv_tokens")]
    return ", ".join(f"{name} {getattr(has, name)}" for name in names if getattr(would, name) != getattr(has, name))


async def come(opening: Awaitable[T], url: str, patience: float) -> T:
    """Raises WorkerDied where a server does not answer in time."""
    try:
        async with asyncio.timeout(patience):
            return await opening
    except TimeoutError:
        message = f"at {url} did not answer for {patience:g} s (engine.patience)"
        raise WorkerDied("engine", message) from None


def _without_samples(telemetry: Telemetry) -> Telemetry:
    """Drops the statistics of members: the fleet records its own."""

    def record(fact: Fact) -> None:
        if not isinstance(fact, EngineSample):
            telemetry.record(fact)

    return dataclasses.replace(telemetry, record=record)
