"""Frames between the controller and a worker process: length-prefixed msgpack over a socket pair that both inherit.

A call carries an id and gets one reply; a push has id 0 and gets none. Payloads are the nouns of `types.py`.

Every frame of either end carries a running number: one that comes again is ignored, one that is missing ends the connection
with a sentence that names it. So nothing is told twice, and nothing is lost in silence.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from headrace import errors
from headrace.errors import HeadraceError, WorkerDied

T = TypeVar("T")
_LENGTH = struct.Struct("<I")


class Frame(msgspec.Struct, frozen=True):
    id: int
    method: str
    payload: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str = ""
    """The name of the exception class, on replies that failed; the payload is then its message."""
    number: int = 0
    """The first that an end sends has 0."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Frame).decode


def pack_payload(payload: Any) -> msgspec.Raw:
    return msgspec.Raw(_encode(payload))


def pack(frame: Frame) -> bytes:
    body = _encode(frame)
    return _LENGTH.pack(len(body)) + body


class _Numbers:
    """Of the frames that come."""

    def __init__(self, who: str) -> None:
        self._who, self._next = who, 0

    def new(self, frame: Frame) -> bool:
        """False for one that was here before. Raises HeadraceError where some are missing before it."""
        if frame.number > self._next:
            lost = f"{self._next} to {frame.number - 1}" if frame.number > self._next + 1 else f"{self._next}"
            raise HeadraceError(
                f"message {lost} of the {self._who} is lost: number {frame.number} ({frame.method or 'a reply'}) came in its place"
            )
        if frame.number < self._next:
            return False
        self._next += 1
        return True


def unpack(payload: msgspec.Raw, as_type: type[T]) -> T:
    return msgspec.msgpack.decode(payload, type=as_type)


_BY_NAME: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "OSError": OSError,
    "ConfigError": errors.ConfigError,
    "IdentityError": errors.IdentityError,
    "TrainingError": errors.TrainingError,
    "CheckpointError": errors.CheckpointError,
}


def exception_of(name: str, message: str) -> Exception:
    """What the worker raised, if it is one that callers tell apart; else a `HeadraceError` that carries its traceback."""
    return _BY_NAME.get(name, HeadraceError)(message)


def name_of(error: BaseException) -> str:
    """The most specific name in `_BY_NAME`, or the class's own."""
    for kind in type(error).__mro__:
        if kind.__name__ in _BY_NAME:
            return kind.__name__
    return type(error).__name__


class Channel:
    """The controller's end: calls with replies, and a handler for what the worker pushes."""

    def __init__(self, who: str, on_push: Callable[[Frame], None], on_lost: Callable[[str], None]) -> None:
        """`on_lost` is told what is wrong with what came; nothing where the other end is just gone."""
        self._who, self._on_push, self._on_lost = who, on_push, on_lost
        self._ids, self._numbers, self._arrived = itertools.count(1), itertools.count(), _Numbers(who)
        self._replies: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ended = False
        """Nobody reads answers any more."""

    async def open(self, sock: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=sock, limit=1 << 24)
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))

    async def call(self, method: str, payload: Any, returns: type[T]) -> T:
        """Raises what the worker raised (by kind, see `exception_of`), or `WorkerDied`."""
        frame_id = next(self._ids)
        reply: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._replies[frame_id] = reply
        try:
            self._write(Frame(frame_id, method, pack_payload(payload), number=next(self._numbers)))
            return unpack(await reply, returns)
        finally:
            self._replies.pop(frame_id, None)

    def push(self, method: str, payload: Any) -> None:
        self._write(Frame(0, method, pack_payload(payload), number=next(self._numbers)))

    def _write(self, frame: Frame) -> None:
        if self._writer is None or self._ended or self._writer.is_closing():
            raise WorkerDied(self._who, "has closed its connection")
        self._writer.write(pack(frame))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        wrong = ""
        try:
            while True:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                frame = _decode(await reader.readexactly(length))
                if self._arrived.new(frame):
                    self._take(frame)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:  # nobody else hears of what ends this task
            wrong = str(error) if isinstance(error, HeadraceError) else repr(error)
        self._end(wrong or "ended in the middle of a call")
        self._on_lost(wrong)

    def _end(self, why: str) -> None:
        self._ended = True
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(WorkerDied(self._who, why))

    def _take(self, frame: Frame) -> None:
        if frame.id == 0:
            self._on_push(frame)
        elif (reply := self._replies.get(frame.id)) and not reply.done():
            if frame.error:
                reply.set_exception(exception_of(frame.error, unpack(frame.payload, str)))
            else:
                reply.set_result(frame.payload)

    async def close(self) -> None:
        if self._writer:
            self._writer.close()
        if self._reading:
            self._reading.cancel()
        self._end("was closed in the middle of a call")


class WorkerEnd:
    """The worker's end: blocking reads, writes from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")
        self._lock, self._numbers, self._arrived = threading.Lock(), itertools.count(), _Numbers("controller")

    def receive(self) -> Frame | None:
        """None when the controller is gone: the worker then ends, whatever it is doing."""
        while (frame := self._receive()) is not None and not self._arrived.new(frame):
            pass
        return frame

    def _receive(self) -> Frame | None:
        try:
            head = self._file.read(_LENGTH.size)
            if len(head) < _LENGTH.size:
                return None
            (length,) = _LENGTH.unpack(head)
            body = self._file.read(length)
        except ConnectionError:  # killed with replies of ours unread: a reset, not an end of file
            return None
        return _decode(body) if len(body) == length else None

    def reply(self, to: Frame, payload: Any) -> None:
        self._send(to.id, to.method, payload)

    def fail(self, to: Frame, error: str, message: str) -> None:
        self._send(to.id, to.method, message, error)

    def push(self, method: str, payload: Any) -> None:
        self._send(0, method, payload)

    def _send(self, frame_id: int, method: str, payload: Any, error: str = "") -> None:
        told = pack_payload(payload)
        with self._lock:
            self._sock.sendall(pack(Frame(frame_id, method, told, error, next(self._numbers))))
