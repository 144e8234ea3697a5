"""What engine and trainer share where they run on one machine: each slows the other down while both work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Shared:
    def __init__(self, engine_slowed: float = 1.0, trainer_slowed: float = 1.0) -> None:
        """How many times longer each takes while the other works too."""
        self._engine_slowed, self._trainer_slowed = engine_slowed, trainer_slowed
        self._engines = self._trainers = 0
        """How many of each work now."""
        self._changed = asyncio.Event()
        self.on_trainer: list[Callable[[], None]] = []
        """Called before the trainer's state changes: engines settle their accounts at the old pace."""

    @property
    def engine_factor(self) -> float:
        return self._engine_slowed if self._trainers else 1.0

    def engine_works(self, works: bool) -> None:
        before = self._engines
        self._engines += 1 if works else -1
        if not (before and self._engines):
            self._changed.set()

    async def train(self, seconds: float) -> None:
        """Work that takes so long when nobody else works."""
        self._trainer_works(1)
        try:
            await self._work(seconds)
        finally:
            self._trainer_works(-1)

    def _trainer_works(self, change: int) -> None:
        for settle in self.on_trainer:
            settle()
        self._trainers += change
        for settle in self.on_trainer:
            settle()

    async def _work(self, seconds: float) -> None:
        if self._trainer_slowed == 1.0:
            await asyncio.sleep(seconds)
        else:
            await work(seconds, lambda: self._trainer_slowed if self._engines else 1.0, self._changed)


async def work(seconds: float, factor: Callable[[], float], changed: asyncio.Event) -> None:
    """Takes so many seconds times a factor that may change on the way, as `changed` then says."""
    clock = asyncio.get_running_loop().time
    while seconds > 1e-9:
        now, since = factor(), clock()
        changed.clear()
        try:
            async with asyncio.timeout(seconds * now):
                await changed.wait()
        except TimeoutError:
            return
        seconds -= (clock() - since) / now
