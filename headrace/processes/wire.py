"""Messages between the controller and a worker: frames of msgpack (`frames.py`) over a stream (a socket pair, TCP).

A call carries an id and gets one reply; a push has id 0 and gets none. Payloads are the nouns of `types.py`.

The frames of each end are numbered. A repeated frame is ignored; a missing one ends the connection with an error that names it. So no
message is processed twice, and none is lost in silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from headrace.core import errors
from headrace.core.errors import HeadraceError, UnexpectedError, WorkerDied
from headrace.core.printing import echo_traceback
from headrace.core.protocols import Heard
from headrace.processes.frames import LONGEST, framed, read_frame, receive_frame

T = TypeVar("T")
_AROUND = 1024
"""Most bytes of a frame in addition to its payload."""

BEAT = "beat"
"""The method of an empty push that shows that its sender is alive."""

BEATS = 5
"""The number of consecutive beats that may be missing."""

WHILE_STARTING = 12
"""The factor on `BEATS` until the first call is answered: a process that imports and loads holds Python's lock for seconds."""


VERDICT = 5.0
"""Seconds in which the end of a lost process is explained."""


def noticed_after(silence: float, away: float, starting: bool = False) -> float:
    """Returns the seconds after which the loss of a worker elsewhere is known at the latest. `silence`, `away`: as for `Channel`. `starting`:
    whether it has answered no call yet."""
    missing = BEATS * (WHILE_STARTING if starting else 1)
    return silence / BEATS * (missing + 1) + away + VERDICT


class RankStart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the first message to a trainer's rank that is known once the rank is connected."""

    door: str = ""
    """HOST:PORT at which this rank listens, if it is elsewhere; empty for a child of the run."""


class Frame(msgspec.Struct, frozen=True):
    id: int
    method: str
    payload: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str = ""
    """The name of the exception class, on replies that failed; the payload is then its message."""
    number: int = 0
    """Counts the frames that an end sends, from 0."""


_encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Frame).decode


def pack_payload(payload: Any) -> msgspec.Raw:
    return msgspec.Raw(_encode(payload))


def pack(frame: Frame) -> bytes:
    return framed(_encode(frame))


def numbered(frame: Frame, numbers: Iterator[int]) -> bytes:
    """Packs a frame under the next number. Raises ValueError for one that is too long for the other end; it uses up no number."""
    if (size := len(memoryview(frame.payload)) + _AROUND) > LONGEST:
        raise ValueError(
            f"{frame.method} would be a message of {size / 1e9:.1f} GB, and the limit is {LONGEST / 1e9:.1f} GB; lower rollout.max_tokens"
        )
    return pack(msgspec.structs.replace(frame, number=next(numbers)))


class _Numbers:
    """Checks the numbers of received frames."""

    def __init__(self, who: str) -> None:
        self._who, self._next = who, 0

    def new(self, frame: Frame) -> bool:
        """False for a frame that was received before. Raises HeadraceError if frames before it are missing."""
        if frame.number > self._next:
            lost = f"{self._next} to {frame.number - 1}" if frame.number > self._next + 1 else f"{self._next}"
            raise HeadraceError(
                f"message {lost} of the {self._who} is lost: number {frame.number} ({frame.method or 'a reply'}) was received instead"
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
    "RankUnreachable": errors.RankUnreachable,
}


def exception_of(name: str, message: str) -> Exception:
    """The worker's exception, if callers distinguish its class; else an `UnexpectedError` with its traceback."""
    return _BY_NAME.get(name, UnexpectedError)(message)


def name_of(error: BaseException) -> str:
    """The most specific name in `_BY_NAME`; otherwise the class's own name."""
    for kind in type(error).__mro__:
        if kind.__name__ in _BY_NAME:
            return kind.__name__
    return type(error).__name__


class Writer(Protocol):
    """The methods of `asyncio.StreamWriter` that a `Channel` uses."""

    def write(self, data: bytes) -> None: ...

    def is_closing(self) -> bool: ...

    def close(self) -> None: ...


