"""A host's end of a bus, behind a link that may be down or cut, and that repeats messages."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from headrace.run.hosts.bus.bus_port import Bus, Letter, Notice, Posting
from headrace.testing.faultsim.cluster.machines import NodeLink


class LinkedBus:
    """A host's end of a bus, behind the link of its node. Protocol `Bus`."""

    def __init__(self, inner: Bus, link: NodeLink) -> None:
        self._inner, self._link = inner, link

    async def _reach(self) -> None:
        """Returns when the link lets a call through."""
        if self._link.cut:
            await asyncio.Event().wait()
        if seconds := self._link.seconds(0.0):
            await asyncio.sleep(seconds)

    async def register(self) -> None:
        await self._reach()
        await self._inner.register()

    async def post(self, posting: Posting) -> None:
        await self._reach()
        for _ in range(self._link.copies()):
            await self._inner.post(posting)

    async def claim(self, queue: str, who: str, most: int, wait: float = 0.0) -> list[Letter]:
        await self._reach()
        return await self._inner.claim(queue, who, most, wait)

    async def keep(self, queue: str, who: str, ids: Collection[str]) -> None:
        await self._reach()
        await self._inner.keep(queue, who, ids)

    async def settle(self, queue: str, ids: Collection[str], then: Posting | None = None) -> None:
        await self._reach()
        for _ in range(self._link.copies()):
            await self._inner.settle(queue, ids, then)

    async def unsettled(self, queue: str) -> set[str]:
        await self._reach()
        return await self._inner.unsettled(queue)

    async def pin(self, name: str, body: bytes) -> None:
        await self._reach()
        await self._inner.pin(name, body)

    async def newer(self, name: str, than: str = "", wait: float = 0.0) -> Notice | None:
        await self._reach()
        return await self._inner.newer(name, than, wait)

    async def sign(self, who: str, body: bytes) -> None:
        await self._reach()
        await self._inner.sign(who, body)

    async def signed(self) -> Mapping[str, bytes]:
        await self._reach()
        return await self._inner.signed()

    async def unsign(self, who: str) -> None:
        await self._reach()
        await self._inner.unsign(who)

    async def wipe(self) -> None:
        await self._reach()
        await self._inner.wipe()

    async def close(self) -> None:
        """Does nothing: the inner one is in memory."""
