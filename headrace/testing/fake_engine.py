"""An engine without a model, for tests and simulations: settable speed, lengths and failures; the real version semantics.

Token t of a request depends only on (seed, request id, t). So a request that is issued again with its earlier tokens as
`prefix` continues with the tokens that it would have had.
"""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from headrace.core.errors import IdentityError, WorkerDied
from headrace.core.reports import EngineStats, LoadReport, SleepReport, capable
from headrace.core.steps import Finished, PromptScores, SoFar, StepOutput, TokenDetails, Transcript, write_down
from headrace.core.types import Completion, Request, TopLogprobs, VersionSpan
from headrace.core.weights import WeightUpdate

_WORD = (1 << 64) - 1


@dataclass
class _Pending(Transcript):
    """A request in progress."""

    nap: asyncio.Future[None] | None = None
    aborted: bool = False
    kv: int = -1
    """The version that computed its KV cache; -1 where there is none."""

    def wake(self) -> None:
        if self.nap and not self.nap.done():
            self.nap.set_result(None)


class _Interrupted(Exception):
    """The request was aborted."""


class _Presence:
    """Whether a fake engine answers, and whether it is awake."""

    _pending: dict[str, _Pending]

    def __init__(self) -> None:
        self.sleep_seconds = 0.0
        """Seconds that it takes to fall asleep, and to wake."""
        self._awake = asyncio.Event()
        self._awake.set()
        self._stopped, self._away = False, ""
        self.kills = 0
        """How often it was killed."""
        self._answers, self._absent = asyncio.Event(), asyncio.Event()
        self._answers.set()

    async def _answering(self) -> None:
        while not self._answers.is_set():
            await self._answers.wait()

    async def _working(self) -> None:
        """Returns when it answers and is awake."""
        await self._answering()
        await self._awake.wait()

    async def sleep(self, keep: bool) -> SleepReport:
        await self._answering()
        await asyncio.sleep(self.sleep_seconds)
        self._awake.clear()
        for pending in () if keep else self._pending.values():
            pending.kv = -1
        return SleepReport(self.sleep_seconds, memory=1 << 20)

    async def wake(self, replaced: bool) -> SleepReport:
        await self._answering()
        await asyncio.sleep(self.sleep_seconds)
        self._awake.set()
        return SleepReport(self.sleep_seconds, memory=1 << 20)

    @property
    def stopped(self) -> bool:
        """Set for an engine that behaves like a process after SIGSTOP: no request is answered until it is unset."""
        return self._stopped

    @stopped.setter
    def stopped(self, stopped: bool) -> None:
        self._stopped = stopped
        self._set_presence()

    def vanish(self, how: str) -> None:
        """Behaves like an engine whose process has died and is being replaced, until `reappear`: its requests continue then."""
        self._away = how
        self._set_presence()

    def reappear(self) -> None:
        self._away = ""
        self._set_presence()

    def _set_presence(self) -> None:
        for event, holds in ((self._absent, bool(self._away)), (self._answers, not (self._away or self._stopped))):
            event.set() if holds else event.clear()

    async def absence(self) -> str:
        await self._absent.wait()
        return self._away

    def kill(self) -> None:
        """Ends the process. Its replacement answers."""
        self.kills += 1
        self.stopped = False


