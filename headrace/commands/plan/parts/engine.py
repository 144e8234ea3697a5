"""A simulated engine: protocol `Engine` in virtual time, simulated event by event instead of token by token.

All running sequences get one token per forward pass, so one number, the passes done so far, gives the progress of each: a sequence ends
when the passes reach its start plus its length. A heap of these thresholds gives the next event. Swaps are recorded as (passes,
version), from which the spans of a completion are computed when it ends.

Not simulated: preemption (an admitted request stays; room is reserved for a completion of mean length), and the caching of prompts
beyond the group that shares them. The cache of a turn is there when the next one is asked for, unless new weights came in between.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from headrace.commands.plan.rates.rates import EngineRates
from headrace.core.errors import IdentityError
from headrace.core.reports import EngineStats, LoadReport, capable
from headrace.core.steps import Finished, SampledTokens, SoFar, StepOutput, Transcript
from headrace.core.types import Completion, Request, Stop, VersionSpan
from headrace.core.weights import WeightUpdate
from headrace.loop.world.surroundings import RESULT, completion_tokens, context_length

# --- A request inside a simulated engine, and the order in which requests end.


ROUNDING = 1e-6
"""Passes by which a sum of floats may be off."""

LengthOf = Callable[[Request], tuple[int, bool]]
"""Returns the real tokens of a request's whole completion, and whether max_tokens ends it."""

Swaps = Sequence[tuple[float, int, bool]]
"""Ascending: passes done at the swap, the version from then on, and whether that version is mixed with the next one."""


class Flight:
    __slots__ = (
        "at_limit",
        "begun",
        "done",
        "gone",
        "length",
        "order",
        "prefix",
        "prompt",
        "reported",
        "request",
        "room",
        "start",
        "swaps",
    )

    def __init__(self, request: Request, *, length: int, at_limit: bool, prefix: int, prompt: int, order: int) -> None:
        """`length`: real tokens of the whole completion; `prefix`: those of them that an earlier request sampled; `prompt`: those
        before it."""
        self.request, self.at_limit, self.order, self.prompt = request, at_limit, order, prompt
        self.length, self.prefix = max(length, prefix + 1), prefix
        self.done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.begun = self.gone = False
        self.start = 0
        """Passes done when it began: every later pass gives it one token."""
        self.swaps = 0
        """Index of the last swap before it began."""
        self.room = 0.0
        self.reported = 0
        """Simulated tokens that listeners have been sent."""

    @property
    def end(self) -> int:
        """The number of the pass that gives it its last token."""
        return self.start + self.length - self.prefix

    def completion(self, passes: float, swaps: Swaps, grain: int, stop: Stop, recompute: bool) -> Completion:
        """Returns what is sampled after `passes` passes; the whole completion if it ended by itself."""
        whole = completion_tokens(self.length, grain)
        kept = len(whole)
        if not self.begun:
            kept = len(self.request.prefix)
        elif (
            stop == "interrupted"
        ):  # rounded, so that nothing is gained or lost on average; the last token would end it
            kept = min(kept - 1, max(len(self.request.prefix), round((self.prefix + passes - self.start) / grain)))
        tokens = whole[len(self.request.prefix) : kept]
        spans = self._spans(len(tokens), swaps, grain, recompute) if tokens else ()
        return Completion(tokens, (-1.0,) * len(tokens), spans, stop)

    def _spans(self, count: int, swaps: Swaps, grain: int, recompute: bool) -> tuple[VersionSpan, ...]:
        """Gives each simulated token the version of the first real token in it."""
        _, oldest, mixed = swaps[self.swaps]
        spans = [VersionSpan(0, oldest, oldest, mixed)]
        for at, version, mixed in swaps[self.swaps + 1 :]:
            start = max(0, math.ceil((at - self.start) / grain - ROUNDING))
            if start >= count:
                break
            if start == spans[-1].start:
                spans.pop()
            kv_version = version if recompute else oldest
            if not spans or (spans[-1].version, spans[-1].mixed) != (version, mixed):
                spans.append(VersionSpan(start, version, kv_version, mixed))
        return tuple(spans)


