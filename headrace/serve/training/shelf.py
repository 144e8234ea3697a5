"""Adapters of clients in the engine, which holds a few at once: each is loaded when it is sampled from, and gives way to others when
nobody samples from it."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from headrace.core.weights import WeightUpdate
from headrace.serve.serving import Label, Serving
from headrace.serve.training.futures import Promise

FULL = "all places for adapters in the engine are in use; it was started with too few (--adapters), or has to finish other samples first"


@dataclass(eq=False)
class SavedAdapter:
    """The weights that a sampler samples from. `update` changes where later weights take its place (`kind = "inflight"`)."""

    update: WeightUpdate

    @property
    def name(self) -> str:
        """The adapter's in the engine."""
        assert self.update.adapter is not None
        return self.update.adapter.name

    @property
    def label(self) -> Label:
        return Label(self.update.version, self.update.fingerprint)


class Shelf:
    def __init__(self, serving: Serving, places: int) -> None:
        """`places`: adapters that the engine can hold."""
        self._serving, self._places = serving, places
        self._users: Counter[str] = Counter()
        """Samples under way, by adapter: several samplers may have the same weights."""
        self._used: dict[str, int] = {}
        """The number of the last use of each adapter."""
        self._turn = asyncio.Lock()
        """Held by whoever comes next, also while it waits for a place: who came later waits behind it, and nobody starves."""
        self._freed = asyncio.Event()
        self._uses = itertools.count(1)

    @asynccontextmanager
    async def borrowed(self, weights: SavedAdapter, promise: Promise) -> AsyncIterator[None]:
        """Within it, the engine serves these weights. Raises IdentityError if what it loaded is not what was saved."""
        async with self._turn:
            await self._ready(weights, promise)
            self._users[weights.name] += 1
            self._used[weights.name] = next(self._uses)
        try:
            yield
        finally:
            self._users -= Counter([weights.name])  # keeps no zeros
            self._freed.set()

    async def forget(self, weights: SavedAdapter) -> None:
        """Takes it out of the engine, when the last request that uses it has ended."""
        async with self._turn:
            while weights.name in self._users:
                await self._until_freed()
            if self._used.pop(weights.name, None) and weights.name in self._serving.loaded:
                await self._serving.unload(weights.name)

    async def _ready(self, weights: SavedAdapter, promise: Promise) -> None:
        loaded = self._serving.loaded
        while weights.name not in loaded and len([name for name in loaded if name]) >= self._places:
            idle = [name for name in self._used if name in loaded and name not in self._users]
            if idle:
                await self._serving.unload(min(idle, key=self._used.__getitem__))
                continue
            promise.waiting_for = FULL
            await self._until_freed()
        promise.waiting_for = ""
        if weights.name not in loaded or loaded[weights.name].label != weights.label:
            await self._serving.load(weights.update)

    async def _until_freed(self) -> None:
        self._freed.clear()
        await self._freed.wait()
