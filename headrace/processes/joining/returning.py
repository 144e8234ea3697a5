"""A connection that may break and come back: its segments, and both ends of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from headrace.core.errors import HeadraceError
from headrace.core.printing import say
from headrace.processes.frames import framed, read_frame, receive_frame
from headrace.processes.joining.greeting import DESERTED, SILENCE

# --- Segments of a stream, and those that may have to be sent again.


SEGMENT = 1 << 16
"""Most bytes of a segment. A small one is soon complete, so that a slow connection shows that it is alive."""


_COUNT = 8
"""Bytes at the beginning of a segment. They hold the number of bytes that its sender has received, the lowest first."""
LONGEST_BODY = _COUNT + SEGMENT
"""Most bytes of the frame's body that is a segment."""


def segment(piece: bytes, received: int) -> bytes:
    return framed(received.to_bytes(_COUNT, "little") + piece)


def opened(body: bytes) -> tuple[bytes, int]:
    """Returns the piece in a segment, and the bytes that its sender has received. Raises HeadraceError for one that has no piece."""
    if len(body) <= _COUNT:
        raise HeadraceError(f"received a segment of {len(body)} bytes, and the first {_COUNT} are none of its piece")
    return body[_COUNT:], int.from_bytes(body[:_COUNT], "little")


class Outbox:
    """The pieces that were sent and that the other end has not acknowledged."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._acknowledged = 0

    def put(self, data: bytes) -> list[bytes]:
        """Returns the data in pieces, each for one segment."""
        pieces = [data[begin : begin + SEGMENT] for begin in range(0, len(data), SEGMENT)]
        self._pieces += pieces
        return pieces

    def acknowledge(self, received: int) -> None:
        """The other end has received so many bytes in all. Raises HeadraceError if it cannot have, and forgets nothing then."""
        known, pieces = self._acknowledged, 0
        for piece in self._pieces:
            if known >= received:
                break
            known, pieces = known + len(piece), pieces + 1
        if known != received:
            raise HeadraceError(f"{received} bytes are said to be received, and {known} were sent")
        for _ in range(pieces):
            self._pieces.popleft()
        self._acknowledged = known

    def rest(self) -> Iterator[bytes]:
        """Returns the pieces that the other end has not received, in order."""
        return iter(tuple(self._pieces))


# --- The controller's end of a connection that may break and come back.


class Returning:
    """Protocol `wire.Writer`; its other half is `reader`."""

    def __init__(self, patience: float, say: Callable[[str], None], over: Callable[[], None]) -> None:
        """`patience`: seconds for which it waits for a new connection. `say`: is called with a sentence at some of the returns. `over`: is called
        when it waits no more."""
        self.reader = asyncio.StreamReader()
        self.received = 0
        """Bytes of complete segments."""
        self._patience, self._say, self._over = patience, say, over
        self._outbox = Outbox()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._closed = False
        self._broken_since, self._breaks = 0.0, 0

    def connect(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: int = 0, greeting: bytes = b""
    ) -> None:
        """Goes on over this connection, whose other end has received so many bytes over earlier ones. `greeting`: is sent before. Raises
        HeadraceError if it cannot have received them."""
        self._outbox.acknowledge(received)
        if self._alarm and self._breaks & (self._breaks - 1) == 0:  # 1, 2, 4, ...: a bad network must not fill the log
            away = asyncio.get_running_loop().time() - self._broken_since
            self._say(
                f"its connection broke (break {self._breaks}), and it came back after {away:.1f} s; nothing was lost"
            )
        self._leave()
        self._writer = writer
        writer.write(greeting)
        for piece in self._outbox.rest():
            writer.write(segment(piece, self.received))
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))

    def write(self, data: bytes) -> None:
        for piece in self._outbox.put(data):
            if self._writer:
                self._writer.write(segment(piece, self.received))

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Ends it for good. What was written is still sent if there is a connection."""
        if not self._closed:
            self._closed = True
            self._leave()
            self.reader.feed_eof()
            self._over()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                data, received = opened(await receive_frame(reader, LONGEST_BODY))
                self._outbox.acknowledge(received)
                self.received += len(data)
                self.reader.feed_data(data)
        except (OSError, HeadraceError):
            self._reading = None
            self._break()

    def _break(self) -> None:
        self._leave()
        loop = asyncio.get_running_loop()
        self._broken_since, self._breaks = loop.time(), self._breaks + 1
        self._alarm = loop.call_later(self._patience, self.close)

    def wait_no_more(self) -> None:
        """The worker has ended: it will not come back. What it has sent is still read."""
        self._patience = 0.0
        if self._alarm:
            self.close()

    def _leave(self) -> None:
        """Closes the connection that there is, and waits for none."""
        if self._writer:
            self._writer.close()
        if self._reading:
            self._reading.cancel()
        if self._alarm:
            self._alarm.cancel()
        self._writer = self._reading = self._alarm = None


