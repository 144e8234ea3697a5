"""The controller's socket, to which workers connect."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import secrets
import socket
import ssl
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import msgspec

from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.types import Struct
from headrace.processes.frames import receive_frame
from headrace.processes.joining.greeting import (
    AGREEING,
    HELLO_BYTES,
    HELLO_SECONDS,
    SAID_BYTES,
    SILENCE,
    SPARES,
    STRANGERS,
    Agreed,
    Arrival,
    Arrived,
    DoctorAnswer,
    DoctorQuestion,
    Hello,
    Kind,
    Terms,
    TurnedAway,
    Welcome,
    WitnessHello,
    WordsSaid,
    packed,
)
from headrace.processes.joining.returning import Returning
from headrace.processes.joining.same_model import differing, own_packages
from headrace.processes.joining.worker_log import WorkerLog
from headrace.processes.worker_place import PlaceSettings
from headrace.version import __version__
from headrace.web.limits import BACKLOG, Crowd, Guest, room_for_connections

M = TypeVar("M", bound=Struct)

Examine = Callable[[Hello, Callable[[DoctorQuestion], Awaitable[DoctorAnswer]]], Awaitable[None]]
"""Asks one worker."""


ENGINES: tuple[Kind, ...] = ("engine",)


_LIMIT = 1 << 24
"""Bytes of a connection that are read ahead."""

_AGAIN = 1.0
"""Seconds until a connection that could not be accepted (no memory, no descriptors) is accepted."""


class Spare(NamedTuple):
    """A worker without a seat."""

    kind: Kind
    place: asyncio.Future[Arrival]


class Listener:
    """The controller's socket, to which workers connect."""

    def __init__(
        self,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        terms: Terms | None = None,
        kinds: Collection[Kind] = ENGINES,
        code: Mapping[Kind, Terms] | None = None,
        tls: ssl.SSLContext | None = None,
        reconnect: float = 0.0,
        examine: Examine | None = None,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        """`terms`: those of workers that offer themselves; None if all workers have a seat. `kinds`: those that may; `code`: the terms of those
        of them that run the user's code. `reconnect`: seconds in which
        a worker may come back whose connection broke. `examine`: asks workers that offer themselves, who then get no seat. `say`: hears of the first connection of each
        kind that is turned away. Raises ConfigError for a token that could be guessed."""
        if len(token) < 16:
            raise ConfigError("the token that workers connect with is too short; use at least 16 random characters")
        self.token, self._host, self._port = token, host, port
        self.address = ""
        """HOST:PORT; empty until `open`."""
        self.turned_away: Counter[str] = Counter()
        self._terms, self._kinds, self._code, self._tls, self._say = terms, kinds, code or {}, tls, say
        self._expected: defaultdict[tuple[str, str], deque[Arrival]] = defaultdict(deque)
        self._spares: deque[Spare] = deque()
        """The workers without a seat, in the order in which they came."""
        self._reconnect, self._examine = reconnect, examine
        self._packages = own_packages()
        self._words: dict[str, WorkerLog] = {}
        """The logs of workers, by their sessions."""
        self._sessions: dict[str, Returning] = {}
        self._greetings: set[asyncio.Task[Any]] = set()
        self._crowd: Crowd
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Raises OSError if it cannot listen on that address."""
        loop = asyncio.get_running_loop()
        family, *_, where = (await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM))[0]
        self._listening = socket.create_server(where[:2], family=family, backlog=BACKLOG)
        self._listening.setblocking(False)
        host, port = self._listening.getsockname()[:2]
        self.address = f"{host}:{port}"
        self._crowd = Crowd(STRANGERS, room_for_connections())
        self._accepting = loop.create_task(self._accept(self._listening))

    def expect(self, kind: str, seat: str = "") -> Arrival:
        """A future of that worker. Without a seat it is the worker that has waited longest, or the next one to offer itself."""
        arrival: Arrival = asyncio.get_running_loop().create_future()
        self._enter(kind, seat, arrival)
        return arrival

    def _enter(self, kind: str, seat: str, arrival: Arrival, first: bool = False) -> None:
        for spare in [spare for spare in self._spares if spare.kind == kind and not seat]:
            self._spares.remove(spare)
            if not spare.place.done():
                spare.place.set_result(arrival)
                return
        queue = self._expected[kind, seat]
        queue.appendleft(arrival) if first else queue.append(arrival)

    async def close(self) -> None:
        """Workers that wait for a seat are told that the run is over."""
        if self._accepting and self._listening:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
            self._listening.close()
        for spare in self._spares:
            spare.place.cancel()
        if self._greetings:
            await asyncio.wait(self._greetings, timeout=1.0)
        for task in self._greetings:
            task.cancel()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, (peer, *_) = await loop.sock_accept(listening)
            except OSError:
                await asyncio.sleep(_AGAIN)
                continue
            task = loop.create_task(self._connected(sock, peer))
            self._greetings.add(task)
            task.add_done_callback(self._greetings.discard)
            await asyncio.sleep(0)  # those that were accepted before go on meanwhile

    async def _connected(self, sock: socket.socket, peer: str) -> None:
        """Greets a connection. Until it has introduced itself, it may have to make room for another one."""
        task = asyncio.current_task()
        assert task
        guest = self._crowd.came(functools.partial(self._make_room, task, peer))
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(_LIMIT)
        protocol = asyncio.StreamReaderProtocol(reader)
        tls: dict[str, Any] = {"ssl": self._tls, "ssl_handshake_timeout": HELLO_SECONDS} if self._tls else {}
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, **tls)
        except (OSError, asyncio.CancelledError) as error:  # asyncio has closed it
            if not isinstance(error, asyncio.CancelledError):
                self._count("garbage" if isinstance(error, ssl.SSLError) else "silent", peer)
            self._crowd.left(guest)
            return
        try:
            await self._greet(reader, asyncio.StreamWriter(transport, protocol, reader, loop), guest)
        finally:
            self._crowd.left(guest)

    def _make_room(self, task: asyncio.Task[None], peer: str) -> None:
        self._count("crowd", peer)
        task.cancel()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, guest: Guest) -> None:
        try:
            await self._seat(reader, writer, guest)
        except (OSError, HeadraceError, ValueError) as error:  # ValueError: no msgpack, or text that is not UTF-8
            await self._turn_away(writer, error)
        except asyncio.CancelledError:  # by `close`, or for another connection
            writer.close()

    async def _seat(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, guest: Guest) -> None:
        hello = await self._introduced(reader)
        self._crowd.asked(guest)
        if isinstance(hello, WitnessHello):
            await self._collect(hello, reader, writer)
            return
        if hello.session:
            self._take_back(hello, reader, writer)
            return
        if self._examine:
            await self._examine(hello, functools.partial(_asked, reader, writer))
            raise TurnedAway(
                "over", "the doctor has asked all that it wanted to know; the run takes its workers when it starts"
            )
        offers = self._terms is not None and not hello.seat
        model_dir = await self._agreed(hello.kind, reader, writer) if offers else ""
        arrival = self._free(hello)
        if arrival is None and offers:
            arrival = await self._spare(hello.kind, reader, writer)
        if arrival is None:
            raise TurnedAway("seat", f"the controller waits for no {hello.kind} now")
        session = secrets.token_hex(16) if offers or self._reconnect else ""
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                await _say(writer, Welcome(session=session, reconnect=self._reconnect))
        except BaseException:
            if not arrival.done():
                self._enter(hello.kind, hello.seat, arrival, first=True)
            raise
        if arrival.done():
            raise TurnedAway("seat")
        address = str(writer.get_extra_info("peername")[0])
        if not session:
            arrival.set_result(Arrived(reader, writer, hello, address, model_dir))
            return
        words = self._words[session] = WorkerLog()
        if not self._reconnect:
            arrival.set_result(Arrived(reader, writer, hello, address, model_dir, words=words))
            return
        who = f"the {hello.kind} on {hello.host or address} (process {hello.pid})"
        stream = self._sessions[session] = Returning(
            self._reconnect,
            lambda message: self._say(f"{who}: {message}"),
            lambda: self._forget(session),
        )
        stream.connect(reader, writer)
        arrival.set_result(Arrived(stream.reader, stream, hello, address, model_dir, words=words))

    def _forget(self, session: str) -> None:
        self._sessions.pop(session, None)

    def _take_back(self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = self._sessions.get(hello.session)
        if stream is None:
            raise TurnedAway(
                "session", "the run has given its seat away: it came back too late (orchestration.reconnect)"
            )
        stream.connect(reader, writer, hello.received, packed(Welcome(received=stream.received)))

    async def _collect(self, hello: WitnessHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Takes a worker's words from its witness, until it says that the worker has ended."""
        words = self._words.get(hello.session)
        if words is None:
            raise TurnedAway("session", "the run does not know its worker")
        with contextlib.suppress(OSError):  # the witness connects anew
            await _say(writer, Welcome())
            while not words.ended.is_set():
                words.take(await _first(reader, WordsSaid, SAID_BYTES))
                await _say(writer, Welcome())
        stream = self._sessions.get(hello.session)
        if stream and words.ended.is_set():
            stream.wait_no_more()
        writer.close()

    async def _introduced(self, reader: asyncio.StreamReader) -> Hello | WitnessHello:
        async with asyncio.timeout(HELLO_SECONDS):
            hello: Hello | WitnessHello = await _first(reader, Hello | WitnessHello)  # type: ignore[arg-type]
        if not hmac.compare_digest(hello.token.encode(), self.token.encode()):
            raise TurnedAway("token", "its token is not the controller's")
        _check_version(hello)
        if isinstance(hello, WitnessHello) or self._examine:
            return hello
        if self._terms and not hello.seat and (differ := differing(hello.packages, self._packages)):
            raise TurnedAway(
                "packages", f"it has {differ}: install the same, because other versions compute other numbers"
            )
        if self._terms and not hello.seat and hello.kind not in self._kinds:
            raise TurnedAway("seat", f"this run takes no {hello.kind} from elsewhere ({_SETTINGS[hello.kind]})")
        return hello

    async def _agreed(self, kind: Kind, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """Returns the directory of the model on the worker's machine; empty if it needs none."""
        await _say(writer, Welcome(terms=self._code.get(kind, self._terms)))
        async with asyncio.timeout(AGREEING):
            answer = await _first(reader, Agreed)
        if answer.unable:
            raise TurnedAway("code" if kind in self._code else "model")
        return answer.model_dir

    def _free(self, hello: Hello) -> Arrival | None:
        queue = self._expected[hello.kind, hello.seat]
        while queue:
            if not (arrival := queue.popleft()).done():
                return arrival
        del self._expected[hello.kind, hello.seat]
        return None

    async def _spare(self, kind: Kind, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Arrival:
        """Waits until there is a seat for this worker."""
        if len(self._spares) >= SPARES:
            raise TurnedAway("crowd", f"{SPARES} workers wait for a seat already")
        place: asyncio.Future[Arrival] = asyncio.get_running_loop().create_future()
        self._spares.append(spare := Spare(kind, place))
        gone = asyncio.ensure_future(reader.read(1))  # a worker that waits says nothing
        either: list[asyncio.Future[Any]] = [place, gone]
        try:
            while not place.done() and not gone.done():
                async with asyncio.timeout(HELLO_SECONDS):
                    await _say(writer, Welcome(waiting=True))
                await asyncio.wait(either, timeout=SILENCE, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            self._give_back(spare)
            raise
        finally:
            gone.cancel()
            await asyncio.wait([gone])
        if place.cancelled():
            raise TurnedAway("over", "the run is over")
        if not gone.cancelled():
            self._give_back(spare)
            raise TurnedAway("left")
        return place.result()

    def _give_back(self, spare: Spare) -> None:
        """Frees the seat that a worker was given while it left."""
        if spare.place.done() and not spare.place.cancelled():
            self._enter(spare.kind, "", spare.place.result(), first=True)
        elif spare in self._spares:
            self._spares.remove(spare)

    async def _turn_away(self, writer: asyncio.StreamWriter, error: Exception) -> None:
        reason = error.reason if isinstance(error, TurnedAway) else "garbage"
        if isinstance(error, (TimeoutError, OSError)):
            reason = "silent"
        if reason not in ("over", "left"):
            self._count(reason, (writer.get_extra_info("peername") or [""])[0])
        with contextlib.suppress(OSError, TimeoutError):
            if str(error) and isinstance(error, TurnedAway):
                async with asyncio.timeout(HELLO_SECONDS):
                    await _say(writer, Welcome(str(error), over=reason == "over"))
        writer.close()

    def _count(self, reason: str, peer: str = "") -> None:
        self.turned_away[reason] += 1
        if self.turned_away[reason] == 1:
            self._say(f"a connection from {peer or 'an unknown address'} was turned away: {REASONS[reason]}")


@asynccontextmanager
async def listening(listener: Listener, settings: PlaceSettings, say: Callable[[str], None]) -> AsyncIterator[Listener]:
    """The listener, open. Says in the end which connections were turned away. Raises ConfigError if it cannot listen there."""
    try:
        await listener.open()
    except OSError as error:
        raise ConfigError(
            f"orchestration.listen = {settings.listen}: {error.strerror or error}; choose another port, or an address of this machine"
        ) from None
    try:
        yield listener
    finally:
        await listener.close()
        if listener.turned_away:
            counts = ", ".join(f"{reason} {count}" for reason, count in sorted(listener.turned_away.items()))
            say(f"connections that were turned away at {listener.address}: {counts}")


def _check_version(hello: Hello | WitnessHello) -> None:
    if hello.version != __version__:
        raise TurnedAway(
            "version",
            f"it is headrace {hello.version}, and the controller is {__version__}: install the same on both machines",
        )


async def _asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, question: DoctorQuestion) -> DoctorAnswer:
    await _say(writer, Welcome(question=question))
    return await _first(reader, DoctorAnswer)


_SETTINGS: dict[Kind, str] = {
    "engine": 'orchestration.kind = "local"',
    "trainer": 'orchestration.trainer = "local"',
    "scorer": "orchestration.scorers = 0",
    "environment": "orchestration.environments = 0",
}
"""The setting by which workers of a kind are not awaited."""

REASONS = {
    "code": "its worker does not have the run's files of functions or environments (it says why)",
    "crowd": "there are too many connections",
    "garbage": "it sent something else than a headrace worker would",
    "model": "its worker does not have the run's model (it says why)",
    "packages": "it has other versions of packages that decide what an engine computes (its worker says which)",
    "seat": "no seat of that kind is free",
    "session": "its worker came back after its seat was given away",
    "silent": "it introduced itself too late, or not at all",
    "token": "its token is not the run's",
    "version": "it is another version of headrace",
}
"""The reasons for which connections are turned away."""


async def _first(reader: asyncio.StreamReader, kind: type[M], limit: int = HELLO_BYTES) -> M:
    return msgspec.msgpack.decode(await receive_frame(reader, limit), type=kind)


async def _say(writer: asyncio.StreamWriter, what: Struct) -> None:
    writer.write(packed(what))
    await writer.drain()
