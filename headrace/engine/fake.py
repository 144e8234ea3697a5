"""An engine without a model, for tests and simulations: settable speed, lengths and failures; the real version semantics."""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.errors import IdentityError, WorkerDied
from headrace.reports import Capabilities, EngineStats, LoadReport
from headrace.types import Completion, Request, Stop, TopLogprobs, VersionSpan, spans_of
from headrace.weights import WeightUpdate


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
    opinion: Callable[[Sequence[int]], float] = lambda tokens: -1.0
    """Log-prob of the last of some tokens given those before it, for requests that score their prompt."""

    def __post_init__(self) -> None:
        self.version = -1
        self.adapters: dict[str, int] = {}
        self.capabilities = Capabilities(context_length=self.context_length, path="fake")
        self.requests: list[Request] = []
        self._sampled = self._active = self._aborts = 0
        self._died: asyncio.Future[None] | None = None
        self._admits, self._steps, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for event in (self._admits, self._steps, self._idle):
            event.set()

    async def generate(self, request: Request) -> Completion:
        assert self.version >= 0, "generate before the first load"
        self._refuse(request)
        self.requests.append(request)
        aborts = self._aborts
        await self._admits.wait()
        self._active += 1
        self._idle.clear()
        try:
            if request.prompt_logprobs and not request.sampling.max_tokens:
                return await self._scored(request)
            return await self._sample(request, aborts)
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    def _refuse(self, request: Request) -> None:
        if request.adapter and request.adapter not in self.adapters:
            raise ValueError(f"no adapter {request.adapter} is loaded; load it before naming it in a request")
        if request.fork and request.fork.of not in {earlier.id for earlier in self.requests}:
            raise ValueError(f"request {request.fork.of} is not known; give its tokens as the prompt of a new request")

    def _live(self, request: Request) -> int:
        return self.adapters[request.adapter] if request.adapter else self.version

    async def _scored(self, request: Request) -> Completion:
        """One forward pass. Of its k most probable tokens all but the first, which is the right one, are impossible."""
        await self._steps.wait()
        await asyncio.sleep(self.seconds_per_token)
        if random.Random(f"{self.seed}/{request.id}").random() < self.failure_rate:
            return Completion((), (), (), "error", error="injected failure")
        tokens, k = request.prompt, request.top_logprobs
        opinions = tuple(self.opinion(tokens[: end + 1]) for end in range(1, len(tokens)))
        top = None
        if k:
            rest = [-math.inf] * (k - 1)
            ids = array("i", [token for right in tokens[1:] for token in (right, *range(1, k))])
            top = TopLogprobs(k, ids.tobytes(), array("f", [p for one in opinions for p in (one, *rest)]).tobytes())
        live = self._live(request)
        return Completion((), (), (VersionSpan(0, live, live),), "length", prompt_logprobs=opinions, prompt_top=top)

    async def _sample(self, request: Request, aborts: int) -> Completion:
        rng = random.Random(f"{self.seed}/{request.id}")
        wanted = min(max(1, self.length(rng)), request.sampling.max_tokens)
        versions: list[int] = []
        kv_versions: list[int] = []
        kv = self._live(request)
        for _ in range(wanted):
            if rng.random() < self.outage_rate:
                await asyncio.sleep(self.outage_seconds)
                kv = self._live(request)
            await self._steps.wait()
            if self._aborts > aborts:
                break
            versions.append(self._live(request))
            kv_versions.append(kv)
            self._sampled += 1
            await asyncio.sleep(self.seconds_per_token)
        spans = spans_of(versions, kv_versions)
        tokens = tuple(rng.randrange(1, 100) for _ in versions)
        logprobs = (-1.0,) * len(tokens)
        if self._aborts > aborts:
            return Completion(tokens, logprobs, spans, "interrupted")
        if rng.random() < self.failure_rate:
            return Completion(tokens, logprobs, spans, "error", error="injected failure")
        stop: Stop = "length" if wanted == request.sampling.max_tokens else "stop"
        return Completion(tokens, logprobs, spans, stop)

    async def load(self, update: WeightUpdate) -> LoadReport:
        await asyncio.sleep(self.load_seconds)
        if update.fingerprint != f"fake-{update.version}":
            raise IdentityError(f"version {update.version} was published as {update.fingerprint}")
        before = self.adapters.get(update.adapter.name, -1) if update.adapter else self.version
        assert update.version > before, "versions never go back"
        if update.adapter:
            self.adapters[update.adapter.name] = update.version
        else:
            self.version = update.version
        return LoadReport(update.version, self.load_seconds, 0.0)

    async def unload(self, adapter: str) -> None:
        if self.adapters.pop(adapter, None) is None:
            raise ValueError(f"no adapter {adapter} is loaded")

    async def score(self, tokens: Sequence[int], adapter: str = "") -> Completion:
        version = self.adapters[adapter] if adapter else self.version
        spans = (VersionSpan(0, version, version),)
        return Completion((), (), spans, "length", prompt_logprobs=(-1.0,) * (len(tokens) - 1))

    async def pause(self) -> None:
        self._steps.clear()

    async def drain(self) -> None:
        self._admits.clear()
        self._steps.set()
        await self._idle.wait()

    async def resume(self) -> None:
        self._admits.set()
        self._steps.set()

    async def abort(self) -> None:
        self._aborts += 1

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
