"""The controller's end of a connection that may break and come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.core.errors import HeadraceError
from headrace.processes.frames import receive_frame
from headrace.processes.joining.outbox import LONGEST_BODY, Outbox, opened, segment


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
