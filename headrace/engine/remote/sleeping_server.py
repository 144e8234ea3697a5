"""An engine behind HTTP that gives its device up while the trainer works (`orchestration.placement = "shared"`).

    asleep   no request is at the server; its KV cache is gone, its weights are discarded or on its host
    awake    its memory is back; requests wait on this side, because nobody may sample from weights that were discarded
    serving  a version is loaded, and proven as always; every request goes on from its tokens

A process that ends asleep is started again when it is the engine's turn: until then the trainer has the memory that it would take.
"""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.core.reports import EngineStats, LoadReport, SleepReport
from headrace.core.weights import WeightUpdate
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.dialect import ServerState, SleepingDialect
from headrace.engine.remote.outages import SILENT
from headrace.engine.remote.remote_engine import LOADING, RemoteEngine


class SleepingServer(RemoteEngine):
    """Protocol `SleepingEngine` too (`loop/turns.py`). It begins asleep."""

    def __init__(self, connection: Connection, dialect: SleepingDialect, *, keeps_base: bool, **more: Any) -> None:
        """`keeps_base`: see `SleepingDialect.sleep`; for runs whose updates bring adapters alone."""
        super().__init__(connection, dialect, **more)
        self._sleeper, self._keeps_base = dialect, keeps_base
        self._resting, self._holds = False, False
        """Whether the trainer has the device; whether requests are kept from the server."""
        self._turn = asyncio.Event()
        """The engine's turn, from when its memory is back."""

    async def open(self) -> ServerState:
        state = await super().open()
        async with self._telemetry.waits.named("start", "the server to fall asleep"):
            await self.sleep(False)
        return state

    async def sleep(self, keep: bool) -> SleepReport:
        """No server keeps the KV entries of requests (`keep`): they are computed again. Returns, too, when its process has ended."""
        began = self._telemetry.clock()
        self._resting = True
        self._turn.clear()
        if not self._holds:
            self._holds = True
            self._standstill.close("")
        await self._standstill.emptied()
        await self._presence.vacating(self._fall_asleep)
        return SleepReport(self._telemetry.clock() - began)

    async def wake(self, replaced: bool) -> SleepReport:
        began = self._telemetry.clock()
        self._resting = False
        self._presence.may_start()
        await self._presence.retrying(lambda: self._wake_up(replaced and len(self._wanted) == 1))
        self._turn.set()
        self._go_on()
        return SleepReport(self._telemetry.clock() - began)

    async def load(self, update: WeightUpdate, parts: int = 1) -> LoadReport:
        await self._turn.wait()
        report = await super().load(update, parts)
        self._go_on()
        return report

    async def restore(self, state: ServerState) -> None:
        """A process that comes back in the trainer's turn has the device no longer than it takes to tell it so."""
        if self._resting:
            await self._fall_asleep()
            return
        await self._sleeper.wake(self._connection, LOADING)
        await super().restore(state)
        self._go_on()

    async def stats(self) -> EngineStats:
        return self._counts.of_run(self._version()) if self._presence.is_vacant else await super().stats()

    async def _fall_asleep(self) -> None:
        await self._sleeper.sleep(self._connection, self._keeps_base, LOADING)

    async def _wake_up(self, replaced: bool) -> None:
        await self._sleeper.wake(self._connection, LOADING)
        if not replaced:  # adapters need their base
            await super().restore(await self._dialect.look(self._connection, SILENT))

    def _go_on(self) -> None:
        """Lets requests go to the server, once its weights are known."""
        if self._holds and not self._resting and self._sleeper.serves:
            self._holds = False
            self._standstill.reopen("")
