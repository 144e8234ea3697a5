"""Takes turns: pipelines at a trainer that they share, and engine and trainer at devices that they share.

engine generates ──take──▶ engine sleeps, trainer wakes ──▶ step, copy ──over──▶ trainer sleeps, engine wakes ──▶ new weights, and on

Lent devices are the trainer's. It shares them with an engine beside the run's own, which is awake only while the trainer waits (`lent`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Literal, Protocol

from headrace.core.errors import HeadraceError
from headrace.core.protocols import Engine
from headrace.core.reports import EngineStats, SleepReport
from headrace.facts.facts import Slept, Woke
from headrace.facts.telemetry import Telemetry


class SleepingTrainer(Protocol):
    """A trainer that can give its devices up. Both calls may be repeated."""

    async def sleep(self) -> SleepReport: ...

    async def wake(self) -> SleepReport: ...


class SleepingEngine(Protocol):
    """An engine that can give its devices up. Its requests stay, and it takes others meanwhile; those of an engine on lent devices go on
    elsewhere. Both calls may be repeated."""

    async def sleep(self, keep: bool) -> SleepReport:
        """`keep`: the KV entries of requests go to the host's memory; else they are computed again."""

    async def wake(self, replaced: bool) -> SleepReport:
        """`replaced`: the weights that it had are not loaded, because newer ones follow at once."""


class SharedDevices:
    """Engine and trainer on the same devices: one of them sleeps. The engine begins asleep, the trainer awake."""

    def __init__(
        self, engine: SleepingEngine, trainer: SleepingTrainer, *, keep: bool, telemetry: Telemetry, lent: bool = False
    ) -> None:
        """`keep`: see `SleepingEngine.sleep`. `lent`: the engine is one beside the run's own, and has the devices while the trainer waits."""
        self._engine, self._trainer, self._keep, self._telemetry = engine, trainer, keep, telemetry
        self.lent = lent
        self._name: Literal["engine", "lent engine"] = "lent engine" if lent else "engine"
        self._has: Literal["engine", "trainer", ""] = "trainer"
        """The side that has the devices. Empty while that changes, and after a change that was cut off, which is then made again."""
        self._since = telemetry.clock()
        """The time of the engine's last sleep."""
        self._given = 0.0
        """Seconds in which the trainer fell asleep last."""
        self.cost = 0.0
        """Seconds that the trainer lost when it gave the devices away last, and got them back. A death costs nothing here."""

    async def to_trainer(self) -> None:
        if self._has == "trainer":
            return
        self._has, self._since = "", self._telemetry.clock()
        slept = SleepReport()
        with suppress(
            HeadraceError
        ):  # an engine that is lost for good has no memory left, and its own sentinel reports it
            slept = await self._asked(self._name, "sleep", self._engine.sleep(self._keep))
            self._slept(self._name, slept)
        woke = await self._asked("trainer", "wake", self._trainer.wake())
        self._woke("trainer", woke)
        self._has, self.cost = "trainer", self._given + slept.seconds + woke.seconds

    async def to_engine(self, replaced: bool) -> None:
        if self._has == "engine":
            return
        self._has = ""
        slept = await self._asked("trainer", "sleep", self._trainer.sleep())
        self._slept("trainer", slept)
        self._given = slept.seconds
        waking = self._engine.wake(replaced)
        self._woke(self._name, await self._asked(self._name, "wake", waking, endless=self.lent))
        if not self.lent:  # a rollout does not hang while its engine sleeps
            self._telemetry.waits.spare(self._telemetry.clock() - self._since)
        self._has = "engine"

    async def _asked(
        self, who: str, what: str, answer: Awaitable[SleepReport], *, endless: bool = False
    ) -> SleepReport:
        """Awaits `answer` under a named wait. `endless`: nobody waits for it, and it is cut off when the trainer wants its devices back."""
        async with self._telemetry.waits.named("turns", f"the {who} to {what}", endless):
            return await answer

    def _slept(self, who: str, report: SleepReport) -> None:
        self._telemetry.record(Slept(self._telemetry.clock(), who, report))

    def _woke(self, who: str, report: SleepReport) -> None:
        self._telemetry.record(Woke(self._telemetry.clock(), who, report))


