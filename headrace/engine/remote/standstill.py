"""Streams that are left for an update, where the server does not report the version with each token.

Every token that was heard is then of the weights before, and every one that will be is of those after: between, the server is asked
for none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from headrace.core.types import Request


class Standstill:
    def __init__(self) -> None:
        self._streams: dict[str, tuple[str, asyncio.Future[Any]]] = {}
        """Request -> its adapter, and what its stream is left by."""
        self._updating: set[str] = set()
        """Adapters whose requests wait; all wait for the base model's update, which goes by the empty name."""
        self._changed = asyncio.Event()

    def enter(self, request: Request) -> asyncio.Future[Any]:
        """A stream begins. Returns the future by which it is to be left."""
        left: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._streams[request.id] = request.adapter, left
        return left

    def leave(self, request: Request) -> None:
        """Nothing more is heard from its stream."""
        del self._streams[request.id]
        self._notify()

    async def until_over(self, adapter: str, done: asyncio.Future[Any]) -> None:
        """Returns when requests of the adapter may be sent, or the request is done without."""
        while self._waits(adapter) and not done.done():
            changed = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait([changed, done], return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()

    @asynccontextmanager
    async def of(self, adapter: str) -> AsyncIterator[None]:
        """Keeps the server free of requests that the adapter's weights would sample. One at a time for each adapter."""
        self._updating.add(adapter)
        try:
            while streams := [left for name, left in self._streams.values() if self._waits(name)]:
                for left in streams:
                    if not left.done():
                        left.set_result(None)
                await self._changed.wait()
            yield
        finally:
            self._updating.discard(adapter)
            self._notify()

    def _waits(self, adapter: str) -> bool:
        return "" in self._updating or adapter in self._updating

    def _notify(self) -> None:
        self._changed.set()
        self._changed.clear()