# --- The worker's end of a connection that may break and come back
# It has the methods of a socket that `wire.WorkerEnd` uses.


AGAIN = 0.2
"""Seconds between two attempts to connect anew."""

Redial = Callable[[int], tuple[socket.socket, int]]
"""Connects anew, given the bytes received so far. Returns the connection, and the bytes that the controller has received. Raises OSError if it
cannot be reached, and HeadraceError if the session is over."""


class SessionEnd:
    def __init__(self, sock: socket.socket, redial: Redial, patience: float) -> None:
        """`patience`: seconds for which the controller waits after a break."""
        self._sock, self._redial, self._patience = sock, redial, patience
        sock.settimeout(SILENCE)
        self._lock = threading.Lock()
        """Guards all that is sent."""
        self._broken = False
        self._outbox, self._received = Outbox(), 0
        self._read_ahead = bytearray()
        self._heard = time.monotonic()

    def settimeout(self, seconds: float | None) -> None:
        """Does nothing: it has deadlines of its own."""

    def makefile(self, mode: str) -> SessionEnd:
        return self

    def sendall(self, data: bytes) -> None:
        """Never fails: what cannot be sent now is sent after the return."""
        with self._lock:
            for piece in self._outbox.put(data):
                self._transmit(piece)

    def read(self, count: int) -> bytes:
        """Returns fewer bytes if the controller is gone."""
        while len(self._read_ahead) < count and self._receive():
            pass
        data = bytes(self._read_ahead[:count])
        del self._read_ahead[:count]
        return data

    def _transmit(self, piece: bytes) -> None:
        if self._broken:
            return
        try:
            self._sock.sendall(segment(piece, self._received))
        except OSError:  # perhaps in the middle of a segment: nothing may follow it
            self._broken = True
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # the thread that reads connects anew

    def _receive(self) -> bool:
        """Reads one segment, over a new connection if need be. False if there will be none."""
        while True:
            try:
                data, acknowledged = opened(read_frame(self._hear, LONGEST_BODY))
                with self._lock:
                    self._outbox.acknowledge(acknowledged)
                    self._received += len(data)
                self._read_ahead += data
                return True
            except OSError:
                if not self._return():
                    return False

    def _hear(self, count: int) -> bytes:
        if piece := self._sock.recv(count):
            self._heard = time.monotonic()
        return piece

    def _return(self) -> bool:
        """Connects anew, and sends what the controller has not received. False if the session is over, or nobody is there."""
        with self._lock:
            self._broken = True
        self._sock.close()
        say("the connection to the run broke; connecting anew")
        since = time.monotonic()
        while True:
            try:
                sock, received = self._redial(self._received)
                break
            except HeadraceError as error:
                say(error)
                return False
            except OSError as error:
                # Nobody listens there any more; or else there is no way to the machine, or the controller itself hangs.
                until = since + self._patience if isinstance(error, ConnectionRefusedError) else self._heard + DESERTED
                if time.monotonic() > until:
                    return False
                time.sleep(AGAIN)
        with self._lock:
            self._outbox.acknowledge(received)
            self._sock, self._broken = sock, False
            sock.settimeout(SILENCE)
            for piece in self._outbox.rest():
                self._transmit(piece)
        return True