class EndTimes:
    """The running requests, ordered by the pass that ends them."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Flight]] = []

    def push(self, flight: Flight) -> None:
        heapq.heappush(self._heap, (flight.end, flight.order, flight))

    def first(self) -> Flight | None:
        """Returns the request that ends first, among those that have not left."""
        while self._heap and self._heap[0][2].gone:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None


# --- The sharing of one machine: engine and trainer slow each other down while both work.


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


# --- The forward passes of a simulated engine
# How many are done, and when a given number will be.
#
# Between two events the same n sequences run, so passes take `decode(n) + context · C`, where C, the tokens in their caches, grows
# by n a pass: P passes take (decode(n) + context · C) P + context · n P² / 2 seconds, a quadratic that is solved for P.


class Passes:
    """The pace of one engine, and its counters."""

    def __init__(self, rates: EngineRates, shared: Shared) -> None:
        self._rates, self._shared = rates, shared
        self.done = 0.0
        self.debt = 0.0
        """Seconds of work before the next pass: prompts, a swap."""
        self.running = 0
        self.cached = 0.0
        """Tokens in the caches of the running sequences."""
        self.slowed = 1.0
        """Factor for other work during generation (verification of new weights)."""
        self.busy = self.sampled = 0.0
        self._at = 0.0
        self._paces: dict[int, float] = {}

    def advance(self) -> None:
        """Updates the counters to the present time. Called before anything changes on which the pace depends."""
        now = asyncio.get_running_loop().time()
        elapsed, self._at = now - self._at, now
        if elapsed <= 0 or not self.running:
            return
        self.busy += elapsed
        work = elapsed / self._factor
        paid = min(self.debt, work)
        self.debt -= paid
        done = self._within(work - paid)
        self.done += done
        self.cached += done * self.running
        self.sampled += done * self.running

    def seconds_until(self, target: float) -> float:
        """Returns the seconds until `target` passes are done, at the present pace."""
        passes = max(0.0, target - self.done)
        growth = self._rates.context * self.running * passes / 2
        return (self.debt + (self._each + growth) * passes) * self._factor

    @property
    def _factor(self) -> float:
        return self._shared.engine_factor * self.slowed

    @property
    def _each(self) -> float:
        pace = self._paces.get(self.running)
        if pace is None:
            pace = self._paces[self.running] = self._rates.pass_seconds(self.running)
        return pace + self._rates.context * self.cached

    def _within(self, seconds: float) -> float:
        each, growth = self._each, self._rates.context * self.running
        if growth == 0.0:
            return seconds / each
        return (math.sqrt(each * each + 2 * growth * seconds) - each) / growth


# --- The listeners of a simulated engine
# They get the output of its passes.


Listener = Callable[[StepOutput], None]


class Listeners:
    """Functions that are called with every `StepOutput`."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def add(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def report(self, flight: Flight, so_far: Completion, version: int, stop: Stop | None) -> None:
        """Sends the tokens that are new since the last report of this request, as one pass. `stop`: set if it has ended."""
        if not self._listeners:
            return
        new, name = slice(flight.reported, None), flight.request.id
        tokens, versions = so_far.tokens[new], tuple(so_far.versions()[new])
        flight.reported = len(so_far.tokens)
        ends = (Finished(name, stop),) if stop else ()
        output = StepOutput(
            version=version,
            request_ids=(name,) * len(tokens),
            tokens=tokens,
            logprobs=so_far.logprobs[new],
            kv_versions=versions,
            finished=ends,
            versions=versions,
        )
        for listener in list(self._listeners):
            listener(output)


def transcript(request: Request, so_far: Completion) -> Transcript:
    spans = [VersionSpan(span.start, span.version, span.version) for span in so_far.spans]
    return Transcript(request=request, sampled=SampledTokens(so_far.tokens, so_far.logprobs, spans))


class TurnCaches:
    """The sequences that ended under the live weights, whose caches a next turn finds."""

    MOST = 1 << 14
    """Sequences that are remembered. When there are more, those that ended first are forgotten."""

    def __init__(self) -> None:
        self._ended: dict[tuple[int, ...], tuple[int, int]] = {}
        """The version and the real tokens of each."""

    def ended(self, flight: Flight, done: Completion, version: int) -> None:
        whole = flight.request.prompt + flight.request.prefix + done.tokens
        self._ended[whole] = version, flight.prompt + flight.length
        while len(self._ended) > self.MOST:
            del self._ended[next(iter(self._ended))]

    def known(self, prompt: tuple[int, ...], version: int) -> int:
        """Returns the real tokens of a prompt that need not be computed."""
        under, tokens = self._ended.get(prompt[:-RESULT], (version, 0))
        return tokens if under == version else 0


class Prompts:
    """The prompts of the running requests: a group's prompt is computed once under each version of the weights."""

    def __init__(self) -> None:
        self._used: dict[tuple[int, ...], tuple[int, int]] = {}
        """The version under which each prompt was computed last, and the number of requests that use it."""

    def enter(self, prompt: tuple[int, ...], version: int) -> bool:
        """Counts one more request with this prompt and returns whether the prompt has to be computed."""
        computed, users = self._used.get(prompt, (-1, 0))
        self._used[prompt] = version, users + 1
        return computed != version

    def leave(self, prompt: tuple[int, ...]) -> None:
        version, users = self._used.pop(prompt)
        if users > 1:
            self._used[prompt] = version, users - 1


