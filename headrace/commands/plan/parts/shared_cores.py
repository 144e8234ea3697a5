"""The sharing of one machine: engine and trainer slow each other down while both work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Shared:
    def __init__(self, engine_slowed: float = 1.0, trainer_slowed: float = 1.0) -> None:
        """The factors by which each takes longer while the other works too."""
        self._engine_slowed, self._trainer_slowed = engine_slowed, trainer_slowed
        self._engines = self._trainers = 0
        """Numbers of engines and trainers that work now."""
        self._changed = asyncio.Event()
        self.on_trainer: list[Callable[[], None]] = []
        """Called before and after the trainer starts or stops, so that engines account for their work at the old pace."""

    @property
    def engine_factor(self) -> float:
        return self._engine_slowed if self._trainers else 1.0

    @property
    def trainer_factor(self) -> float:
        return self._trainer_slowed if self._engines else 1.0

    def engine_works(self, works: bool) -> None:
        before = self._engines
        self._engines += 1 if works else -1
        if not (before and self._engines):
            self._changed.set()

    def changed(self) -> None:
        """Something has changed on which the factor given to `train` depends."""
        self._changed.set()

    async def train(self, seconds: float, factor: Callable[[], float] = lambda: 1.0) -> None:
        """Works for `seconds`, or longer if the engine works too, or as `factor` says."""
        self._trainer_works(1)
        try:
            await work(seconds, lambda: factor() * self.trainer_factor, self._changed)
        finally:
            self._trainer_works(-1)

    def _trainer_works(self, change: int) -> None:
        for settle in self.on_trainer:
            settle()
        self._trainers += change
        for settle in self.on_trainer:
            settle()


async def work(seconds: float, factor: Callable[[], float], changed: asyncio.Event) -> None:
    """Sleeps for `seconds` times a factor. `changed` is set when the factor may have changed."""
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
