"""Binds a port, and makes the server that answers on it inside of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from headrace.core.errors import ConfigError
from headrace.web.limits import (
    ACCEPTED,
    BACKLOG,
    HEAD_SECONDS,
    LEAST_BYTES,
    READ_BYTES,
    SILENT,
    STALLED_SECONDS,
    TURN_SECONDS,
    Crowd,
    Guest,
    room_for_connections,
)

# --- Log lines that strangers can cause
# One a second, with the number of those that were left out.


EVERY = 1.0
"""Seconds between two lines."""


class OneLine(logging.Filter):
    """Lets one record through in each `EVERY` seconds."""

    def __init__(self, about: Callable[[logging.LogRecord], bool], clock: Callable[[], float] = time.monotonic) -> None:
        """`about`: whether a record is one of those that are counted; others pass."""
        super().__init__()
        self._about, self._clock = about, clock
        self._next, self._left_out = 0.0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        if not self._about(record):
            return True
        now = self._clock()
        if now < self._next:
            self._left_out += 1
            return False
        if self._left_out:
            record.msg, record.args = f"{record.getMessage()} (lines left out since the last one: {self._left_out})", ()
        self._next, self._left_out = now + EVERY, 0
        return True


_SERVER = OneLine(lambda record: True)
_LOOP = OneLine(lambda record: "socket.accept()" in record.getMessage())
"""The event loop's own lines about connections that it cannot accept, and none of the user's."""


def calm_logs() -> None:
    """Limits the lines of servers in this process. May be called again."""
    logging.getLogger("uvicorn.error").addFilter(_SERVER)
    logging.getLogger("asyncio").addFilter(_LOOP)


# --- One connection of a server
# One connection of a server, as uvicorn's own with h11, within the limits of `limits.py`.


class LimitedHttp(H11Protocol):
    def __init__(self, crowd: Crowd, **more: Any) -> None:
        super().__init__(**more)
        self._crowd = crowd
        self._guest: Guest
        self._deadline: asyncio.TimerHandle | None = None
        """Set while the head of a request is awaited."""
        self._stalled: asyncio.TimerHandle | None = None
        """Set while the client reads nothing of what waits for it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # of asyncio's own transports
            transport.max_size = READ_BYTES
        self._await_head()
        self._guest = self._crowd.came(self._make_room)

    def data_received(self, data: bytes) -> None:
        began = time.thread_time()
        super().data_received(data)
        if hasattr(self.transport, "max_size"):
            took = time.thread_time() - began
            self.transport.max_size = read_next(self.transport.max_size, took)

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.left(self._guest)
        self._forget_deadline()
        self._forget_stall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self._stalled or self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._forget_stall()
        super().resume_writing()

    def handle_events(self) -> None:
        super().handle_events()
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def _note(self) -> None:
        asking = self.cycle is not None and not self.cycle.response_complete
        if asking:
            self._forget_deadline()
        elif self._deadline is None and not self.transport.is_closing():
            self._await_head()
        if asking and not self.cycle.more_body:
            self._crowd.asked(self._guest)
        else:
            self._crowd.waits(self._guest)

    def _await_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _forget_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _make_room(self) -> None:
        self.logger.warning("Too many connections: one that had sent no whole request was closed.")
        self.transport.abort()


def read_next(most: int, seconds: float) -> int:
    """Returns the bytes to read at once, where the last read was of up to `most`, and took so much CPU time.

    >>> read_next(1 << 16, 0.05), read_next(1024, 0.05), read_next(1024, 0.001), read_next(READ_BYTES, 0.001) == READ_BYTES
    (16384, 512, 2048, True)
    """
    return max(LEAST_BYTES, most // 4) if seconds > TURN_SECONDS else min(READ_BYTES, most * 2)


# --- server ------------------------------------------------------------


GRACE = 5
"""Seconds that answers in progress get when the server is asked to end."""


def bind(host: str, port: int, named: str = "--") -> socket.socket:
    """Binds the port before anything else is done: a port that is taken is reported at once, and early clients wait. `named`: what
    precedes `host` and `port` where the user has set them."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        # With its protocol (0 would also do): asyncio sets TCP_NODELAY only on connections that say that they are TCP, and
        # without it the second part of an answer waits 40 ms for the client's acknowledgement of the first.
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"{named}host {host} {named}port {port} cannot be had: {error}; choose another port (0: any that is free)"
        ) from None
    return sock


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the event loop's owner: uvicorn's handlers would end the process before the engine's is closed."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(BACKLOG)  # asyncio accepts at once as many as may wait, and has set this to ACCEPTED


def make_server(app: Starlette) -> uvicorn.Server:
    settings = uvicorn.Config(
        app,
        http=functools.partial(LimitedHttp, Crowd(SILENT, room_for_connections())),  # type: ignore[arg-type]
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=GRACE,
        backlog=ACCEPTED,
    )
    calm_logs()
    return _Server(settings)


def spare_what_stays() -> None:
    """Takes what there is now, which is mostly modules, out of Python's search for garbage. A search through it all holds up the event loop for a
    quarter of a second, whenever requests have made enough objects."""
    gc.freeze()


async def serve_until_asked(
    server: uvicorn.Server, sock: socket.socket, leaving: Callable[[], None] = lambda: None
) -> None:
    """Serves until SIGINT or SIGTERM; a second one ends it at once. `leaving`: called at the first."""

    def leave() -> None:
        server.force_exit = server.should_exit
        server.should_exit = True
        leaving()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, leave)
    spare_what_stays()
    await server.serve(sockets=[sock])


def address_of(sock: socket.socket) -> str:
    """Returns the address of a bound socket for a browser, such as `http://127.0.0.1:8000`."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
