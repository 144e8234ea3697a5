"""Takes turns: pipelines at a trainer that they share, and engine and trainer at devices that they share.

engine generates ──take──▶ engine sleeps, trainer wakes ──▶ step, copy ──over──▶ trainer sleeps, engine wakes ──▶ new weights, and on
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Literal, Protocol

from headrace.errors import HeadraceError
from headrace.observe.facts import Slept, Woke
from headrace.observe.telemetry import Telemetry
from headrace.reports import SleepReport


class SleepingTrainer(Protocol):
    """A trainer that can give its devices up. Both calls may be repeated."""

    async def sleep(self) -> SleepReport: ...

    async def wake(self) -> SleepReport: ...


class SleepingEngine(Protocol):
    """An engine that can give its devices up. Its requests stay, and it takes others meanwhile. Both calls may be repeated."""

    async def sleep(self, keep: bool) -> SleepReport:
        """`keep`: the KV entries of requests go to the host's memory; else they are computed again."""

    async def wake(self, replaced: bool) -> SleepReport:
        """`replaced`: the weights that it had are not loaded, because newer ones follow at once."""


class SharedDevices:
    """Engine and trainer on the same devices: one of them sleeps. The engine begins asleep, the trainer awake."""

    def __init__(self, engine: SleepingEngine, trainer: SleepingTrainer, *, keep: bool, telemetry: Telemetry) -> None:
        """`keep`: see `SleepingEngine.sleep`."""
        self._engine, self._trainer, self._keep, self._telemetry = engine, trainer, keep, telemetry
        self._has: Literal["engine", "trainer", ""] = "trainer"
        """Which of them has the devices. Empty while that changes, and after a change that was cut off, which is then made again."""
        self._since = telemetry.clock()
        """The time of the engine's last sleep."""

    async def to_trainer(self) -> None:
        if self._has == "trainer":
            return
        self._has, self._since = "", self._telemetry.clock()
        with suppress(
            HeadraceError
        ):  # an engine that is lost for good has no memory left, and its own sentinel reports it
            self._slept("engine", await self._asked("engine", "sleep", self._engine.sleep(self._keep)))
        self._woke("trainer", await self._asked("trainer", "wake", self._trainer.wake()))
        self._has = "trainer"

    async def to_engine(self, replaced: bool) -> None:
        if self._has == "engine":
            return
        self._has = ""
        self._slept("trainer", await self._asked("trainer", "sleep", self._trainer.sleep()))
        self._woke("engine", await self._asked("engine", "wake", self._engine.wake(replaced)))
        self._telemetry.waits.spare(
            self._telemetry.clock() - self._since
        )  # a rollout does not hang while its engine sleeps
        self._has = "engine"

    async def _asked(self, who: str, what: str, answer: Awaitable[SleepReport]) -> SleepReport:
        async with self._telemetry.waits.named("turns", f"the {who} to {what}"):
            return await answer

    def _slept(self, who: str, report: SleepReport) -> None:
        self._telemetry.record(Slept(self._telemetry.clock(), who, report))

    def _woke(self, who: str, report: SleepReport) -> None:
        self._telemetry.record(Woke(self._telemetry.clock(), who, report))


class Turns:
    """The turns of pipelines that share a trainer, in the order of their requests. A single pipeline never waits here for another."""

    def __init__(self, devices: SharedDevices | None = None) -> None:
        """`devices`: those that the trainer shares with the engine; None if it has its own."""
        self._free, self._devices = asyncio.Lock(), devices
        self.busy = 0.0
        """Seconds of finished work of all pipelines."""

    @property
    def alternate(self) -> bool:
        """Whether the engine stands still while the trainer works."""
        return self._devices is not None

    @asynccontextmanager
    async def take(self, clock: Callable[[], float], computes: bool = True) -> AsyncIterator[None]:
        """`computes`: whether the work needs the trainer's devices. Saving does not: a trainer that sleeps has all on the host."""
        async with self._free:
            if self._devices and computes:
                await self._devices.to_trainer()
            started = clock()
            try:
                yield
            finally:
                self.busy += clock() - started

    async def over(self, replaced: bool = False) -> None:
        """Gives devices that are shared to the engine, because the trainer has to wait for it. `replaced`: see `SleepingEngine.wake`."""
        if self._devices:
            async with self._free:
                await self._devices.to_engine(replaced)
