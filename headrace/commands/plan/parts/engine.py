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
from collections.abc import Iterable, Mapping, Sequence

from headrace.commands.plan.parts.flight import ROUNDING, EndTimes, Flight, LengthOf
from headrace.commands.plan.parts.forward_passes import Passes
from headrace.commands.plan.parts.listeners import Listener, Listeners, Prompts, TurnCaches, transcript
from headrace.commands.plan.parts.shared_cores import Shared, work
from headrace.commands.plan.rates.rates import EngineRates
from headrace.core.errors import IdentityError
from headrace.core.reports import EngineStats, LoadReport, capable
from headrace.core.steps import Transcript
from headrace.core.types import Completion, Request, Stop, VersionSpan
from headrace.core.weights import WeightUpdate
from headrace.loop.world.surroundings import context_length

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
        for flight in [*self._running.values(), *(one[2] for one in self._waiting)]:
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

    def unfinished(self, among: Iterable[str] | None = None) -> Mapping[str, Transcript]:
        """Returns the transcripts of all requests so far, after reporting them to the listeners."""
        self._passes.advance()
        found, names = {}, None if among is None else set(among)
        for flight in [*self._running.values(), *(one[2] for one in self._waiting)]:
            if not flight.gone and (names is None or flight.request.id in names):
                so_far = self._completion(flight, "interrupted")
                self._listeners.report(flight, so_far, self.version, None)
                found[flight.request.id] = transcript(flight.request, so_far)
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
