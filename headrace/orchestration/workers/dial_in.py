"""Workers that connect to the controller over TCP: both ends.

    controller                               worker
    Listener.open     listens                dial       connects to HOST:PORT
                      ◀── Hello ────────────            version of headrace, token, what it is and for which seat
                      ─── Welcome ─────────▶            empty, or why it is turned away
    Channel           ◀═══ frames, beats ══▶ WorkerEnd

A connection is not trusted until its first frame was read. That frame must be small and arrive soon, and its token is compared in
constant time. Connections that fail are refused and counted by reason.

A worker that is silent for `SILENCE` seconds counts as lost, whatever the state of its TCP connection: a machine without power closes no
connection. Both ends send beats. A worker that has not answered its first call yet (it loads a model) has `wire.WHILE_STARTING` times as
long.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.errors import ConfigError, HeadraceError
from headrace.orchestration.workers.connected import ConnectedWorker
from headrace.orchestration.workers.launch.child import ChildProcess
from headrace.orchestration.workers.wire import BEATS, HEAD, WorkerEnd, length_of
from headrace.protocols import Heard, Job
from headrace.types import Struct
from headrace.version import __version__

SILENCE = 5.0
"""Seconds of silence after which a worker counts as lost."""

DESERTED = 60.0
"""Seconds of silence after which a worker ends itself, because the controller's machine must be gone."""

HELLO_BYTES, HELLO_SECONDS, STRANGERS = 4096, 10.0, 64
"""Limits of a first frame: its size in bytes, its deadline in seconds, and how many are awaited at the same time."""

ARRIVAL = 300.0
"""Seconds in which a started process must connect."""

TOKEN, SEAT = "HEADRACE_TOKEN", "HEADRACE_SEAT"
"""Environment variables of a worker. The token is no argument, because every user of the machine can read those."""

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Hello(Struct, frozen=True, tag="headrace"):
    version: str
    token: str
    kind: Literal["engine", "trainer"]
    seat: str = ""
    """The place of the worker. Empty for one that was started by hand: it takes any free place."""


class Welcome(Struct, frozen=True):
    refused: str = ""