class DeviceShare:
    """The turns of pipelines that share a trainer, in the order of their requests. A single pipeline never waits here for another."""

    def __init__(self, devices: SharedDevices | None = None) -> None:
        """`devices`: those that the trainer shares with an engine; None if it has its own."""
        self._free, self._devices = asyncio.Lock(), devices
        self._lends = devices is not None and devices.lent
        """Whether the trainer lends its devices: until the engine that has them is lost for good."""
        self.busy = 0.0
        """Seconds of finished work of all pipelines."""

    @property
    def alternate(self) -> bool:
        """Whether the engine stands still while the trainer works."""
        return self._devices is not None and not self._devices.lent

    @asynccontextmanager
    async def take(self, clock: Callable[[], float], computes: bool = True) -> AsyncIterator[None]:
        """The turn of one piece of work at the trainer. `computes`: whether the work needs the trainer's devices. Saving does not: a trainer that sleeps has all on the host."""
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
        if self._devices and self.alternate:
            async with self._free:
                await self._devices.to_engine(replaced)

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Lends the trainer's devices, if it does that, while it waits in here. The engine has them until the next `take`."""
        if not (self._devices and self._lends):
            yield
            return
        lending = asyncio.get_running_loop().create_task(self._lend(self._devices))
        try:
            yield
        finally:
            lending.cancel()
            await asyncio.wait([lending])
            if not lending.cancelled():
                lending.result()

    async def _lend(self, devices: SharedDevices) -> None:
        """Lends the devices once, when the wait has lasted as long as the last loan cost the trainer: short waits cost nothing, and a long one
        is used but for that part (the rule for renting skis, whose waits nobody knows beforehand).

        Consumes: the turn at the trainer, while the devices change hands.
        Waits for: the time of the last loan's cost, other work of the trainer, then the trainer's sleep and the engine's waking.
        Unblocked by: the clock; the end of that work; both reports. The end of the trainer's wait cancels the task.
        """
        await asyncio.sleep(devices.cost)
        async with self._free:
            try:
                await devices.to_engine(True)
            except HeadraceError:  # reported by the fleet, or by the trainer's own sentinel
                self._lends = False


# --- How busy engine and trainer were. Each counts its own working time.


LAST_WORD = 30.0
"""Seconds in which the engine should answer after training. It answers between two passes."""


class Utilisation:
    """Idle shares of engine and trainer between `start` and `stop`, which means training without loading and evaluation."""

    def __init__(self, engine: Engine, turns: DeviceShare, telemetry: Telemetry) -> None:
        self._engine, self._turns = engine, turns
        self._waits, self._clock = telemetry.waits, telemetry.clock
        self._first = self._last = EngineStats()
        self._began = self._ended = 0.0
        self._worked_first = self._worked_last = 0.0

    async def start(self) -> None:
        self._first = self._last = await self._stats()
        self._began = self._ended = self._clock()
        self._worked_first = self._worked_last = self._turns.busy

    async def stop(self, patience: float = LAST_WORD) -> None:
        """Takes the engine's final statistics. If the engine is lost or hangs, those of its last report are used."""
        self._ended = self._clock()
        self._worked_last = self._turns.busy
        with contextlib.suppress(TimeoutError, HeadraceError):
            # Named, because the watchdog would take an unnamed wait for a hang; endless, because it has its own deadline.
            async with (
                asyncio.timeout(patience),
                self._waits.named("controller", "the engine's last word", endless=True),
            ):
                self._last = await self._engine.stats()

    async def _stats(self) -> EngineStats:
        async with self._waits.named("controller", "the engine's statistics"):
            return await self._engine.stats()

    @property
    def seconds(self) -> float:
        return self._ended - self._began

    @property
    def engine_idle(self) -> float:
        busy = self._last.busy_seconds - self._first.busy_seconds
        return max(0.0, 1 - busy / self.seconds) if self.seconds else 0.0

    @property
    def trainer_idle(self) -> float:
        """The trainer's idle share. Work for other pipelines counts as busy."""
        busy = self._worked_last - self._worked_first
        return max(0.0, 1 - busy / self.seconds) if self.seconds else 0.0

    @property
    def prompt_tokens(self) -> int:
        return self._last.prompt_tokens - self._first.prompt_tokens

    @property
    def sampled_tokens(self) -> int:
        return self._last.sampled_tokens - self._first.sampled_tokens
