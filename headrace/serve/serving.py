"""The engine as the routes see it: requests in progress, weights with their labels, and counters.

**Versions.** The engine numbers the weights that it loads 0, 1, 2, ... and never goes back. A trainer has its own numbers,
which begin again with every run. A `Label` connects the two, and every span carries the fingerprint of its weights. So a
client sees which weights sampled each token, even if another client has loaded others meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from headrace.core.printing import say
from headrace.core.protocols import Engine
from headrace.core.reports import LoadReport
from headrace.core.steps import StepOutput, Transcript, spans_between, write_down
from headrace.core.types import Completion, Request, Struct, VersionSpan
from headrace.core.weights import WeightUpdate
from headrace.models.chat import ChatEncoder
from headrace.web.errors import Refused, busy
from headrace.web.limits import ServerLimits
from headrace.weight_sync.directory import offer_adapter

# --- Looks at files that a client has named
# A file system that does not answer must hold up neither the server nor its end.


T = TypeVar("T")

SECONDS = 30.0
"""Time that a look may take."""
AT_ONCE = 8
"""Looks that may be under way. Those at a file system that does not answer may last for ever."""


class Looks:
    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(AT_ONCE)

    async def at(self, place: Path, look: Callable[[], T]) -> T:
        """Returns what `look` returns, and raises what it raises. It has a thread of its own, which no end of the process waits for. Raises
        Refused where it takes too long."""
        if not self._free.acquire(blocking=False):
            raise busy(f"{AT_ONCE} requests wait for files already; try again")
        loop = asyncio.get_running_loop()
        found: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if not found.done():  # else nobody waits for it any more
                found.set_exception(error) if error else found.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            result, wrong = None, None
            try:
                result = look()
            except Exception as error:
                wrong = error
            self._free.release()
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, wrong)

        threading.Thread(target=run, name="look", daemon=True).start()
        try:
            async with asyncio.timeout(SECONDS):
                return await found
        except TimeoutError:
            raise Refused(
                503,
                f"{place} has not answered for {SECONDS:g} s: its file system is slow or gone; try again, or copy it",
            ) from None
        except OSError as error:
            raise Refused(400, f"{place} cannot be read: {error.strerror}") from None


# --- serving ------------------------------------------------------------


class ServedEngine(Engine, Protocol):
    """An engine with the methods that only servers need."""

    async def pause(self) -> None: ...

    async def unload(self, adapter: str) -> None: ...


class Label(Struct, frozen=True):
    """The owner's version and fingerprint of some weights."""

    version: int
    fingerprint: str


@dataclass
class LoadedWeights:
    label: Label
    report: LoadReport


@dataclass(kw_only=True)
class ServerCounters:
    completions: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cancelled: int = 0
    refused: int = 0
    loads: int = 0
    specials: int = 0
    """Requests whose messages hold the text of control tokens."""


class Stream(Transcript):
    """A completion in progress, which can be followed."""

    def __init__(self, request: Request) -> None:
        super().__init__(request=request)
        self.changed = asyncio.Event()
        self.task: asyncio.Task[Completion] | None = None

    async def more(self, seen: int) -> bool:
        """Waits until there are more tokens than `seen` (True) or the completion has ended (False). Raises the error that
        ended it."""
        assert self.task is not None
        while len(self.tokens) <= seen and not self.task.done():
            self.changed.clear()
            await self.changed.wait()
        if self.task.done() and not self.task.cancelled():
            self.task.result()
        return len(self.tokens) > seen