class Channel:
    """The controller's end: makes calls, and passes pushes of the worker to a handler."""

    def __init__(
        self,
        who: str,
        heard: Callable[[str, msgspec.Raw], None],
        on_lost: Callable[[str], None],
        silence: float | None = None,
        away: float = 0.0,
    ) -> None:
        """`heard` is called with method and payload of each push. `on_lost` is called with the error that ended the connection, or with an
        empty string if the other end closed it. `silence`: seconds without a byte after which the other end counts as lost; it must
        send beats then. None: no limit, because the kernel reports the end. `away`: further seconds, in which its connection may be made anew."""
        self._away = away
        self._who, self._heard, self._on_lost = who, heard, on_lost
        self.silence = silence
        """May be changed while the channel is open, but for None."""
        self._ids, self._numbers, self._arrived = itertools.count(1), itertools.count(), _Numbers(who)
        self._replies: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._writer: Writer | None = None
        self._reading: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._quiet = 0
        """Beats since the last byte was received."""
        self._answered = False
        """Whether the other end has replied to a call."""
        self._ended = False
        """Whether the connection has ended, so that no reply can arrive."""

    def open(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        self._writer = writer
        loop = asyncio.get_running_loop()
        self._reading = loop.create_task(self._read(reader))
        if self.silence:
            self._beating = loop.create_task(self._beat())

    async def call(self, method: str, payload: Any, returns: type[T]) -> T:
        """Raises the worker's exception (see `exception_of`), or `WorkerDied`."""
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
                frame = decode(await receive_frame(reader, heard=self._heard_byte))
                if self._arrived.new(frame):
                    self._take(frame)
        except ConnectionError:
            pass
        except Exception as error:  # else this task would end in silence
            wrong = str(error) if isinstance(error, HeadraceError) else repr(error)
        self._lose(wrong)

    def _heard_byte(self) -> None:
        self._quiet = 0

    async def _beat(self) -> None:
        """Counts beats, not seconds: if this process itself was suspended, it reads what has arrived before it counts the next beat."""
        while self._quiet <= self._most_quiet and not self._ended:
            await asyncio.sleep(self._interval)
            self._quiet += 1
            with contextlib.suppress(WorkerDied):
                self.push(BEAT, None)
        if not self._ended:
            assert self._reading
            self._reading.cancel()
            self._lose(f"it was silent for {self._interval * self._quiet:.3g} seconds")

    @property
    def late(self) -> float:
        """Seconds after which the loss of the other end is known at the latest. Of a process of this machine the kernel reports it at once."""
        return noticed_after(self.silence, self._away, starting=not self._answered) if self.silence else 0.0

    @property
    def _interval(self) -> float:
        """Seconds between two beats."""
        assert self.silence
        return self.silence / BEATS

    @property
    def _most_quiet(self) -> float:
        return BEATS * (1 if self._answered else WHILE_STARTING) + self._away / self._interval

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


class ReadableFile(Protocol):
    def read(self, count: int, /) -> bytes: ...


class ByteSocket(Protocol):
    """The methods of a socket that a `WorkerEnd` uses."""

    def settimeout(self, seconds: float | None, /) -> None: ...

    def makefile(self, mode: Literal["rb"], /) -> ReadableFile: ...

    def sendall(self, data: bytes, /) -> None: ...


class WorkerEnd:
    """The worker's end: reads block, and any thread may write."""

    def __init__(self, sock: ByteSocket, silence: float | None = None, door: socket.socket | None = None) -> None:
        """`silence`: seconds without a byte after which the controller counts as gone. The caller must then run `beat` in a thread. `door`:
        the socket at which a trainer's worker listens for other ranks, if it is elsewhere."""
        self._sock, self.door = sock, door
        self.last_acts = list[Callable[[], object]]()
        """Called before the process ends because its connection has, or because the run needs it no more."""
        sock.settimeout(silence)
        self._file = sock.makefile("rb")
        self._lock, self._numbers, self._arrived = threading.Lock(), itertools.count(), _Numbers("controller")

    def receive(self) -> Frame | None:
        """The next frame; None if the controller is gone. The worker must then end, whatever it is doing."""
        while (frame := self._receive()) is not None:
            if self._arrived.new(frame) and frame.method != BEAT:
                break
        return frame

    def _receive(self) -> Frame | None:
        try:
            return decode(read_frame(self._file.read))
        except (
            ConnectionError,
            TimeoutError,
        ):  # killed before it read our replies: that is a reset, not an end of file
            return None

    def beat(self, seconds: float) -> None:
        """Sends a beat every `seconds` until the connection ends. Runs in a thread of its own."""
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


# --- A worker's reply to a call (the result
# A worker's reply to a call (the result, or the name and message of the exception), and the end of its start.


def answer(end: WorkerEnd, frame: Frame, work: Callable[[], Any]) -> None:
    """Replies with the result of `work`, or with its exception."""
    try:
        result = work()
    except Exception as error:
        fail(end, frame, error)
    else:
        end.reply(frame, result)


def vital(work: Callable[[], None]) -> None:
    """Runs `work` in a thread that the worker cannot do without. When it ends, the process ends too: the worker would never answer
    again."""
    try:
        work()
    except BaseException:
        echo_traceback()
    os._exit(1)


def fail(end: WorkerEnd, frame: Frame, error: Exception) -> None:
    # An error that is ours or the user's needs no traceback.
    known = isinstance(error, (HeadraceError, ValueError, OSError))
    end.fail(frame, name_of(error), str(error) if known else "".join(traceback.format_exception(error)))


def begun() -> None:
    """Garbage is collected from here on, and not among what is there already. Importing torch and transformers makes a million
    objects that stay: looking through them again and again took a fifth of a worker's start (5.3 s of CPU time, now 4.1)."""
    gc.freeze()
    gc.enable()


# --- The base class of workers that are reached over a stream
# Protocol `Worker`, except for starting and ending the process.


class ConnectedWorker:
    left = False

    def __init__(self, who: str, heard: Heard, silence: float | None = None, away: float = 0.0) -> None:
        self.who = who
        self.channel = Channel(who, heard, self._lost, silence, away)
        self._ended: asyncio.Future[str] | None = None
        self._reporting: asyncio.Task[None] | None = None

    @property
    def door(self) -> str:
        return ""

    @property
    def local_rank(self) -> int:
        return 0

    @property
    def late(self) -> float:
        return self.channel.late

    async def call(self, method: str, payload: Any, returns: type[T]) -> T:
        try:
            return await self.channel.call(method, payload, returns)
        except WorkerDied:
            raise WorkerDied(self.who, await self.watch()) from None

    def push(self, method: str, payload: Any) -> None:
        self.channel.push(method, payload)

    async def watch(self) -> str:
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        raise NotImplementedError

    async def _how_it_ended(self, wrong: str) -> str:
        """Waits for the process where that is possible, and says how it ended. `wrong`: why we killed it, or empty."""
        raise NotImplementedError

    def _begin(self) -> None:
        self._ended = asyncio.get_running_loop().create_future()

    def _not_started(self, why: object) -> WorkerDied:
        """The error of a worker that could not be started. It also wakes callers of `watch`."""
        assert self._ended is not None
        self._ended.set_result(how := f"could not be started: {why}")
        return WorkerDied(self.who, how)

    def _lost(self, wrong: str) -> None:
        """Called when the connection ends. For a process on this machine the kernel closes it at once when the process dies. `wrong`: why
        the connection was given up (a damaged message, silence), or empty."""
        if wrong:
            self.kill()
        self._reporting = asyncio.ensure_future(self._report(wrong))

    async def _report(self, wrong: str) -> None:
        try:
            how = await self._how_it_ended(wrong)
        except Exception as error:  # such as no thread to wait in: callers of `watch` must be woken in any case
            how = f"closed its connection; how it ended could not be determined: {error!r}"
        assert self._ended is not None
        if not self._ended.done():
            self._ended.set_result(how)
