"""The trainer's time: one piece of work after another, whoever's it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Turns:
    """Of those who share a trainer. They come in the order in which they asked; a pipeline of its own never waits here."""

    def __init__(self) -> None:
        self._free = asyncio.Lock()
        self.busy = 0.0
        """Seconds of work that is done, of all of them."""

    @asynccontextmanager
    async def take(self, clock: Callable[[], float]) -> AsyncIterator[None]:
        async with self._free:
            started = clock()
            try:
                yield
            finally:
                self.busy += clock() - started
