"""Takes turns at the trainer: one piece of work after another, from all pipelines that share it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Turns:
    """The turns of pipelines that share a trainer, in the order of their requests. A single pipeline never waits here."""

    def __init__(self) -> None:
        self._free = asyncio.Lock()
        self.busy = 0.0
        """Seconds of finished work of all pipelines."""

    @asynccontextmanager
    async def take(self, clock: Callable[[], float]) -> AsyncIterator[None]:
        async with self._free:
            started = clock()
            try:
                yield
            finally:
                self.busy += clock() - started
