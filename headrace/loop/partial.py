"""Partial rollouts: what becomes of what is being generated when new weights come, and when the run is killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass as plain
from typing import Literal

import msgspec
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from headrace.core.protocols import Engine, TokenListener
from headrace.core.reports import LoadReport
from headrace.core.steps import SoFar, StepOutput
from headrace.core.types import Completion, Request, RolloutKey, TopLogprobs, VersionSpan
from headrace.core.weights import WeightUpdate
from headrace.facts.waits import Waits
from headrace.settings.strict import STRICT

BEHIND = 1 << 40
"""Added to the priority of requests that were set aside, so that every new request goes first."""

FIRST = 64
"""Requests that are looked at to see whether the engine goes on: those that were asked for first, which it works on."""


@dataclass(frozen=True, config=STRICT)
class PartialConfig:
    mode: Literal["inflight", "stream", "abort_resume", "save_resume", "drain", "barrier", "cancel_group"] = "inflight"
    """How new weights enter (docs/interrupts.md)."""
    parts: int = Field(default=4, gt=1)
    """stream: the number of parts."""

    @model_validator(mode="after")
    def _parts_of_stream(self) -> PartialConfig:
        if self.mode != "stream" and self.parts != 4:
            raise ValueError('partial.parts belongs to mode = "stream"; remove it')
        return self


def partial_problems(config: PartialConfig, adapter: bool, several: bool) -> list[str]:
    """Returns a sentence with its remedy for each problem. `adapter`: whether the engine serves an adapter beside a base; `several`:
    whether it serves several runs."""
    problems = []
    if several and SWAPS[config.mode].stops_engine:
        problems.append(
            f'partial.mode = "{config.mode}" would hold up all adapters whenever one has new weights; use inflight, barrier or '
            "cancel_group"
        )
    if adapter and config.mode == "stream":
        problems.append(
            'partial.mode = "stream" replaces the weights of a model in parts; an adapter is small and is replaced at once: use '
            "inflight"
        )
    return problems


@plain(frozen=True)
class Delivery:
    """The report of an update that went live."""

    load: LoadReport
    interrupted: int = 0
    """The number of rollouts that were ended before they were done, whether or not they continue from their tokens."""
    pause: float = 0.0
    """Seconds in which the engine could not generate at full speed."""


class TokensSoFar(msgspec.Struct, frozen=True, gc=False):
    """The tokens of a request at one moment, uncounted by the garbage collector as `SoFar` is."""

    before: Completion | None
    """Tokens before an interruption or in an earlier process."""
    now: Completion | SoFar | None = None
    """Tokens since then."""

    @property
    def token_count(self) -> int:
        return (_count(self.now) if self.now else 0) + (len(self.before.tokens) if self.before else 0)

    def completion(self) -> Completion:
        now = self.now.completion() if isinstance(self.now, SoFar) else self.now
        if self.before and now:
            return joined(self.before, now)
        found = now or self.before
        assert found
        return found


def _count(now: Completion | SoFar) -> int:
    return now.count if isinstance(now, SoFar) else len(now.tokens)


def _is_over(now: Completion | SoFar) -> bool:
    end = now.end if isinstance(now, SoFar) else now
    return end is not None and end.stop != "interrupted"


class TokenStore:
    """The tokens of every request of the rollouts in flight: those that were kept, and those that the engine is sampling."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.kept: dict[str, Completion] = {}
        """Tokens sampled before an interruption or in an earlier process, and finished completions, by request, until `forget`."""
        self.asked: dict[str, asyncio.Future[Completion]] = {}
        """The requests that the engine is working on."""
        self._ended = 0
        """Requests that the engine has worked on."""
        self._names: dict[int, dict[str, bool]] = {}
        """The requests of each group, by ticket, and whether their rollouts asked for them in this process."""

    def begin(self, request_id: str) -> Completion | None:
        """Notes that a rollout asks for this request. Returns what is kept of it."""
        if key := RolloutKey.read(request_id):
            self._names.setdefault(key.ticket, {})[request_id] = True
        return self.kept.get(request_id)

    @contextlib.contextmanager
    def sampling(self, request_id: str, asked: asyncio.Future[Completion]) -> Iterator[None]:
        """The context in which the engine works on a request. An error ends the request."""
        self.asked[request_id] = asked
        try:
            yield
        except BaseException:
            # The tokens so far belong in the run's last checkpoint, or in the count of lost tokens.
            self.kept |= {name: part.completion() for name, part in self.captured([request_id]).items()}
            asked.cancel()
            raise
        finally:
            del self.asked[request_id]
            self._ended += 1

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.kept.pop(request_id, None)

    def forget_group(self, ticket: int) -> None:
        """Forgets all requests of a group, when it has ended."""
        self.forget(self._names.pop(ticket, ()))

    def restore(self, kept: Mapping[str, Completion]) -> None:
        """Takes over the completions that were recorded before the run was killed."""
        self.kept = dict(kept)
        for name in kept:
            if key := RolloutKey.read(name):
                self._names.setdefault(key.ticket, {})[name] = False

    def names(self, ticket: int) -> list[str]:
        """Every request of a group: those that its rollouts asked for, and those that were recorded before the run was killed."""
        return list(self._names.get(ticket, ()))

    def unused(self, ticket: int) -> dict[str, Completion]:
        """Returns the completions of a group that were recorded before the run was killed and not requested again since."""
        asked = self._names.get(ticket, {})
        return {name: self.kept[name] for name, used in asked.items() if not used and name in self.kept}

    def progress(self, ticket: int | None = None) -> object:
        """Returns what changes as long as requests of a group get tokens; if it has none yet, or none is named, as long as those do that were asked
        for first."""
        names = [] if ticket is None else self.names(ticket)
        if names and (own := self.count(names)):
            return own, len(names)
        return self._ended, self.count(itertools.islice(self.asked, FIRST))

    def count(self, among: Iterable[str]) -> int:
        """Returns the number of tokens of these requests."""
        return sum(part.token_count for part in self.captured(among).values())

    def so_far(self) -> dict[str, Completion]:
        """Returns finished and partial completions by request. A partial one has the stop `interrupted`."""
        return {name: part.completion() for name, part in self.captured([*self.kept, *self.asked]).items()}

    def captured(self, among: Iterable[str]) -> dict[str, TokensSoFar]:
        """Returns what there is now of each of these requests that has something, in a time that does not depend on the number of tokens."""
        names = dict.fromkeys(among)
        found = {name: TokensSoFar(self.kept[name]) for name in names if name in self.kept}
        asked = [name for name in names if name in self.asked]
        running = self._engine.unfinished(asked)
        for name in asked:
            now = (self._unheard(name) if self.asked[name].done() else None) or running.get(name)
            if now and (_count(now) or _is_over(now)):
                found[name] = TokensSoFar(self.kept.get(name), now)
        return found

    def _unheard(self, name: str) -> Completion | None:
        """The completion of a request that has ended while the task that awaits it has not run since."""
        asked = self.asked.get(name)
        over = asked is not None and asked.done() and not asked.cancelled() and not asked.exception()
        return asked.result() if asked and over else None

    def first_version(self, request_ids: Iterable[str]) -> int | None:
        """Returns the version of the oldest token of these requests, or None if no token is sampled yet."""
        request_ids = list(request_ids)
        transcripts = self._engine.unfinished(request_ids)
        versions = [kept.spans[0].version for name in request_ids if (kept := self.kept.get(name)) and kept.spans]
        versions += [
            spans[0].version for name in request_ids if (running := transcripts.get(name)) and (spans := running.spans)
        ]
        versions += [done.spans[0].version for name in request_ids if (done := self._unheard(name)) and done.spans]
        return min(versions, default=None)


