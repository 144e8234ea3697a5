"""Frames between the controller and a worker: length-prefixed msgpack over a stream (a socket pair, TCP).

A call carries an id and gets one reply; a push has id 0 and gets none. Payloads are the nouns of `types.py`.

Every frame of either end carries a running number: one that comes again is ignored, one that is missing ends the connection
with a sentence that names it. So nothing is told twice, and nothing is lost in silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import msgspec

from headrace import errors
from headrace.errors import HeadraceError, WorkerDied

T = TypeVar("T")
_LENGTH = struct.Struct("<I")
HEAD = _LENGTH.size
"""Bytes before each frame: its length."""

MAX_FRAME = 1 << 30
"""Bytes of a frame. A batch of 1,024 completions of 16,384 tokens has 0.5 GB; what is longer is a mistake, or a stranger."""

_AROUND = 1024
"""Bytes of a frame beside its payload, at most."""

BEAT = "beat"
"""A push that says nothing but that its sender is there."""

BEATS = 5
"""How many may be missing in a row."""

WHILE_STARTING = 12
"""So many times as many until the first call is answered: a process that imports and loads holds Python's lock for seconds."""


class Frame(msgspec.Struct, frozen=True):
    id: int
    method: str
    payload: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str = ""
    """The name of the exception class, on replies that failed; the payload is then its message."""
    number: int = 0
    """The first that an end sends has 0."""


_encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Frame).decode


def pack_payload(payload: Any) -> msgspec.Raw:
    return msgspec.Raw(_encode(payload))


def pack(frame: Frame) -> bytes:
    body = _encode(frame)
    return _LENGTH.pack(len(body)) + body


def numbered(frame: Frame, numbers: Iterator[int]) -> bytes:
    """Packed, with the next running number. Raises ValueError for a frame that nobody would read; it takes no number."""
    if (size := len(memoryview(frame.payload)) + _AROUND) > MAX_FRAME:
        raise ValueError(
            f"{frame.method} would be a message of {size / 1e9:.1f} GB, and none has more than {MAX_FRAME / 1e9:.1f}; lower "
            "staleness.groups_per_step, rollout.group_size or rollout.max_tokens"
        )
    return pack(msgspec.structs.replace(frame, number=next(numbers)))


def length_of(head: bytes, limit: int = MAX_FRAME) -> int:
    """Raises HeadraceError for one above the limit."""
    (length,) = _LENGTH.unpack(head)
    if length > limit:
        raise HeadraceError(f"a message of {length} bytes came, and none has more than {limit}")
    return int(length)


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


class Writer(Protocol):
    """The half of an `asyncio.StreamWriter` that a `Channel` uses."""

    def write(self, data: bytes) -> None: ...

    def is_closing(self) -> bool: ...

    def close(self) -> None: ...


