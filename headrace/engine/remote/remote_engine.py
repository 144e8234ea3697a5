"""Protocol `Engine`, over a server.

A server streams every token as it is sampled. So a broken connection and a stopped or killed server cost no token: every
request continues from its prefix, as with an engine in our own process.

**C3 over the wire.** The server computes the fingerprint of the weights that it loads, and reports with every token which
weights sampled it. Each is compared with the fingerprint that was published under that version: where somebody else has loaded
others meanwhile, the run ends instead of training on their tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec

from headrace.core.errors import ConfigError, HeadraceError, IdentityError
from headrace.core.reports import TOTALS, Capabilities, EngineStats, LoadReport
from headrace.core.steps import Finished, SoFar, StepOutput
from headrace.core.types import Completion, Request
from headrace.core.weights import WeightUpdate
from headrace.engine.remote.connection import Busy, Connection, Unreachable
from headrace.engine.remote.dialect import Dialect, Heard, ServerState
from headrace.engine.remote.outages import OwnServer, Presence
from headrace.engine.request_book import Pending, RequestBook, scoring
from headrace.engine.streaming import check_parts
from headrace.facts.facts import EngineSample, WorkerLost
from headrace.facts.telemetry import Telemetry

# --- A run's own counts over a server
# It may have counted other work before the run, and its processes may end during it.


class RunCounts:
    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock`: where the server does not report for how long it has worked. Then the time counts in which it had requests of this
        run, without which the run would report an engine that is never busy."""
        self._clock = clock
        self._streams, self._since, self._asked = 0, 0.0, 0.0
        """Open streams; the time from which on there have been some; seconds with some before that."""
        self._before, self._base, self._latest = EngineStats(), EngineStats(), EngineStats()
        """Statistics of processes of the server that ended; what the present one had done before this run; what it has now."""

    def begin(self, stats: EngineStats) -> None:
        self._base = self._latest = stats

    def update(self, stats: EngineStats) -> None:
        self._latest = stats

    def process_ended(self) -> None:
        self._before, self._base, self._latest = self.of_run(0), EngineStats(), EngineStats()

    def stream_began(self) -> None:
        if self._clock and not self._streams:
            self._since = self._clock()
        self._streams += 1

    def stream_ended(self) -> None:
        self._streams -= 1
        if self._clock and not self._streams:
            self._asked += self._clock() - self._since

    def of_run(self, version: int) -> EngineStats:
        """`version`: that of the live weights."""
        counts = {
            name: getattr(self._before, name) + getattr(self._latest, name) - getattr(self._base, name)
            for name in TOTALS
        }
        if self._clock:
            counts["busy_seconds"] = self._asked + (self._clock() - self._since if self._streams else 0.0)
        return msgspec.structs.replace(self._latest, version=version, **counts)


# --- Streams that are left for an update
# Streams that are left for an update, where the server does not report the version with each token.
#
# Every token that was heard is then of the weights before, and every one that will be is of those after: between, the server is asked
# for none.


