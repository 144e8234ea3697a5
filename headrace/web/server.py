"""Binds a port, and makes the server that answers on it inside of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

from headrace.core.errors import ConfigError
from headrace.web.crowd import ACCEPTED, BACKLOG, SILENT, Crowd, room_for_connections
from headrace.web.limited_http import LimitedHttp
from headrace.web.one_line import calm_logs

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