class Channel:
    """The controller's end: calls with replies, and a handler for what the worker pushes."""

    def __init__(
        self,
        who: str,
        heard: Callable[[str, msgspec.Raw], None],
        on_lost: Callable[[str], None],
        silence: float | None = None,
    ) -> None:
        """`heard` is called with method and payload of each push. `on_lost` is called with what is wrong; with nothing where the
        other end is just gone. `silence`: seconds without a byte after which the other end counts as lost; it is expected to send
        beats. None: the kernel says when it is gone."""
        self._who, self._heard, self._on_lost, self._silence = who, heard, on_lost, silence
        self._ids, self._numbers, self._arrived = itertools.count(1), itertools.count(), _Numbers(who)
        self._replies: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._writer: Writer | None = None
        self._reading: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._quiet = 0
        """Beats since the last byte came."""
        self._answered = False
        """The other end has replied to a call."""
        self._ended = False
        """Nobody reads answers any more."""

    def open(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        self._writer = writer
        loop = asyncio.get_running_loop()
        self._reading = loop.create_task(self._read(reader))
        if self._silence:
            self._beating = loop.create_task(self._beat(self._silence))

    async def call(self, method: str, payload: Any, returns: type[T]) -> T:
        """Raises what the worker raised (by kind, see `exception_of`), or `WorkerDied`."""
        frame_id = next(self._ids)
        reply: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._replies[frame_id] = reply
        try:
            self._write(frame_id, method, payload)
            return unpack(await reply, returns)
        finally:
            self._replies.pop(frame_id, None)

    def push(self, method: str, payload: Any) -> None:
        self._write(0, method, payload)

    def _write(self, frame_id: int, method: str, payload: Any) -> None:
        if self._writer is None or self._ended or self._writer.is_closing():
            raise WorkerDied(self._who, "has closed its connection")
        self._writer.write(numbered(Frame(frame_id, method, pack_payload(payload)), self._numbers))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        wrong = ""
        try:
            while True:
                frame = decode(await self._exactly(reader, length_of(await self._exactly(reader, HEAD))))
                if self._arrived.new(frame):
                    self._take(frame)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:  # nobody else hears of what ends this task
            wrong = str(error) if isinstance(error, HeadraceError) else repr(error)
        self._lose(wrong)

    async def _exactly(self, reader: asyncio.StreamReader, count: int) -> bytes:
        """Piece by piece: whoever sends a large frame is not silent."""
        pieces = []
        while count:
            piece = await reader.read(count)
            if not piece:
                raise asyncio.IncompleteReadError(b"", count)
            self._quiet = 0
            pieces.append(piece)
            count -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _beat(self, silence: float) -> None:
        """Counts beats, not seconds: where this process itself stood still, what has come meanwhile is read before the next."""
        while self._quiet <= BEATS * (1 if self._answered else WHILE_STARTING) and not self._ended:
            await asyncio.sleep(silence / BEATS)
            self._quiet += 1
            with contextlib.suppress(WorkerDied):
                self.push(BEAT, None)
        if not self._ended:
            assert self._reading
            self._reading.cancel()
            self._lose(f"it said nothing for {silence * self._quiet / BEATS:.3g} seconds")

    def _lose(self, wrong: str) -> None:
        self._end(wrong or "ended in the middle of a call")
        self._on_lost(wrong)

    def _end(self, why: str) -> None:
        self._ended = True
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(WorkerDied(self._who, why))

    def _take(self, frame: Frame) -> None:
        if frame.id == 0:
            if frame.method != BEAT:
                self._heard(frame.method, frame.payload)
            return
        self._answered = True
        if (reply := self._replies.get(frame.id)) and not reply.done():
            if frame.error:
                reply.set_exception(exception_of(frame.error, unpack(frame.payload, str)))
            else:
                reply.set_result(frame.payload)

    async def close(self) -> None:
        if self._writer:
            self._writer.close()
        for task in (self._reading, self._beating):
            if task:
                task.cancel()
        self._end("was closed in the middle of a call")


class WorkerEnd:
    """The worker's end: blocking reads, writes from any thread."""

    def __init__(self, sock: socket.socket, silence: float | None = None) -> None:
        """`silence`: seconds without a byte after which the controller counts as gone. A thread sends it beats then."""
        self._sock = sock
        sock.settimeout(silence)
        self._file = sock.makefile("rb")
        self._lock, self._numbers, self._arrived = threading.Lock(), itertools.count(), _Numbers("controller")

    def receive(self) -> Frame | None:
        """None when the controller is gone: the worker then ends, whatever it is doing."""
        while (frame := self._receive()) is not None:
            if self._arrived.new(frame) and frame.method != BEAT:
                break
        return frame

    def _receive(self) -> Frame | None:
        try:
            head = self._file.read(HEAD)
            if len(head) < HEAD:
                return None
            length = length_of(head)
            body = self._file.read(length)
        except (ConnectionError, TimeoutError):  # killed with replies of ours unread: a reset, not an end of file
            return None
        return decode(body) if len(body) == length else None

    def beat(self, seconds: float) -> None:
        """Until the connection ends; for a thread of its own."""
        stop = threading.Event()
        with contextlib.suppress(OSError):
            while not stop.wait(seconds):
                self.push(BEAT, None)

    def reply(self, to: Frame, payload: Any) -> None:
        self._send(to.id, to.method, payload)

    def fail(self, to: Frame, error: str, message: str) -> None:
        self._send(to.id, to.method, message, error)

    def push(self, method: str, payload: Any) -> None:
        self._send(0, method, payload)

    def _send(self, frame_id: int, method: str, payload: Any, error: str = "") -> None:
        frame = Frame(frame_id, method, pack_payload(payload), error)
        with self._lock:
            self._sock.sendall(numbered(frame, self._numbers))