@dataclass(kw_only=True)
class Serving:
    engine: ServedEngine
    encoder: ChatEncoder
    name: str
    limits: ServerLimits
    dtype: str = ""
    boot: str = field(default_factory=lambda: secrets.token_hex(8))
    """Another name for each process: its weights are not those of the process before."""
    trained: bool = False
    """Whether clients train adapters over its base weights, which then stay: adapters would be served over others than they were trained over."""

    def __post_init__(self) -> None:
        self.labels: dict[int, Label] = {}
        """Labels by the engine's version."""
        self.loaded: dict[str, LoadedWeights] = {}
        """Loaded weights by adapter; the base has the empty name."""
        self._versions: dict[str, int] = {}
        """The last version under each name, also of adapters that are unloaded: answers name versions, and two are never one."""
        self.counters, self.paused = ServerCounters(), ""
        self._streams: dict[str, Stream] = {}
        """Completions in progress by the engine's names of them."""
        self._serials = itertools.count()
        self._loading, self._loads = asyncio.Lock(), 0
        self._looks, self._coming = Looks(), set[str]()
        self.engine.listen(self._heard)

    # -- requests -----------------------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> int:
        return len(self._streams)

    def adapter_of(self, model: str | None) -> str:
        """Returns the adapter that a request's `model` names; empty for the base. Raises Refused."""
        if model in (None, "", self.name):
            return ""
        if model in self.loaded:
            return str(model)
        there = ", ".join([self.name, *filter(None, self.loaded)])
        raise Refused(404, f"there is no model {model} here; there are: {there}", "model_not_found")

    def room_for(self, count: int) -> None:
        """Raises Refused where so many completions more would be too many."""
        if count > self.limits.completions:
            raise Refused(
                400, f"one request may ask for {self.limits.completions} completions, this one asks for {count}"
            )
        if self.under_way + count > self.limits.requests:
            self.counters.refused += 1
            raise busy(f"{self.under_way} completions are under way, and {self.limits.requests} may be; try again")

    def note_specials(self, held: set[str]) -> None:
        """Counts a chat whose messages hold the texts of these control tokens; the first one is said."""
        if held and not self.counters.specials:
            names = ", ".join(sorted(held)[:5])
            say(f"a message of a request holds the text of special tokens ({names}), which the model reads as text")
        self.counters.specials += bool(held)

    def submit(self, request: Request) -> Stream:
        """Begins a completion. The caller must `release` it."""
        self.room_for(1)
        if any(name.rpartition(".")[0] == request.id for name in self._streams):
            raise Refused(400, f"a request {request.id} is under way already; give every request an id of its own")
        # The engine gets a name that it never had: of a request whose client has left it may still have tokens on the way,
        # and clients send a request again under its id.
        request = msgspec.structs.replace(request, id=f"{request.id}.{next(self._serials)}")
        stream = self._streams[request.id] = Stream(request)
        stream.task = asyncio.get_running_loop().create_task(self.engine.generate(request))
        stream.task.add_done_callback(lambda task: stream.changed.set())
        self.counters.completions += 1
        self.counters.prompt_tokens += len(request.prompt)
        return stream

    def release(self, stream: Stream) -> asyncio.Task[Completion]:
        """Ends it where it has not ended: its KV is free when the returned task is done. Not a coroutine: one that is cancelled before
        its first step would release nothing."""
        assert stream.task is not None
        self._streams.pop(stream.request.id, None)
        if not stream.task.done():
            self.counters.cancelled += 1
            stream.task.cancel()
        return stream.task

    def abort(self, ids: list[str] | None) -> list[str]:
        """Ends completions with their present tokens. Returns those that were in progress. `ids`: the names that clients gave
        them."""
        known = None if ids is None else set(ids)
        named = [stream for name, stream in self._streams.items() if known is None or client_id(name) in known]
        for stream in named:
            assert stream.task is not None
            stream.task.cancel()
        return sorted({client_id(stream.request.id) for stream in named})

    def _heard(self, output: StepOutput) -> None:
        self.counters.sampled_tokens += output.token_count
        write_down(output, self._streams.get)
        for end in output.finished:
            if stream := self._streams.get(end.request_id):
                stream.end = end
        for name in {*output.requests, *(end.request_id for end in output.finished)}:
            if stream := self._streams.get(name):
                stream.changed.set()

    # -- weights ------------------------------------------------------------------------------------------------------------

    async def load(self, update: WeightUpdate) -> LoadReport:
        """Returns when they are live. What is live already is not loaded again: a client that lost the answer may ask again."""
        name = update.adapter.name if update.adapter else ""
        if name == self.name:
            raise Refused(400, f"the model is called {name}; give the adapter another name")
        async with self._loading:
            label = Label(update.version, update.fingerprint)
            if name in self.loaded and self.loaded[name].label == label:
                return self.loaded[name].report
            if self.trained and not name:
                raise Refused(
                    409,
                    "clients train adapters over the base weights of this server; load others into one that runs without --train",
                )
            number, self._loads = self._loads, self._loads + 1
            self.labels[number] = label
            found = await self.engine.load(msgspec.structs.replace(update, version=number))
            report = msgspec.structs.replace(found, version=update.version)
            self.loaded[name], self._versions[name] = LoadedWeights(label, report), update.version
            self.counters.loads += 1
            return report

    async def load_adapter(self, name: str, directory: Path) -> LoadReport:
        """Loads an adapter that peft saved. Loaded again under its name, also after an `unload`, it is a new version. Raises Refused while another is on its way under that
        name: two would have one version."""
        if name in self._coming:
            raise Refused(409, f"another request loads an adapter {name}; wait for its answer")
        self._coming.add(name)
        try:
            version = self._versions.get(name, -1) + 1
            update = await self._looks.at(directory, lambda: offer_adapter(directory, name, version))
            return await self.load(self._over_base(update))
        finally:
            self._coming.discard(name)

    def _over_base(self, update: WeightUpdate) -> WeightUpdate:
        """An adapter for the base weights that are served now. Its tokens are labelled with its own version: other weights under it would change
        what is sampled and no label, so that the engine refuses them until it is unloaded."""
        if update.adapter is None or (base := self.loaded.get("")) is None:
            return update
        return msgspec.structs.replace(
            update, adapter=msgspec.structs.replace(update.adapter, base=base.label.fingerprint)
        )

    async def look_at(self, directory: Path) -> None:
        """Raises Refused where a client names a directory of which nothing can be learned."""
        await self._looks.at(directory, lambda: directory.is_dir())

    async def unload(self, name: str) -> None:
        async with self._loading:
            if not name or name not in self.loaded:
                raise Refused(404, f"no adapter {name} is loaded", "model_not_found")
            try:
                await self.engine.unload(name)
            except ValueError as error:
                raise Refused(409, str(error)) from None
            del self.loaded[name]

    def spans(self, transcript: Transcript, start: int, stop: int) -> list[dict[str, object]]:
        """Returns the spans of tokens [start, stop), with the versions of the weights' owner. Positions are counted from `start`."""
        return [self._span(span) for span in spans_between(transcript.sampled.spans, start, stop)]

    def label(self, number: int) -> Label:
        return self.labels[number]

    def _span(self, span: VersionSpan) -> dict[str, object]:
        label, kv = self.labels[span.version], self.labels[span.kv_version]
        return {
            "start": span.start,
            "version": label.version,
            "kv_version": kv.version,
            "mixed": span.mixed,
            "fingerprint": label.fingerprint,
        }

    # -- control ------------------------------------------------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        """Pauses the engine. `keep`: requests are paused and continue later. `abort`: present requests end now. `wait`:
        requests that have begun are completed first. In all three modes, new requests wait."""
        self.paused = mode
        if mode == "wait":
            await self.engine.drain()
            if self.paused != mode:  # that ended the draining before the requests
                raise Refused(
                    409,
                    "another request has resumed or paused the engine before those under way were complete; pause again",
                )
            return
        await self.engine.pause()
        if mode == "abort":
            self.abort(None)

    async def resume(self) -> None:
        self.paused = ""
        await self.engine.resume()

    def models(self) -> Mapping[str, str]:
        """Name -> the model that it adapts; empty for the model itself."""
        return {self.name: "", **{name: self.name for name in self.loaded if name}}


def client_id(request_id: str) -> str:
    """The client's id of a request. Our ids append `#` and a suffix that distinguishes the completions of one request."""
    return request_id.rpartition("#")[0] or request_id