class TurnedAway(HeadraceError):
    """`reason` is counted. The message is sent to the worker; it is empty for a connection that is not one."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class Listener:
    """The controller's socket, to which workers connect."""

    def __init__(self, token: str, host: str = "127.0.0.1", port: int = 0) -> None:
        """Raises ConfigError for a token that could be guessed."""
        if len(token) < 16:
            raise ConfigError("the token that workers connect with is too short; use at least 16 random characters")
        self.token, self._host, self._port = token, host, port
        self.address = ""
        """HOST:PORT; empty until `open`."""
        self.turned_away: Counter[str] = Counter()
        self._expected: dict[tuple[str, str], asyncio.Future[Stream]] = {}
        self._strangers = 0
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Raises OSError if it cannot listen on that address."""
        self._server = await asyncio.start_server(self._greet, self._host, self._port, limit=1 << 24)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"

    def expect(self, kind: str, seat: str = "") -> asyncio.Future[Stream]:
        """A future of the connection of that worker."""
        arrival: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        self._expected[kind, seat] = arrival
        return arrival

    async def close(self) -> None:
        if self._server:
            self._server.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._strangers += 1
        try:
            if self._strangers > STRANGERS:
                raise TurnedAway("crowd")
            async with asyncio.timeout(HELLO_SECONDS):
                arrival = self._seat_of(await _first(reader, Hello))
                await _say(writer, Welcome())
            arrival.set_result((reader, writer))
        except (TurnedAway, TimeoutError, OSError, EOFError, HeadraceError, msgspec.MsgspecError) as error:
            await self._turn_away(writer, error)
        finally:
            self._strangers -= 1

    async def _turn_away(self, writer: asyncio.StreamWriter, error: Exception) -> None:
        reason = error.reason if isinstance(error, TurnedAway) else "garbage"
        if isinstance(error, (TimeoutError, EOFError, OSError)):
            reason = "silent"
        self.turned_away[reason] += 1
        with contextlib.suppress(OSError, TimeoutError):
            if str(error) and isinstance(error, TurnedAway):
                async with asyncio.timeout(HELLO_SECONDS):
                    await _say(writer, Welcome(str(error)))
        writer.close()

    def _seat_of(self, hello: Hello) -> asyncio.Future[Stream]:
        if not hmac.compare_digest(hello.token.encode(), self.token.encode()):
            raise TurnedAway("token", "its token is not the controller's")
        if hello.version != __version__:
            raise TurnedAway(
                "version",
                f"it is headrace {hello.version}, and the controller is {__version__}: install the same on both machines",
            )
        arrival = self._expected.pop((hello.kind, hello.seat), None)
        if arrival is None or arrival.done():
            raise TurnedAway("seat", f"the controller waits for no {hello.kind} now")
        return arrival


async def _first(reader: asyncio.StreamReader, kind: type[Hello]) -> Hello:
    length = length_of(await reader.readexactly(HEAD), HELLO_BYTES)
    return msgspec.msgpack.decode(await reader.readexactly(length), type=kind)


async def _say(writer: asyncio.StreamWriter, what: Struct) -> None:
    writer.write(_packed(what))
    await writer.drain()


def _packed(what: Struct) -> bytes:
    body = msgspec.msgpack.encode(what)
    return struct.pack("<I", len(body)) + body


# -- at the controller ------------------------------------------------------------------------------------------------------


class DialInLauncher:
    """Protocol `Launcher`: starts processes on this machine, which connect over TCP as those of other machines would."""

    def __init__(self, logs: Path, listener: Listener, silence: float = SILENCE) -> None:
        self._logs, self._listener, self._silence = logs, listener, silence

    def worker(self, job: Job, heard: Heard) -> DialInWorker:
        return DialInWorker(job, ChildProcess(job.who, self._logs), self._listener, heard, self._silence)


class DialInWorker(ConnectedWorker):
    """Protocol `Worker`."""

    def __init__(
        self, job: Job, process: ChildProcess, listener: Listener, heard: Heard, silence: float = SILENCE
    ) -> None:
        super().__init__(job.who, heard, silence)
        self._job, self._process, self._listener = job, process, listener

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self) -> None:
        """Returns when the worker has connected or is lost (`watch` then says how)."""
        self._begin()
        seat = secrets.token_hex(8)
        arrival = self._listener.expect(self._job.kind, seat)
        try:
            lifeline = self._spawn(seat)
        except OSError as error:
            raise self._not_started(error) from error
        if await self._arrives(arrival, lifeline):
            self.channel.open(*arrival.result())

    def _spawn(self, seat: str) -> int:
        """Starts the process, and returns our end of a pipe. The kernel closes the other end when the process ends, whatever ends it."""
        ours, theirs = os.pipe()
        variables = {TOKEN: self._listener.token, SEAT: seat}
        try:
            self._process.spawn(self._job, ["--connect", self._listener.address], [theirs], variables)
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return ours

    async def _arrives(self, arrival: asyncio.Future[Stream], lifeline: int) -> bool:
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[None] = loop.create_future()
        loop.add_reader(lifeline, gone.cancel)
        try:
            waited: list[asyncio.Future[Any]] = [arrival, gone]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED, timeout=ARRIVAL)
        finally:
            loop.remove_reader(lifeline)
            os.close(lifeline)
        if not arrival.done():
            self._lost("" if gone.done() else f"it did not connect within {ARRIVAL:g} seconds")
            arrival.cancel()
            return False
        return True

    async def end(self) -> None:
        await self.channel.close()
        await self._process.end()

    def kill(self) -> None:
        self._process.kill()

    async def _how_it_ended(self, wrong: str) -> str:
        return await asyncio.to_thread(self._process.how_it_ended, wrong)


# -- at the worker ----------------------------------------------------------------------------------------------------------


def dial(address: str, kind: Literal["engine", "trainer"], token: str, seat: str = "") -> WorkerEnd:
    """Connects to the controller. Raises OSError if nothing listens there, and ConfigError with the controller's reason if it refuses."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=HELLO_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(_packed(Hello(__version__, token, kind, seat)))
    welcome = msgspec.msgpack.decode(_received(sock, length_of(_received(sock, HEAD), HELLO_BYTES)), type=Welcome)
    if welcome.refused:
        raise ConfigError(f"the controller at {address} refused this {kind}: {welcome.refused}")
    end = WorkerEnd(sock, DESERTED)
    threading.Thread(target=end.beat, args=(SILENCE / BEATS,), daemon=True).start()
    return end


def _received(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionError(
                "the controller closed the connection without an answer; is it a headrace controller?"
            )
        data += piece
    return data