# --- engine ------------------------------------------------------------


_MEMORY = 32
"""Completions over which the mean length is averaged."""


class SimulatedEngine:
    def __init__(
        self,
        *,
        rates: EngineRates,
        length: LengthOf,
        shared: Shared,
        grain: int,
        expected: float,
        recompute: bool = False,
    ) -> None:
        """`grain`: real tokens that one simulated token stands for; `expected`: mean length of a completion before any has ended;
        `recompute`: whether caches are computed again after a swap."""
        self.capabilities = capable(1 << 40, "simulated")
        self.version = -1
        self._rates, self._length, self._shared, self._grain = rates, length, shared, grain
        self._recompute, self._mean = recompute, expected
        self._passes = Passes(rates, shared)
        self._swaps: list[tuple[float, int, bool]] = []
        self._running: dict[str, Flight] = {}
        self._ends = EndTimes()
        self._waiting: list[tuple[int, int, Flight]] = []
        self._prompts, self._listeners = Prompts(), Listeners()
        self._turns = TurnCaches()
        self._reserved = self._prompted = 0.0
        self._order = itertools.count()
        self._draining = self._settling = False
        self._idle, self._turned = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._timer: asyncio.TimerHandle | None = None
        shared.on_trainer.append(self._touch)

    # -- requests -----------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        assert self.version >= 0, "generate before the first load"
        length, at_limit = self._length(request)
        prefix, prompt = len(request.prefix) * self._grain, context_length(request.prompt, self._grain)
        order = next(self._order)
        flight = Flight(request, length=length, at_limit=at_limit, prefix=prefix, prompt=prompt, order=order)
        heapq.heappush(self._waiting, (request.priority, flight.order, flight))
        self._touch()
        try:
            return await flight.done
        except asyncio.CancelledError:
            self._passes.advance()
            self._leave(flight)
            self._touch()
            raise

    @property
    def burden(self) -> int:
        """Number of running and waiting requests."""
        return len(self._running) + len(self._waiting)

    async def abort(self) -> None:
        self._passes.advance()
        for flight in [*self._running.values(), *(entry[2] for entry in self._waiting)]:
            if not flight.gone:
                self._end(flight, "interrupted")
        self._touch()

    async def drain(self) -> None:
        self._draining = True
        self._passes.advance()
        self._touch()
        await self._idle.wait()

    async def resume(self) -> None:
        self._passes.advance()
        self._draining = False
        self._touch()

    # -- weights ------------------------------------------------------------------------------------------------------

    async def load(self, update: WeightUpdate, parts: int = 1) -> LoadReport:
        if update.adapter:
            raise ValueError("the simulated engine serves full weights only; plan the run without lora")
        if update.fingerprint != f"simulated-{update.version}":
            raise IdentityError(f"version {update.version} was published as {update.fingerprint}")
        assert update.version > self.version, "versions never go back"
        before, begun = self.version, self._passes.sampled
        for part in range(1, parts + 1):
            await self._verify(self._rates.verify / parts)
            last = part == parts
            if part == 1:
                begun = self._passes.sampled
            self._swap(update.version if last else before, not last, 1 / parts)
        return LoadReport(update.version, self._rates.verify, self._rates.swap, round(self._passes.sampled - begun))

    def _swap(self, version: int, mixed: bool, share: float) -> None:
        """Swaps all weights, or a share of them."""
        passes = self._passes
        passes.advance()
        self.version = version
        self._swaps.append((passes.done, version, mixed))
        if self._running:
            again = passes.cached * self._rates.prefill if self._recompute and not mixed else 0.0
            passes.debt += self._rates.swap * share + again
        self._touch()

    async def _verify(self, seconds: float) -> None:
        """Verifies an update during generation; each may slow the other down."""
        slows = self._rates.verify_slows
        self._pace(slows)
        self._shared.engine_works(True)
        try:
            await work(seconds, lambda: slows if self._running else 1.0, self._turned)
        finally:
            self._shared.engine_works(False)
            self._pace(1 / slows)

    def _pace(self, factor: float) -> None:
        self._passes.advance()
        self._passes.slowed *= factor
        self._touch()

    async def score(self, tokens: Sequence[int], adapter: str = "") -> Completion:
        await asyncio.sleep(self._rates.pass_seconds(1) + self._rates.prefill * len(tokens))
        spans = (VersionSpan(0, self.version, self.version),)
        return Completion((), (), spans, "length", prompt_logprobs=(-1.0,) * (len(tokens) - 1))

    # -- reports -----------------------------------------------------------------------------------------------------

    def listen(self, listener: Listener) -> None:
        self._listeners.add(listener)

    def unfinished(self, among: Iterable[str] | None = None) -> Mapping[str, SoFar]:
        """Returns what is reported of all requests so far, after reporting them to the listeners."""
        self._passes.advance()
        found, names = {}, None if among is None else set(among)
        for flight in [*self._running.values(), *(entry[2] for entry in self._waiting)]:
            if not flight.gone and (names is None or flight.request.id in names):
                so_far = self._completion(flight, "interrupted")
                self._listeners.report(flight, so_far, self.version, None)
                found[flight.request.id] = transcript(flight.request, so_far).at_present()
        return found

    async def stats(self) -> EngineStats:
        return self.snapshot()

    def snapshot(self) -> EngineStats:
        passes = self._passes
        passes.advance()
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used=min(1.0, passes.cached / self._rates.kv_tokens),
            sampled_tokens=round(passes.sampled),
            prompt_tokens=round(self._prompted),
            steps=round(passes.done),
            busy_seconds=passes.busy,
            version=self.version,
            swaps=len(self._swaps),
        )

    async def watch(self) -> None:
        """Never returns: `testing/faultsim/lives.py` simulates deaths."""
        await asyncio.Event().wait()

    def kill(self) -> None:
        pass

    async def close(self) -> None:
        pass

    # -- events -------------------------------------------------------------------------------------------------------

    def _touch(self) -> None:
        """Marks a change: updates the counters, and computes the next event once all changes of this instant are made."""
        self._passes.advance()
        if not self._settling:
            self._settling = True
            asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        self._settling = True
        self._passes.advance()
        while (flight := self._ends.first()) and flight.end <= self._passes.done + ROUNDING:
            self._mean += (flight.length - self._mean) / _MEMORY
            self._end(flight, "length" if flight.at_limit else "stop")
        self._admit()
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if flight := self._ends.first():
            seconds = self._passes.seconds_until(flight.end)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._settle)
        self._settling = False

    def _admit(self) -> None:
        rates = self._rates
        while self._waiting and len(self._running) < rates.max_running:
            flight = self._waiting[0][2]
            if not flight.gone:
                room = flight.prompt + max(self._mean, flight.prefix + 1)
                full = self._running and self._reserved + room > rates.kv_tokens
                if full or (self._draining and not flight.begun):
                    break
                self._begin(flight, room)
            heapq.heappop(self._waiting)

    def _begin(self, flight: Flight, room: float) -> None:
        passes, prompt = self._passes, flight.request.prompt
        new = self._prompts.enter(prompt, self.version)
        compute = flight.prefix + (flight.prompt - self._turns.known(prompt, self.version) if new else 0)
        self._prompted += compute
        passes.debt += compute * self._rates.prefill + self._rates.request
        if not self._running:
            self._shared.engine_works(True)
            self._idle.clear()
            self._turned.set()
        flight.begun, flight.room, flight.start = True, room, math.ceil(passes.done - ROUNDING)
        flight.swaps = len(self._swaps) - 1
        self._running[flight.request.id] = flight
        self._reserved += room
        passes.running += 1
        passes.cached += flight.prompt + flight.prefix
        self._ends.push(flight)

    def _end(self, flight: Flight, stop: Stop) -> None:
        completion = self._completion(flight, stop)
        if stop != "interrupted" and flight.swaps == len(self._swaps) - 1:
            self._turns.ended(flight, completion, self.version)
        self._listeners.report(flight, completion, self.version, stop)
        self._leave(flight)
        if not flight.done.done():
            flight.done.set_result(completion)

    def _completion(self, flight: Flight, stop: Stop) -> Completion:
        return flight.completion(self._passes.done, self._swaps, self._grain, stop, self._recompute)

    def _leave(self, flight: Flight) -> None:
        """Removes a request. The counters have to be up to date."""
        flight.gone = True
        if self._running.pop(flight.request.id, None) is None:
            return
        passes = self._passes
        self._prompts.leave(flight.request.prompt)
        self._reserved -= flight.room
        passes.running -= 1
        passes.cached -= flight.prompt + flight.prefix + max(0.0, passes.done - flight.start)
        if not self._running:
            passes.cached = passes.debt = self._reserved = 0.0
            passes.done = math.ceil(passes.done - ROUNDING)  # the next request need not wait for a pass of others
            self._shared.engine_works(False)
            self._idle.set()
            self._turned.set()
