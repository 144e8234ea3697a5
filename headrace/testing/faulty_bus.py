"""Any bus, with faults: letters that are lost, repeated, late and out of order, notices that take long, and settlements that are lost.
It ships for tests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from headrace.run.hosts.bus.bus_port import Bus, Letter, Notice, Posting


@dataclass(frozen=True, kw_only=True)
class BusFaults:
    """Each is the share of calls that it befalls."""

    lost: float = 0.0
    """Letters that the bus took and does not have: those since the last flush of a server that lost its power."""
    repeated: float = 0.0
    late: float = 0.0
    latest: float = 5.0
    """The most seconds of a late letter."""
    unsettled: float = 0.0
    """Settlements that do not happen though what they post does."""
    shuffled: bool = False


class FaultyBus:
    """Protocol `Bus`."""

    def __init__(self, inner: Bus, faults: BusFaults, chance: random.Random) -> None:
        self._inner, self._faults, self._chance = inner, faults, chance
        self._late: set[asyncio.Task[None]] = set()

    async def register(self) -> None:
        await self._inner.register()

    async def post(self, posting: Posting) -> None:
        if self._befalls(self._faults.lost):
            return
        for _ in range(1 + self._befalls(self._faults.repeated)):
            if self._befalls(self._faults.late):
                task = asyncio.ensure_future(self._later(posting))
                self._late.add(task)
                task.add_done_callback(self._late.discard)
            else:
                await self._inner.post(posting)

    async def claim(self, queue: str, who: str, most: int, wait: float = 0.0) -> list[Letter]:
        letters = await self._inner.claim(queue, who, most, wait)
        if self._faults.shuffled:
            self._chance.shuffle(letters)
        return letters

    async def keep(self, queue: str, who: str, ids: Collection[str]) -> None:
        if not self._befalls(self._faults.unsettled):
            await self._inner.keep(queue, who, ids)

    async def settle(self, queue: str, ids: Collection[str], then: Posting | None = None) -> None:
        if then:
            await self.post(then)
        if not self._befalls(self._faults.unsettled):
            await self._inner.settle(queue, ids)

    async def unsettled(self, queue: str) -> set[str]:
        return await self._inner.unsettled(queue)

    async def pin(self, name: str, body: bytes) -> None:
        if self._befalls(self._faults.late):
            await asyncio.sleep(self._chance.uniform(0, self._faults.latest))
        await self._inner.pin(name, body)

    async def newer(self, name: str, than: str = "", wait: float = 0.0) -> Notice | None:
        return await self._inner.newer(name, than, wait)

    async def sign(self, who: str, body: bytes) -> None:
        if not self._befalls(self._faults.lost):
            await self._inner.sign(who, body)

    async def signed(self) -> Mapping[str, bytes]:
        return await self._inner.signed()

    async def unsign(self, who: str) -> None:
        await self._inner.unsign(who)

    async def wipe(self) -> None:
        await self._inner.wipe()

    async def close(self) -> None:
        for task in self._late:
            task.cancel()
        await self._inner.close()

    def _befalls(self, share: float) -> bool:
        return share > 0 and self._chance.random() < share

    async def _later(self, posting: Posting) -> None:
        await asyncio.sleep(self._chance.uniform(0, self._faults.latest))
        await self._inner.post(posting)