@dataclass
class FakeEngine(_Presence):
    """Samples a token of a request every `seconds_per_token`, under whatever version is live at that moment."""

    seconds_per_token: float = 0.01
    load_seconds: float = 0.0
    length: Callable[[random.Random], int] = lambda rng: rng.randint(1, 8)
    _: KW_ONLY
    receives: int = 0
    """Bytes that it reports of every version."""
    failure_rate: float = 0.0
    """Share of requests that end with `stop = "error"`."""
    outage_rate: float = 0.0
    """Chance per token that the process dies and is replaced: the request waits, then continues from its prefix, whose KV the
    live weights compute again."""
    outage_seconds: float = 1.0
    seed: int = 0
    context_length: int = 1_000_000
    opinion: Callable[[Sequence[int]], float] = lambda tokens: -1.0
    """Log-prob of the last of some tokens given those before it, for requests that score their prompt."""
    script: Callable[[Request], Sequence[int]] | None = None
    """The tokens of a request's whole completion, in place of drawn ones; after the last of them the model stops by itself."""
    rows: int = 0  # requests that it samples for at once; 0: no limit
    is_kept: Callable[[WeightUpdate], bool] = lambda update: True
    """Whether an update can still be read. An engine that reappears reads what it was asked to load last, and is lost if it cannot."""
    trusts: bool = False
    """Whether it loads updates whatever their fingerprint."""

    def __post_init__(self) -> None:
        self.version = -1
        self.adapters: dict[str, int] = {}
        self.capabilities = capable(self.context_length, "fake", adapters=1 << 10, exact=True, rows=self.rows)
        self.requests: list[Request] = []
        self._asked: dict[str, WeightUpdate] = {}
        """The updates that it was asked to load last, by adapter."""
        self._pending: dict[str, _Pending] = {}
        self._listeners: list[Callable[[StepOutput], None]] = []
        self._sampled = self._active = 0
        self._admits, self._paused = True, False
        self._mixed = False
        super().__init__()
        self._died: asyncio.Future[None] | None = None
        self._changed, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()

    async def generate(self, request: Request) -> Completion:
        return (await self._ended(request)).so_far()

    async def until_end(self, request: Request) -> Finished:
        pending = await self._ended(request)
        assert pending.end
        return pending.end

    async def _ended(self, request: Request) -> _Pending:
        assert self.version >= 0, "generate before the first load"
        self._refuse(request)
        self.requests.append(request)
        pending = self._pending[request.id] = _Pending(request=request)
        try:
            end = await self._serve(pending)
        except _Interrupted:
            end = Finished(request.id, "interrupted")
        finally:
            del self._pending[request.id]
        self._tell(StepOutput(self.version, finished=(end,)))
        pending.end = end
        return pending

    def _refuse(self, request: Request) -> None:
        if request.id in self._pending:
            raise ValueError(f"a request {request.id} is here already; give every request an id of its own")
        if request.adapter and request.adapter not in self.adapters:
            raise ValueError(f"no adapter {request.adapter} is loaded; load it before naming it in a request")
        if request.sampling.constraint or request.sampling.logit_bias:
            raise ValueError(
                "the fake engine has no logits: it follows no constraint and no logit_bias; leave them out"
            )
        if request.fork and request.fork.of not in {earlier.id for earlier in self.requests}:
            raise ValueError(f"request {request.fork.of} is not known; give its tokens as the prompt of a new request")

    async def _serve(self, pending: _Pending) -> Finished:
        request = pending.request
        await self._until(pending, lambda: bool(self._admits or request.prefix) and not 0 < self.rows <= self._active)
        self._active += 1
        self._idle.clear()
        try:
            if request.prompt_logprobs and pending.scores is None:
                end = await self._score(pending)
                if not request.sampling.max_tokens or end.error:
                    return end
            return await self._sample(pending)
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()
            self._notify()

    async def _score(self, pending: _Pending) -> Finished:
        """One forward pass. Of its k most probable tokens all but the first, which is the right one, are impossible."""
        await self._pass(pending, self.seconds_per_token)
        request = pending.request
        if random.Random(f"{self.seed}/{request.id}").random() < self.failure_rate:
            return Finished(request.id, "error", "injected failure")
        tokens, k = request.prompt, request.top_logprobs
        opinions = tuple(self.opinion(tokens[: end + 1]) for end in range(1, len(tokens)))
        top = None
        if k:
            rest = [-math.inf] * (k - 1)
            ids = array("i", [token for right in tokens[1:] for token in (right, *range(1, k))])
            top = TopLogprobs(
                k, ids.tobytes(), array("f", [p for opinion in opinions for p in (opinion, *rest)]).tobytes()
            )
        scores = PromptScores(request.id, self._live(request), opinions, top, self._mixed)
        self._tell(StepOutput(self.version, scores=(scores,), mixed=self._mixed))
        return Finished(request.id, "length")

    async def _sample(self, pending: _Pending) -> Finished:
        request = pending.request
        rng = random.Random(f"{self.seed}/{request.id}")
        script = self.script(request) if self.script else None
        length = self.length(rng) if script is None else len(script)
        wanted = min(max(1, length), request.sampling.max_tokens)
        fails, own = rng.random() < self.failure_rate, rng.getrandbits(64)
        pending.kv = self._live(request)
        for place in range(len(request.prefix), wanted):
            number = _mixed_up(own + place)
            if (number >> 32) / 2**32 < self.outage_rate:
                await self._pass(pending, self.outage_seconds)
                pending.kv = self._live(request)
            await self._pass(pending, self.seconds_per_token)
            self._sampled += 1
            token, live = script[place] if script else number % 99 + 1, self._live(request)
            kv = pending.kv = live if pending.kv < 0 else pending.kv
            columns: dict[str, Any] = {"versions": (live,), "mixed": self._mixed, "details": _details(request, token)}
            self._tell(StepOutput(self.version, (request.id,), (token,), (-1.0,), (kv,), **columns))
        if fails:
            return Finished(request.id, "error", "injected failure")
        stops = wanted < request.sampling.max_tokens or (script is not None and len(script) == wanted)
        return Finished(request.id, "stop" if stops else "length")

    def _live(self, request: Request) -> int:
        return self.adapters[request.adapter] if request.adapter else self.version

    def _tell(self, output: StepOutput) -> None:
        for listener in self._listeners:
            listener(output)
        write_down(output, self._pending.get)

    # -- time ---------------------------------------------------------------------------------------------------------------

    def reappear(self) -> None:
        super().reappear() if all(map(self.is_kept, self._asked.values())) else self.die()

    async def _pass(self, pending: _Pending, seconds: float) -> None:
        """A forward pass. Raises `_Interrupted` as soon as the request is aborted."""
        loop = asyncio.get_running_loop()
        pending.nap = loop.create_future()
        timer = loop.call_later(seconds, pending.wake)
        try:
            await pending.nap
        finally:
            timer.cancel()
        await self._working()
        await self._until(pending, lambda: not self._paused)
        if pending.aborted:
            raise _Interrupted

    async def _until(self, pending: _Pending, allowed: Callable[[], bool]) -> None:
        while not pending.aborted and not allowed():
            await self._changed.wait()
        if pending.aborted:
            raise _Interrupted

    def _notify(self) -> None:
        """Wakes all waiters, which check their conditions again."""
        self._changed.set()
        self._changed.clear()

    # -- weights ------------------------------------------------------------------------------------------------------------

    async def load(self, update: WeightUpdate, parts: int = 1) -> LoadReport:
        """The last of the parts is live after `load_seconds`, the first after a part of that. The live version is not loaded again."""
        if parts < 1 or (parts > 1 and update.adapter):
            raise ValueError("parts must be 1 for an adapter, and at least 1 for a model")
        self._asked[update.adapter.name if update.adapter else ""] = update
        await asyncio.sleep(self.load_seconds / parts)
        await self._working()
        if update.fingerprint != f"fake-{update.version}" and not self.trusts:
            raise IdentityError(f"version {update.version} was published as {update.fingerprint}")
        before = self.adapters.get(update.adapter.name, -1) if update.adapter else self.version
        if update.version == before:
            return LoadReport(update.version, 0.0, 0.0)
        assert update.version > before, "versions never go back"
        mixed_tokens = await self._stream(parts) if parts > 1 else 0
        if update.adapter:
            self.adapters[update.adapter.name] = update.version
        else:
            self.version = update.version
        return LoadReport(update.version, self.load_seconds, 0.0, mixed_tokens, received=self.receives)

    async def _stream(self, parts: int) -> int:
        """The first part is live: until the last is. Tokens that were sampled meanwhile."""
        self._mixed, before = self.version >= 0, self._sampled
        try:
            for _ in range(parts - 1):
                await asyncio.sleep(self.load_seconds / parts)
        finally:
            self._mixed = False
        return self._sampled - before if self.version >= 0 else 0

    async def score(self, tokens: Sequence[int], adapter: str = "") -> Completion:
        await self._working()
        version = self.adapters[adapter] if adapter else self.version
        spans = (VersionSpan(0, version, version, self._mixed),)
        return Completion((), (), spans, "length", prompt_logprobs=(-1.0,) * (len(tokens) - 1))

    # -- control ------------------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        await self._answering()
        self._admits = False
        self._notify()
        await self._idle.wait()

    async def pause(self) -> None:
        await self._answering()
        self._paused = True

    async def unload(self, adapter: str) -> None:
        if adapter not in self.adapters:
            raise ValueError(f"no adapter {adapter} is loaded; load it before naming it in a request")
        if any(pending.request.adapter == adapter for pending in self._pending.values()):
            raise ValueError(f"the adapter {adapter} is in use; end its requests first")
        del self.adapters[adapter]

    async def resume(self) -> None:
        await self._answering()
        self._admits, self._paused = True, False
        self._notify()

    async def abort(self) -> None:
        await self._answering()
        for pending in self._pending.values():
            pending.aborted = True
            pending.wake()
        self._notify()

    def unfinished(self, among: Iterable[str] | None = None) -> Mapping[str, SoFar]:
        names = list(self._pending) if among is None else among
        return {name: self._pending[name].at_present() for name in names if name in self._pending}

    def listen(self, listener: Callable[[StepOutput], None]) -> None:
        self._listeners.append(listener)

    async def stats(self) -> EngineStats:
        await self._answering()
        waiting = self.rows and len(self._pending) - self._active
        return EngineStats(self._active, waiting, sampled_tokens=self._sampled, version=self.version)

    async def watch(self) -> None:
        self._died = asyncio.get_running_loop().create_future()
        await self._died

    def die(self) -> None:
        """Fails as an engine whose process was killed and is not restarted."""
        assert self._died is not None
        self._died.set_exception(WorkerDied("engine", "was killed (fake)"))

    async def close(self) -> None:
        pass


def _details(request: Request, token: int) -> tuple[TokenDetails, ...]:
    """The sampled token is the only one that was left, and all others are impossible. Empty for a request that asks for neither."""
    if not request.top_logprobs and not request.return_mask:
        return ()
    tops = [token, *range(100, 99 + request.top_logprobs)]
    logprobs = [-1.0] + [-math.inf] * (request.top_logprobs - 1)
    mask = array("i", [token]) if request.return_mask else array("i")
    if not request.top_logprobs:
        return (TokenDetails(request.id, mask=mask.tobytes()),)
    return (TokenDetails(request.id, array("i", tops).tobytes(), array("f", logprobs).tobytes(), mask.tobytes()),)


def _mixed_up(counter: int) -> int:
    """64 bits of which each depends on all of the counter's (the finaliser of SplitMix64; Steele et al., OOPSLA 2014)."""
    z = counter * 0x9E3779B97F4A7C15 & _WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _WORD
    return z ^ (z >> 31)
