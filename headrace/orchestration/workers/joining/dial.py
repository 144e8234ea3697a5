"""The worker's end of a greeting."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable

import msgspec

from headrace.errors import ConfigError, HeadraceError
from headrace.orchestration.workers.joining.greeting import (
    DESERTED,
    HELLO_BYTES,
    HELLO_SECONDS,
    SILENCE,
    Agreed,
    Hello,
    Kind,
    Terms,
    Welcome,
    packed,
)
from headrace.orchestration.workers.joining.sessions.session_end import SessionEnd
from headrace.orchestration.workers.wire import BEATS, HEAD, WorkerEnd, length_of
from headrace.version import __version__
from headrace.web.tls import connect_over_tls


class RunOver(HeadraceError):
    """The run to which a worker offered itself has ended."""


def dial(
    address: str,
    kind: Kind,
    token: str,
    seat: str = "",
    *,
    ca: str = "",
    agree: Callable[[Terms], Agreed] | None = None,
) -> WorkerEnd:
    """Connects to the controller, and waits for a seat.

    `ca`: a file with the certificates that the controller's is checked with; empty: without TLS. `agree`: answers the terms of a run.
    Raises OSError if nothing listens there, ConfigError with the controller's reason if it refuses, or with the worker's own, and RunOver.
    """
    hello = Hello(__version__, token, kind, seat, host=socket.gethostname(), pid=os.getpid())
    refused = f"the controller at {address} refused this {kind}"
    sock = _connected(address, ca, hello)
    welcome = _take_seat(sock, refused, agree)

    def redial(received: int) -> tuple[socket.socket, int]:
        again = _connected(address, ca, msgspec.structs.replace(hello, session=welcome.session, received=received))
        try:
            return again, _take_seat(again, refused, None).received
        except BaseException:
            again.close()
            raise

    end = WorkerEnd(SessionEnd(sock, redial, welcome.reconnect) if welcome.reconnect else sock, DESERTED)
    threading.Thread(target=end.beat, args=(SILENCE / BEATS,), daemon=True).start()
    return end


def _connected(address: str, ca: str, hello: Hello) -> socket.socket:
    host, _, port = address.rpartition(":")
    where = (host.strip("[]"), int(port))
    if ca:
        sock = connect_over_tls(where, ca, HELLO_SECONDS)
    else:
        sock = socket.create_connection(where, timeout=HELLO_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(packed(hello))
    return sock


def _take_seat(sock: socket.socket, refused: str, agree: Callable[[Terms], Agreed] | None) -> Welcome:
    """Returns the last welcome."""
    waits = False
    while True:
        welcome = msgspec.msgpack.decode(_received(sock, length_of(_received(sock, HEAD), HELLO_BYTES)), type=Welcome)
        if welcome.over:
            raise RunOver(welcome.refused)
        if welcome.refused:
            raise ConfigError(f"{refused}: {welcome.refused}")
        if welcome.terms and agree:
            answer = agree(welcome.terms)
            sock.sendall(packed(answer))
            if answer.unable:
                with contextlib.suppress(OSError):
                    sock.recv(
                        1
                    )  # until the controller has read it: over TLS another thread sends it, and this process ends now
                raise ConfigError(answer.unable)
        elif welcome.waiting:
            sock.settimeout(DESERTED)
            if not waits:
                print("headrace: all seats are taken; this worker waits for one", file=sys.stderr, flush=True)
            waits = True
        else:
            return welcome


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