class Interrupts:
    """The engine as rollouts see it: a request returns when it is done, however often new weights interrupted it."""

    def __init__(self, engine: Engine, config: PartialConfig, waits: Waits, clock: Callable[[], float]) -> None:
        self._engine, self._config, self._waits, self._clock = engine, config, waits, clock
        self.swap, self.tokens = SWAPS[config.mode], TokenStore(engine)
        self._hearing: dict[str, TokenListener] = {}
        """The listeners of requests, by request."""
        self._listens = False
        """Whether the engine sends us its tokens. It does from the first listener on, because they have to be read."""
        self._groups = 0
        self._idle, self._open, self._admits = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for event in (self._idle, self._open, self._admits):
            event.set()

    async def generate(self, request: Request, heard: TokenListener | None = None) -> Completion:
        """Like `Engine.generate`, but continues after interruptions. The completion is kept until `forget` or `forget_group`. `heard` is
        called with each token: those that were kept at once, the others as they are sampled.

        Consumes: what was kept of the request, as the prefix of the next one.
        Waits for: the engine's completion, and after an interruption for the end of the swap.
        Unblocked by: the engine; `_aborted`, which lets requests begin again when the weights are loaded or the load has failed.
        """
        if heard:
            self._hear(request.id, heard)
        try:
            return await self._generate(request)
        finally:
            self._hearing.pop(request.id, None)

    async def once(self, request: Request, heard: TokenListener | None = None) -> Completion:
        """Like `generate`, for a request whose completion need not be kept."""
        try:
            return await self.generate(request, heard)
        finally:
            self.tokens.forget([request.id])

    async def _generate(self, request: Request) -> Completion:
        """Asks the engine until the completion has another end than an interruption."""
        had = self.tokens.begin(request.id)
        while had is None or had.stop == "interrupted":
            if not self._open.is_set():
                async with self._waits.named("rollouts", "the swap in the engine, which interrupted them"):
                    await self._open.wait()
            had = self.tokens.kept[request.id] = await self._ask(request, had)
        return had

    async def _ask(self, request: Request, had: Completion | None) -> Completion:
        asked = asyncio.ensure_future(self._engine.generate(self._rest(request, had)))
        with self.tokens.sampling(request.id, asked):
            part = await asyncio.shield(asked)
        return joined(had, part) if had else part

    def _rest(self, request: Request, had: Completion | None) -> Request:
        if had is None:
            return request
        behind = BEHIND if self.swap.sets_aside else 0
        return msgspec.structs.replace(request, prefix=had.tokens, priority=request.priority + behind)

    def _hear(self, request_id: str, heard: TokenListener) -> None:
        if not self._listens:
            self._listens = True
            self._engine.listen(self._sampled)
        if had := self.tokens.kept.get(request_id):
            for token, logprob in zip(had.tokens, had.logprobs, strict=True):
                heard(token, logprob)
        self._hearing[request_id] = heard

    def _sampled(self, output: StepOutput) -> None:
        if not self._hearing:
            return
        for request_id, token, logprob, _ in output.sampled():
            if heard := self._hearing.get(request_id):
                heard(token, logprob)

    @contextlib.asynccontextmanager
    async def group(self) -> AsyncIterator[None]:
        """The context in which a group is generated and scored."""
        self._groups += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._groups -= 1
            if not self._groups:
                self._idle.set()

    async def admission(self) -> None:
        """Returns when a new group may begin."""
        await self._admits.wait()

    @property
    def admits(self) -> bool:
        return self._admits.is_set()

    async def deliver(self, update: WeightUpdate) -> Delivery:
        """Returns when the weights are live. Raises what `Engine.load` raises; rollouts then continue under the old weights."""
        return await self.swap.deliver(self, update)

    async def _between_passes(self, update: WeightUpdate) -> Delivery:
        return Delivery(await self._engine.load(update))

    async def _in_parts(self, update: WeightUpdate) -> Delivery:
        return Delivery(await self._engine.load(update, self._config.parts))

    async def _aborted(self, update: WeightUpdate) -> Delivery:
        since, interrupted = self._clock(), len(self.tokens.asked)
        self._open.clear()
        try:
            await self._engine.abort()
            load = await self._engine.load(update)
        finally:
            self._open.set()
        return Delivery(load, interrupted, self._clock() - since)

    async def _drained(self, update: WeightUpdate) -> Delivery:
        since = self._clock()
        try:
            await self._engine.drain()
            load = await self._engine.load(update)
        except Exception:  # not CancelledError: the run is ending, and must not wait for an engine that hangs
            await self._engine.resume()
            raise
        await self._engine.resume()
        return Delivery(load, 0, self._clock() - since)

    async def _alone(self, update: WeightUpdate) -> Delivery:
        """Loads the weights while no group is in flight.

        Consumes: the update.
        Waits for: the end of every group that has begun; none begins meanwhile (`admission`).
        Unblocked by: the last group that leaves `group`.
        """
        since = self._clock()
        self._admits.clear()
        try:
            await self._idle.wait()
            load = await self._engine.load(update)
        finally:
            self._admits.set()
        return Delivery(load, 0, self._clock() - since)


