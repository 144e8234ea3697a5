"""The shipped world with rollout hosts on a bus, all in one process and in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.episodes.environments.single_turn import SINGLE_TURN
from headrace.episodes.rollout import RolloutConfig
from headrace.episodes.rollout_session import Notebook
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.loop_plan import LoopPlan
from headrace.loop.own_groups import OwnGroups, Suspects
from headrace.loop.partial import Interrupts, PartialConfig
from headrace.loop.staleness import StalenessConfig
from headrace.loop.world.world import FactList
from headrace.run.clients.bus_engine import BusEngine
from headrace.run.hosts.bus.bus_port import Bus
from headrace.run.hosts.bus_messages import GroupSizes, RunNotice
from headrace.run.hosts.rollout_host import OVERTAKEN, HostParts, HostPatience, RolloutHost
from headrace.settings.process_config import EvalConfig
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.fake_scorer import FakeScorer
from headrace.version import __version__
from support.fake_world import FakeWorld

TICKET_DEATHS = 3
ROLLOUT = RolloutConfig(group_size=2, max_tokens=8, patience=200)


def host_plan(staleness: StalenessConfig) -> LoopPlan:
    return LoopPlan(
        steps=1,
        staleness=staleness,
        rollout=ROLLOUT,
        seed=0,
        max_skipped_steps=3,
        checkpoint_every=0,
        evaluate_every=0,
    )


@dataclass(kw_only=True)
class Fleet:
    """Rollout hosts over fakes. `open_bus` opens an end of the one bus."""

    open_bus: Callable[[], Bus]
    staleness: StalenessConfig
    engine: Callable[[], FakeEngine] = FakeEngine
    scorer: Callable[[], FakeScorer] = FakeScorer
    partial: PartialConfig = PartialConfig()
    patience: HostPatience = HostPatience()
    waits: Waits | None = None
    """Those of the run and of its hosts; None: they have their own, without deadlines."""
    overtaken: float = OVERTAKEN
    hosts: dict[str, tuple[RolloutHost, asyncio.Task[None]]] = field(default_factory=dict)
    engines: dict[str, FakeEngine] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    ended: dict[str, BaseException | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._numbers = itertools.count()

    def join(self) -> str:
        who = f"host-{next(self._numbers)}"
        host = RolloutHost(
            self.open_bus(), who, lambda notice: self._parts(who), patience=self.patience, say=self.said.append
        )
        task = asyncio.ensure_future(host.run())
        self.hosts[who] = host, task
        task.add_done_callback(lambda done: self.ended.__setitem__(who, None if done.cancelled() else done.exception()))
        return who

    def kill(self, who: str) -> None:
        """As SIGKILL: nothing more is heard of it."""
        host, task = self.hosts.pop(who)

        async def silent(*given: Any, **named: Any) -> None:
            await asyncio.Event().wait()

        host._bus = _Dead()  # type: ignore[assignment]
        if host._session:
            host._session.bus = _Dead()  # type: ignore[assignment]
        task.cancel()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return [task for _, task in self.hosts.values()]

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _parts(self, who: str) -> HostParts:
        clock = asyncio.get_running_loop().time
        waits = self.waits or Waits(lambda fact: None, clock, 1e5, 1e6)
        engine = self.engines[who] = self.engine()
        scorer = self.scorer()
        interrupts = Interrupts(engine, self.partial, waits, clock)
        groups = OwnGroups(
            plan=host_plan(self.staleness),
            evaluation=EvalConfig(samples=2),
            interrupts=interrupts,
            environment=SINGLE_TURN,
            scorer=scorer,
            evaluated_by=scorer,
            notebook=Notebook(),
            decode=str,
            waits=waits,
            context_length=1000,
        )
        return HostParts(
            engine=engine,
            interrupts=interrupts,
            groups=groups,
            adapter="",
            share=lambda hosts: math.ceil(self.staleness.generating / hosts),
            close=engine.close,
            waits=waits,
            overtaken=self.overtaken,
        )


class _Dead:
    """The end of a bus whose process was killed."""

    def __getattr__(self, name: str) -> Any:
        async def never(*given: Any, **named: Any) -> None:
            await asyncio.Event().wait()

        return never


def bus_engine(fleet: Fleet, telemetry: Telemetry) -> BusEngine:
    """The run's end of the fleet's bus, which is not launched yet."""

    async def opened() -> tuple[Bus, str]:
        return fleet.open_bus(), "in memory"

    sizes = GroupSizes(ROLLOUT.group_size, 2)
    return BusEngine("a bus", opened, "", telemetry, sizes=sizes, suspects=Suspects(TICKET_DEATHS))


async def bus_world(directory: Path | None, fleet: Fleet, resume: bool = False, **settings: Any) -> FakeWorld:
    """A world whose engine is the fleet. At least one host must have joined, or join soon."""
    facts = settings.pop("observer", None) or FactList()
    clock = asyncio.get_running_loop().time
    telemetry = Telemetry(facts.record, clock, fleet.waits or Waits(facts.record, clock, 1e5, 1e6))

    engine = bus_engine(fleet, telemetry)
    await engine.launch()
    await engine.open(RunNotice("", __version__))
    return BusWorld(
        directory, fleet.staleness, engine=engine, rollout=ROLLOUT, elsewhere=engine.groups, observer=facts, **settings
    )  # type: ignore[arg-type]


@dataclass(kw_only=True)
class BusWorld(FakeWorld):
    engine: BusEngine  # type: ignore[assignment]
