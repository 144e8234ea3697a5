"""An engine without a model, for tests and simulations: settable speed, lengths and failures; the real version semantics."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.errors import IdentityError, WorkerDied
from headrace.types import Capabilities, Completion, EngineStats, LoadReport, Request, Stop, WeightUpdate, spans_of


@dataclass
class FakeEngine:
    """Samples token t of a request at `seconds_per_token`, under whatever version is live at that moment."""

    seconds_per_token: float = 0.01
    load_seconds: float = 0.0
    length: Callable[[random.Random], int] = lambda rng: rng.randint(1, 8)
    failure_rate: float = 0.0
    """Share of requests that end with `stop = "error"`."""
    outage_rate: float = 0.0
    """Chance per token that the process dies and is replaced: the request waits, then goes on from its prefix, whose KV the
    live weights compute again."""
    outage_seconds: float = 1.0
    seed: int = 0
    context_length: int = 1_000_000

    def __post_init__(self) -> None:
        self.version = -1
        self.capabilities = Capabilities(context_length=self.context_length, path="fake")
        self.requests: list[Request] = []
        self._sampled = 0
        self._died: asyncio.Future[None] | None = None

    async def generate(self, request: Request) -> Completion:
        assert self.version >= 0, "generate before the first load"
        self.requests.append(request)
        rng = random.Random(f"{self.seed}/{request.id}")
        wanted = min(max(1, self.length(rng)), request.sampling.max_tokens)
        versions: list[int] = []
        kv_versions: list[int] = []
        kv = self.version
        for _ in range(wanted):
            if rng.random() < self.outage_rate:
                await asyncio.sleep(self.outage_seconds)
                kv = self.version
            versions.append(self.version)
            kv_versions.append(kv)
            self._sampled += 1
            await asyncio.sleep(self.seconds_per_token)
        spans = spans_of(versions, kv_versions)
        tokens = tuple(rng.randrange(1, 100) for _ in range(wanted))
        if rng.random() < self.failure_rate:
            return Completion(tokens, (-1.0,) * wanted, spans, "error", "injected failure")
        stop: Stop = "length" if wanted == request.sampling.max_tokens else "stop"
        return Completion(tokens, (-1.0,) * wanted, spans, stop)

    async def load(self, update: WeightUpdate) -> LoadReport:
        await asyncio.sleep(self.load_seconds)
        if update.fingerprint != f"fake-{update.version}":
            raise IdentityError(f"version {update.version} was published as {update.fingerprint}")
        assert update.version > self.version, "versions never go back"
        self.version = update.version
        return LoadReport(update.version, self.load_seconds, 0.0)

    async def score(self, tokens: Sequence[int]) -> list[float]:
        return [-1.0] * (len(tokens) - 1)

    async def stats(self) -> EngineStats:
        return EngineStats(sampled_tokens=self._sampled, version=self.version)

    async def watch(self) -> None:
        self._died = asyncio.get_running_loop().create_future()
        await self._died

    def die(self) -> None:
        """As if the process had been killed and was given up."""
        assert self._died is not None
        self._died.set_exception(WorkerDied("engine", "was killed (fake)"))

    async def close(self) -> None:
        pass