@plain(frozen=True, kw_only=True)
class Swap:
    """How new weights enter: a value of `partial.mode`."""

    deliver: Callable[[Interrupts, WeightUpdate], Awaitable[Delivery]]
    at_once: bool = False
    """Whether a delivery needs nothing of the weights that it replaces."""
    stops_engine: bool = False
    """Whether other runs that use the engine have to wait as well."""
    sets_aside: bool = False
    """Whether requests that it interrupted continue after new ones."""
    cancels_groups: bool = False
    """Whether it ends the groups that have begun."""


SWAPS = {
    "inflight": Swap(deliver=Interrupts._between_passes, at_once=True),
    "stream": Swap(deliver=Interrupts._in_parts),
    "abort_resume": Swap(deliver=Interrupts._aborted, at_once=True, stops_engine=True),
    "save_resume": Swap(deliver=Interrupts._aborted, at_once=True, stops_engine=True, sets_aside=True),
    "drain": Swap(deliver=Interrupts._drained, stops_engine=True),
    "barrier": Swap(deliver=Interrupts._alone),
    "cancel_group": Swap(deliver=Interrupts._between_passes, at_once=True, cancels_groups=True),
}


def joined(first: Completion, second: Completion) -> Completion:
    """Joins the tokens before an interruption and after it. The KV entries of the first part were computed again."""
    from headrace.core.sampling_masks import joined_masks  # here: settings are read without numpy

    count = len(first.tokens)
    spans = list(first.spans) if first.tokens else []
    for span in second.spans if second.tokens else ():
        last = spans[-1] if spans else None
        if last is None or (last.version, last.kv_version, last.mixed) != (span.version, span.kv_version, span.mixed):
            spans.append(VersionSpan(span.start + count, span.version, span.kv_version, span.mixed))
    return Completion(
        first.tokens + second.tokens,
        first.logprobs + second.logprobs,
        tuple(spans),
        second.stop,
        error=second.error,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
        prompt_top=first.prompt_top or second.prompt_top,
        top=_joined_top(first, second),
        mask=joined_masks([(completion.mask, len(completion.tokens)) for completion in (first, second)]),
        routing=second.routing
        or first.routing,  # the later one covers all positions, with the KV entries in use at its end
    )


