"""The worker's end of a greeting."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable

import msgspec

from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.printing import say
from headrace.processes.joining.connecting import connected, own_address, received
from headrace.processes.joining.greeting import (
    DESERTED,
    SILENCE,
    Agreed,
    DoctorAnswer,
    DoctorQuestion,
    Hello,
    Kind,
    Terms,
    Welcome,
    packed,
)
from headrace.processes.joining.packages import own_packages
from headrace.processes.joining.session_end import SessionEnd
from headrace.processes.wire import BEATS, WorkerEnd
from headrace.version import __version__


class RunOver(HeadraceError):
    """The run to which a worker offered itself has ended."""


def dial(
    address: str,
    kind: Kind,
    token: str,
    seat: str = "",
    *,
    ca: str = "",
    address_here: str = "",
    agree: Callable[[Terms], Agreed] | None = None,
    examine: Callable[[DoctorQuestion], DoctorAnswer] | None = None,
    seated: Callable[[str], None] = lambda session: None,
) -> WorkerEnd:
    """Connects to the controller, and waits for a seat. A trainer's worker listens for other ranks at the end's `door`.

    `ca`: a file with the certificates that the controller's is checked with; empty: without TLS. `address_here`: the address of this machine
    at which other machines reach it; empty: the one from which it reaches the controller. `agree`: answers the terms of a run. `examine`: answers
    the questions of `headrace doctor`. `seated`: is called with the worker's session.
    Raises OSError if nothing listens there, ConfigError with the controller's reason if it refuses, or with the worker's own, and RunOver.
    """
    door = _door(address_here or own_address(address)) if kind == "trainer" else None
    hello = Hello(
        __version__,
        token,
        kind,
        seat,
        host=socket.gethostname(),
        pid=os.getpid(),
        door="{}:{}".format(*door.getsockname()[:2]) if door else "",
        packages=own_packages(),
    )
    refused = f"the controller at {address} refused this {kind}"
    sock = connected(address, ca, hello)
    welcome = _take_seat(sock, refused, agree, examine)
    seated(welcome.session)

    def redial(count: int) -> tuple[socket.socket, int]:
        again = connected(address, ca, msgspec.structs.replace(hello, session=welcome.session, received=count))
        try:
            return again, _take_seat(again, refused).received
        except BaseException:
            again.close()
            raise

    end = WorkerEnd(SessionEnd(sock, redial, welcome.reconnect) if welcome.reconnect else sock, DESERTED, door)
    threading.Thread(target=end.beat, args=(SILENCE / BEATS,), daemon=True).start()
    return end


def _door(address: str) -> socket.socket:
    """Listens at a free port of that address. Raises ConfigError if it is none of this machine's."""
    try:
        return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError as error:
        raise ConfigError(
            f"this machine cannot listen at {address}: {error.strerror or error}; name an address of it with --address"
        ) from None


def _take_seat(
    sock: socket.socket,
    refused: str,
    agree: Callable[[Terms], Agreed] | None = None,
    examine: Callable[[DoctorQuestion], DoctorAnswer] | None = None,
) -> Welcome:
    """Returns the last welcome."""
    waits = False
    while True:
        welcome = received(sock, Welcome)
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
        elif welcome.question and examine:
            sock.sendall(packed(examine(welcome.question)))
            sock.settimeout(DESERTED)
        elif welcome.waiting:
            sock.settimeout(DESERTED)
            if not waits:
                say("all seats are taken; this worker waits for one")
            waits = True
        else:
            return welcome