class Standstill:
    def __init__(self) -> None:
        self._streams: dict[str, tuple[str, asyncio.Future[Any]]] = {}
        """Request -> its adapter, and what its stream is left by."""
        self._closed: Counter[str] = Counter()
        """Adapters whose requests wait, and for how many reasons; all wait for the base model's, which goes by the empty name."""
        self._changed = asyncio.Event()

    def enter(self, request: Request) -> asyncio.Future[Any]:
        """A stream begins. Returns the future by which it is to be left."""
        left: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._streams[request.id] = request.adapter, left
        return left

    def leave(self, request: Request) -> None:
        """Forgets the request's stream, from which nothing more is heard."""
        del self._streams[request.id]
        self._notify()

    async def until_over(self, adapter: str, done: asyncio.Future[Any]) -> None:
        """Returns when requests of the adapter may be sent, or the request is done without."""
        while self._waits(adapter) and not done.done():
            changed = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait([changed, done], return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()

    @asynccontextmanager
    async def of(self, adapter: str) -> AsyncIterator[None]:
        """Keeps the server free of requests that the adapter's weights would sample."""
        self.close(adapter)
        try:
            await self.emptied()
            yield
        finally:
            self.reopen(adapter)

    def close(self, adapter: str) -> None:
        """Makes requests of the adapter wait, until as many calls of `reopen`."""
        self._closed[adapter] += 1

    def reopen(self, adapter: str) -> None:
        self._closed[adapter] -= 1
        self._closed += Counter()  # forgets what is zero
        self._notify()

    async def emptied(self) -> None:
        """Returns when all streams of requests that have to wait are left."""
        while streams := [left for name, left in self._streams.values() if self._waits(name)]:
            for left in streams:
                if not left.done():
                    left.set_result(None)
            await self._changed.wait()

    def _waits(self, adapter: str) -> bool:
        return "" in self._closed or adapter in self._closed

    def _notify(self) -> None:
        self._changed.set()
        self._changed.clear()


# --- remote engine ------------------------------------------------------------


ATTEMPTS = 5
"""Streams of one request that may break without a token; then it has failed."""

SHOWN = 3
"""Names in a message."""

LOADING = 600.0
"""Seconds that an update may take."""


class WeightCarrier(Protocol):
    """Brings weights to the machine of a server that cannot fetch them (`CarriedWeights` in `weight_sync/files.py`)."""

    async def bring(self, update: WeightUpdate) -> WeightUpdate:
        """Returns the update as the server can read it. Raises IdentityError if its bytes are not those that were published, and OSError."""

    def close(self) -> None: ...


class RemoteEngine:
    def __init__(
        self,
        connection: Connection,
        dialect: Dialect,
        *,
        patience: float,
        max_deaths: int,
        telemetry: Telemetry,
        host: OwnServer | None = None,
        carrier: WeightCarrier | None = None,
    ) -> None:
        """`host`: the process of a server that the run starts, and ends; None for one that it joins. `carrier`: None for a server that reads or fetches
        weights where the trainer has them."""
        self._connection, self._dialect, self._host, self._carrier = connection, dialect, host, carrier
        self._telemetry = telemetry
        self._presence = Presence(connection, dialect, self, patience=patience, max_deaths=max_deaths, host=host)
        self._book = RequestBook()
        self._wanted: dict[str, WeightUpdate] = {}
        """The newest weights by adapter; the base model's go by the empty name."""
        self._published: dict[tuple[str, int], str] = {}
        """Fingerprint by adapter and version."""
        self._usual: frozenset[str] | None = None
        """The warnings of weights that were not loaded, at the first update."""
        self._admits, self._running = True, 0
        self._changed, self._standstill = asyncio.Event(), Standstill()
        self._names, self._nonce = itertools.count(), secrets.token_hex(4)
        self._counts = RunCounts(None if dialect.counts_busy else telemetry.clock)
        self.capabilities = Capabilities(context_length=0)

    async def open(self) -> ServerState:
        """Waits for the server. Raises WorkerDied where it does not come, ConfigError where it is another one."""
        # Endless, because the presence has a deadline, which is long for a server that has to load a large model.
        async with self._telemetry.waits.named("start", "the server to answer", endless=True):
            state = await self._presence.open()
        # A port that is another one at every start would make a resumed run look like one under other conditions.
        path = state.capabilities.path + ("" if self._host else f" at {self._connection.url}")
        self.capabilities = msgspec.structs.replace(state.capabilities, path=path)
        self._counts.begin(state.stats)
        for name in filter(None, state.fingerprints):  # of a run before this one, made for other base weights
            await self._dialect.unload(self._connection, name, LOADING)
        return state

    # -- requests -----------------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        return (await self._ended(request)).so_far()

    async def until_end(self, request: Request) -> Finished:
        return (await self._ended(request)).done.result()

    async def _ended(self, request: Request) -> Pending:
        if request.fork:
            raise ValueError(
                "a server goes on from no cache entries by name; give the tokens as the prompt of a new request"
            )
        if request.adapter and request.adapter not in self._wanted:
            raise ValueError(f"no adapter {request.adapter} is loaded; load it before naming it in a request")
        await self._presence.until_up()
        pending = self._book.enter(request)
        try:
            await self._admitted(pending)
            self._running += 1
            try:
                await self._until_done(pending)
            finally:
                self._running -= 1
                self._notify()
            await pending.done
            return pending
        finally:
            self._book.leave(request.id)

    async def _admitted(self, pending: Pending) -> None:
        while not (self._admits or pending.request.prefix or pending.done.done()):
            await self._changed.wait()

    async def _until_done(self, pending: Pending) -> None:
        failures, had = 0, 0
        while not pending.done.done():
            await self._presence.until_up()
            await self._standstill.until_over(pending.request.adapter, pending.done)
            try:
                await self._follow(pending)
            except Busy as busy:
                await asyncio.wait([pending.done], timeout=busy.seconds)
            except ValueError as error:
                pending.fail(error)
            except Unreachable as error:
                failures = 1 if len(pending.tokens) > had else failures + 1
                had = len(pending.tokens)
                await self._presence.doubt(str(error))
                if failures >= ATTEMPTS:
                    self._tell(StepOutput(0, finished=(Finished(pending.request.id, "error", str(error)),)))
            except HeadraceError as error:
                self._presence.give_up(error)

    async def _follow(self, pending: Pending) -> None:
        """One stream, to its end or to where it breaks. It is left as soon as the request is to end, the server is missed, or an update
        needs it to be."""
        left = self._standstill.enter(pending.request)
        self._counts.stream_began()
        reading = asyncio.ensure_future(self._read(pending))
        try:
            ends: list[asyncio.Future[object]] = [reading, pending.done, self._presence.outage, left]  # type: ignore[list-item]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            self._standstill.leave(pending.request)
            self._counts.stream_ended()

    async def _read(self, pending: Pending) -> None:
        rest = pending.rest()
        if stop := self._dialect.ended(rest):
            self._tell(StepOutput(self._version(), finished=(Finished(rest.id, stop),)))
            return
        path, body = self._dialect.ask(rest, f"{self._nonce}.{rest.id}.{next(self._names)}")
        stream = self._connection.stream(path, body)
        try:
            async for event in stream:
                heard = self._dialect.hear(event, rest)
                for output in self._outputs(rest, heard):
                    self._tell(output)
                if heard.cut_off:
                    raise Unreachable("the server ended the request before its end")
                if pending.done.done():
                    return
        finally:
            await stream.aclose()
        raise Unreachable("the stream ended without an end of the request")

    def _outputs(self, request: Request, heard: Heard) -> Iterable[StepOutput]:
        """Raises IdentityError where a token is of other weights than were published under its version."""
        if heard.scores:
            self._check(request.adapter, heard.scores.version, heard.scored_by)
            yield StepOutput(heard.scores.version, scores=(heard.scores,))
        details = list(heard.details)
        for run in heard.runs:
            self._check(request.adapter, run.version, run.fingerprint)
            count = len(run.tokens)
            yield StepOutput(
                version=run.version,
                request_ids=(request.id,) * count,
                tokens=tuple(run.tokens),
                logprobs=tuple(run.logprobs),
                kv_versions=(run.kv_version,) * count,
                details=tuple(details[:count]),
                mixed=run.mixed,
            )
            del details[:count]
        if heard.end:
            yield StepOutput(self._version(), finished=(heard.end,))

    def _check(self, adapter: str, version: int, fingerprint: str) -> None:
        self._presence.served()
        expected = self._published.get((adapter, version))
        if fingerprint and fingerprint != expected:
            raise _foreign(self._connection.url, version, fingerprint, expected)

    def _tell(self, output: StepOutput) -> None:
        try:
            self._book.publish(output)
        except Exception as error:  # for example, the journal cannot be written: later tokens would not be in it
            self._presence.give_up(error)
            return
        self._book.enter_output(output)

    async def score(self, tokens: Sequence[int], adapter: str = "") -> Completion:
        return await self.generate(scoring(f"score/{next(self._names)}", tokens, priority=-1, adapter=adapter))

    # -- weights ------------------------------------------------------------------------------------------------------------

    async def load(self, update: WeightUpdate, parts: int = 1) -> LoadReport:
        check_parts(update, parts)
        if parts > 1:
            raise ValueError("a server takes no update in parts; load it with parts = 1")
        name = update.adapter.name if update.adapter else ""
        before = self._wanted.get(name)
        self._published[name, update.version] = update.fingerprint
        self._wanted[name] = update
        try:
            if self._carrier:  # while requests go on: what it has brought it has at hand afterwards
                await self._carrier.bring(update)
            async with contextlib.nullcontext() if self._dialect.keeps_requests else self._standstill.of(name):
                return await self._presence.retrying(lambda: self._load(update))
        except (HeadraceError, ValueError):
            if before is None:  # refused: a server that comes back has no use for it
                del self._wanted[name]
            else:
                self._wanted[name] = before
            raise

    async def _load(self, update: WeightUpdate) -> LoadReport:
        """Raises IdentityError where the log of the run's own server warns that some weights were not loaded, unless it has warned of the same at
        the first update. That one is proven by the trial: vLLM names tables, too, which are in no checkpoint."""
        own = await self._carrier.bring(update) if self._carrier else update
        report = await self._dialect.load(self._connection, own, LOADING)
        if self._host:
            found = self._host.not_loaded()
            if self._usual is None:
                self._usual = found
            elif new := sorted(found - self._usual):
                raise IdentityError(
                    f"{self._host.who} warns in its log that it has not loaded {', '.join(new[:SHOWN])} of version {update.version}, "
                    "which it has loaded of earlier ones: it would serve a mixture of both"
                )
        return report

    def _version(self) -> int:
        return self._wanted[""].version if "" in self._wanted else 0

    # -- control ------------------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        self._admits = False
        while self._running and not self._admits:
            await self._changed.wait()

    async def resume(self) -> None:
        self._admits = True
        self._notify()

    async def abort(self) -> None:
        """The streams are left, and with them their requests end at the server."""
        for name in self._book.unfinished(None):
            self._tell(StepOutput(self._version(), finished=(Finished(name, "interrupted"),)))
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed.clear()

    def unfinished(self, among: Iterable[str] | None = None) -> Mapping[str, SoFar]:
        return self._book.unfinished(among)

    def listen(self, listener: Callable[[StepOutput], None]) -> None:
        self._book.listen(listener)

    async def stats(self) -> EngineStats:
        self._counts.update(
            (await self._presence.retrying(lambda: self._dialect.look(self._connection, LOADING))).stats
        )
        return self._counts.of_run(self._version())

    async def absence(self) -> str:
        return await self._presence.absence()

    async def watch(self) -> None:
        await self._presence.watch()

    def kill(self) -> None:
        """A server that was joined is not ours to kill: `close` closes the connections."""
        if self._host:
            self._host.kill()

    async def close(self) -> None:
        await self._presence.close()
        await self._connection.close()
        if self._host:
            await self._host.end()
        if self._carrier:
            self._carrier.close()

    # -- for its presence (protocol `Dependent`) ----------------------------------------------------------------------------

    async def restore(self, state: ServerState) -> None:
        await _load_missing(self._wanted, state, self._load)

    def seen(self, state: ServerState) -> None:
        self._counts.update(state.stats)
        self._telemetry.record(EngineSample(self._telemetry.clock(), self._counts.of_run(self._version())))

    def lost(self, how: str, deaths: int) -> None:
        self._counts.process_ended()
        self._telemetry.record(WorkerLost(self._telemetry.clock(), "engine", how, deaths, len(self._book)))

    def given_up(self, error: Exception) -> None:
        self._book.give_up(error)


def _foreign(url: str, version: int, found: str, expected: str | None) -> IdentityError:
    return IdentityError(
        f"the server at {url} sampled with weights {found} as version {version}, and this run published {expected or 'none'} under that "
        "number: somebody else loads weights into it. Give each run a server of its own"
    )


async def _load_missing(
    wanted: Mapping[str, WeightUpdate], state: ServerState, load: Callable[[WeightUpdate], Awaitable[object]]
) -> None:
    """Loads what the server lacks. The files of an update may be removed while it reads them, if nobody waits for it (as in a fleet)."""
    for name in list(wanted):  # the base model's comes first
        while state.fingerprints.get(name) != (update := wanted[name]).fingerprint:
            try:
                await load(update)
                break
            except (IdentityError, ValueError):
                if wanted.get(name) is update:
                    raise


def check_state(state: ServerState, dtype: str, context_length: int, url: str) -> None:
    """Raises ConfigError for a server that does not go with the run's settings."""
    if state.dtype != dtype:
        raise ConfigError(
            f'the server at {url} computes in {state.dtype}, and weights would be published in {dtype}; set engine.dtype = "{state.dtype}"'
        )
    if state.capabilities.context_length < context_length:
        raise ConfigError(
            f"the server at {url} holds {state.capabilities.context_length} tokens, and engine.context_length = {context_length}; lower that, "
            f"or start the server with room for as many (headrace serve --set engine.context_length={context_length}, vllm serve "
            f"--max-model-len {context_length + 1})"
        )