def shortened(done: Completion, count: int) -> Completion:
    """The completion as it would be if no more than `count` tokens, of those that it has, could be sampled."""
    over = len(done.tokens) - count
    top, mask, routing = done.top, done.mask, done.routing
    if top:
        top = TopLogprobs(top.k, top.tokens[: 4 * top.k * count], top.logprobs[: 4 * top.k * count])
    if mask:
        from headrace.core.sampling_masks import shortened_mask

        mask = shortened_mask(mask, count)
    if routing:
        routing = msgspec.structs.replace(
            routing, experts=routing.experts[: -over * routing.layers * routing.k * routing.width]
        )
    return msgspec.structs.replace(
        done,
        tokens=done.tokens[:count],
        logprobs=done.logprobs[:count],
        spans=tuple(span for span in done.spans if span.start < count),
        stop="length",
        text="",
        top=top,
        mask=mask,
        routing=routing,
    )


def _joined_top(first: Completion, second: Completion) -> TopLogprobs | None:
    """Fills up a part that has fewer (or none), because it was asked for under other settings, with token 0 and a log-prob of -inf."""
    k = max((part.top.k for part in (first, second) if part.top), default=0)
    if first.top is None and second.top is None:
        return None
    import numpy as np

    tokens, logprobs = b"", b""
    for part in (first, second):
        ids, values = np.zeros((len(part.tokens), k), np.int32), np.full((len(part.tokens), k), -np.inf, np.float32)
        if part.top and part.top.k:
            ids[:, : part.top.k] = np.frombuffer(part.top.tokens, np.int32).reshape(-1, part.top.k)
            values[:, : part.top.k] = np.frombuffer(part.top.logprobs, np.float32).reshape(-1, part.top.k)
        tokens, logprobs = tokens + ids.tobytes(), logprobs + values.tobytes()
    return TopLogprobs(k, tokens, logprobs)