# --- The completions of one HTTP request, followed to their ends together.


@dataclass(frozen=True)
class Piece:
    index: int
    """Index of the completion within the request."""
    stream: Stream
    start: int
    """Tokens [start, stop) of it are new."""
    stop: int
    ended: bool

    @property
    def tokens(self) -> list[int]:
        return self.stream.tokens[self.start : self.stop].tolist()

    @property
    def logprobs(self) -> list[float]:
        return self.stream.logprobs[self.start : self.stop].tolist()


async def follow(serving: Serving, requests: Sequence[Request], whole: bool = False) -> AsyncGenerator[Piece, None]:
    """Yields the pieces of all completions as they arrive, and the end of each; with `whole`, only the ends. All completions
    are released on exit, normal or not. Raises the engine's refusals and failures."""
    streams: list[Stream] = []
    pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
    followers: list[asyncio.Task[None]] = []
    try:
        for index, request in enumerate(requests):
            streams.append(serving.submit(request))
            followers.append(asyncio.ensure_future(_pump(index, streams[-1], pieces, whole)))
        left = len(streams)
        while left:
            piece = await pieces.get()
            if isinstance(piece, Exception):
                raise piece
            left -= piece.ended
            yield piece
    finally:
        for follower in followers:
            follower.cancel()
        ending = [serving.release(stream) for stream in streams]
        await asyncio.gather(*followers, *ending, return_exceptions=True)


def check_end(piece: Piece) -> None:
    """Raises Refused for a completion that has failed: who reads its text would take what there is for an answer."""
    if piece.ended and piece.stream.end and piece.stream.end.error:
        raise Refused(500, f"the completion has failed: {piece.stream.end.error}", "engine_error")


async def to_their_ends(serving: Serving, requests: Sequence[Request]) -> list[Piece]:
    """Whole completions, in the order of the requests."""
    async with aclosing(follow(serving, requests, whole=True)) as pieces:
        return sorted([piece async for piece in pieces], key=lambda piece: piece.index)


async def _pump(index: int, stream: Stream, pieces: asyncio.Queue[Piece | Exception], whole: bool) -> None:
    seen = 0
    try:
        while await stream.more(seen):
            now = len(stream.tokens)
            if not whole:
                pieces.put_nowait(Piece(index, stream, seen, now, ended=False))
            seen = now
    except Exception as error:
        pieces.put_nowait(error)
        return
    pieces.put_nowait(Piece(index, stream, 0 if whole else seen, len(stream.tokens), ended=True))
