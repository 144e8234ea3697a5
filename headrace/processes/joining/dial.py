"""The worker's end: it connects, offers itself, and has a witness beside it that sends the run what it prints."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import msgspec

from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.printing import PrintableBytes, say
from headrace.core.types import Struct
from headrace.native.resources import local_rank
from headrace.processes.frames import StreamEnded, read_frame
from headrace.processes.joining.greeting import (
    ADDRESS,
    AGAIN,
    CA,
    DESERTED,
    HELLO_SECONDS,
    LEAVING,
    MODEL,
    PATIENCE,
    SILENCE,
    TOKEN,
    WELCOME_BYTES,
    Agreed,
    DoctorAnswer,
    DoctorQuestion,
    Hello,
    Kind,
    Terms,
    Welcome,
    WitnessHello,
    WordsSaid,
    packed,
)
from headrace.processes.joining.returning import SessionEnd
from headrace.processes.joining.same_model import own_packages
from headrace.processes.wire import BEATS, WorkerEnd
from headrace.version import __version__
from headrace.web.tls import connect_over_tls

# --- A connection to the controller
# A connection to the controller, and the messages that are read from it before its bytes are frames.


M = TypeVar("M", bound=Struct)


def own_address(address: str) -> str:
    """Returns the address of this machine from which it reaches `address` (HOST:PORT). Nothing is sent. Raises OSError if there is no way."""
    host, _, port = address.rpartition(":")
    family, kind, *_, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as asking:
        asking.connect(where)
        return str(asking.getsockname()[0])


def connected(address: str, ca: str, hello: Struct) -> socket.socket:
    """Connects, and sends the first message. `ca`: see `dial`. Raises OSError, and ConfigError for a file without certificates or another's."""
    host, _, port = address.rpartition(":")
    where = (host.strip("[]"), int(port))
    if ca:
        try:
            sock = connect_over_tls(where, ca, HELLO_SECONDS)
        except ssl.SSLCertVerificationError as error:
            message = f"the certificate at {address} is not one that {ca} vouches for ({error.verify_message})"
            raise ConfigError(f"{message}; give the run's own (orchestration.cert) by --ca") from None
    else:
        sock = socket.create_connection(where, timeout=HELLO_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(packed(hello))
    return sock


def received(sock: socket.socket, kind: type[M]) -> M:
    """Returns the next message. Raises OSError if the connection ends."""
    try:
        return msgspec.msgpack.decode(read_frame(sock.recv, WELCOME_BYTES), type=kind)
    except StreamEnded:
        message = "the controller closed the connection without an answer; is it a headrace controller?"
        raise ConnectionError(message) from None


# --- A small process beside a worker that offered itself
# It sends the run what the worker prints, and says when the worker has ended.
#
#     worker    stdout, stderr ──pipe──▶ witness ──TCP──▶ run: logs/engine.log
#                                           └──▶ the stderr that the worker was started with
#
# It outlives the worker, whatever that dies of, so that the run gets its last words and hears of its end at once, rather than after the time in which a
# worker may come back. It has a connection of its own, sends each word once and in order, and never holds the worker up: if the run takes nothing,
# it cuts the oldest words out and says how many.


KEPT = 1 << 20
"""Bytes that wait to be sent at most."""

PIECE = 1 << 16
REACH_AGAIN, FAREWELL = 1.0, 10.0
"""Seconds between two attempts to reach the run, and for the last words."""


def witnessed(address: str) -> Callable[[str], None]:
    """Starts the witness of this process, which must have no threads yet. Returns the function that names the session to it."""
    from_worker, printed = os.pipe()
    orders, commands = os.pipe()
    if os.fork() == 0:
        os.close(printed)
        os.close(commands)
        try:
            _Witness(address, from_worker, orders).run()
        finally:
            os._exit(0)
    os.close(from_worker)
    os.close(orders)
    for standard in (1, 2):
        os.dup2(printed, standard)
    os.close(printed)

    def seated(session: str) -> None:
        os.write(commands, session.encode())

    return seated


class _Witness:
    def __init__(self, address: str, printed: int, orders: int) -> None:
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(name, signal.SIG_IGN)  # these are for the worker, with which it ends
        self._address, self._printed, self._orders = address, printed, orders
        self._token, self._ca = os.environ.get(TOKEN, ""), os.environ.get(CA, "")
        self._session = ""
        self._here = PrintableBytes(2)
        self._pieces: deque[WordsSaid] = deque()
        self._waiting = self._at = self._cut = 0
        """Bytes in `_pieces`; bytes of all words so far; and those that were cut and not reported yet."""
        self._over = False
        self._changed = threading.Condition()

    def run(self) -> None:
        sender = threading.Thread(target=self._send, daemon=True)
        sender.start()
        watched = [self._printed, self._orders]
        while self._orders in watched:
            readable, _, _ = select.select(watched, [], [])
            if self._printed in readable and not self._hear():
                watched.remove(self._printed)
            if self._orders in readable:
                if session := os.read(self._orders, 64):
                    self._note(session=session.decode())
                else:
                    watched.remove(self._orders)  # the worker has ended
        while self._printed in watched and select.select([self._printed], [], [], 0)[0] and self._hear():
            pass
        self._note(over=True)
        if self._session:
            sender.join(FAREWELL)

    def _hear(self) -> bool:
        if not (data := os.read(self._printed, PIECE)):
            return False
        with contextlib.suppress(OSError):  # nobody reads there
            self._here.write(data)
        with self._changed:
            self._pieces.append(WordsSaid(self._at, data))
            self._at, self._waiting = self._at + len(data), self._waiting + len(data)
            while self._waiting > KEPT:
                self._waiting -= len(self._pieces.popleft().data)
            self._changed.notify()
        return True

    def _note(self, session: str = "", over: bool = False) -> None:
        with self._changed:
            self._session, self._over = session or self._session, over
            self._changed.notify()

    def _send(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._session)
            try:
                self._send_all()
                return
            except HeadraceError:  # the run does not know the session
                return
            except OSError as error:
                if self._over and isinstance(error, ConnectionRefusedError):  # the run has ended too
                    return
            time.sleep(REACH_AGAIN)

    def _send_all(self) -> None:
        """Sends all there is and will be. A piece is forgotten when the run has it."""
        hello = WitnessHello(__version__, self._token, self._session)
        with connected(self._address, self._ca, hello) as sock:
            _answered(received(sock, Welcome))
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._pieces or self._over)
                    words = self._pieces[0] if self._pieces else WordsSaid(self._at, b"", over=True)
                sock.sendall(packed(words))
                _answered(received(sock, Welcome))
                with self._changed:
                    if self._pieces and self._pieces[0] is words:
                        self._waiting -= len(self._pieces.popleft().data)
                if words.over:
                    return


def _answered(welcome: Welcome) -> None:
    if welcome.refused:
        raise HeadraceError(welcome.refused)


# --- The worker's end of a greeting.


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
        local_rank=numbered[1] if (numbered := local_rank()) else 0,
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


# --- A worker that offers itself to a run
# It finds the controller, and ends with a sentence.


LOST, REFUSED, NOBODY = 1, 2, 3
"""Exit codes: the connection broke, so that it may be worth trying again; the run does not take this worker as it is; nobody was there for all
of its patience (only if it is started again and again)."""

RETRY = 1.0
"""Seconds between two attempts to reach the controller."""


def offer(
    address: str,
    kind: Kind,
    seated: Callable[[str], None],
    *,
    agree: Callable[[Terms, str], Agreed],
    examine: Callable[[DoctorQuestion], DoctorAnswer] | None = None,
) -> WorkerEnd:
    """Returns when this worker has a seat; `seated` is called with its session. `agree`: answers the terms of a run, given this machine's directory
    of the model; `examine`: answers the questions of `headrace doctor`. It tries for some time to reach the controller, which may not have started yet."""
    token, ca, model, here, again = (os.environ.pop(name, "") for name in (TOKEN, CA, MODEL, ADDRESS, AGAIN))
    patience, said = float(os.environ.pop(PATIENCE, "0")), ""
    deadline = time.monotonic() + patience
    while True:
        try:
            end = dial(
                address,
                kind,
                token,
                ca=ca,
                address_here=here,
                agree=lambda terms: agree(terms, model),
                seated=seated,
                examine=examine,
            )
            say(f"{kind} of the run at {address}")
            return end
        except RunOver as over:
            _end(0, str(over))
        except ConfigError as error:
            _end(REFUSED, str(error))
        except OSError as error:
            message = f"the controller at {address} cannot be reached: {error}"
            if time.monotonic() > deadline:
                _end(NOBODY if again else LOST, message)
            if message != said:
                say(f"{message}; this {kind} tries again for up to {patience:g} s (--patience)")
            said = message
            time.sleep(RETRY)


def leave_when_asked(end: WorkerEnd) -> None:
    """Gives the seat back at SIGTERM, such as the notice of a spot machine. The run goes on elsewhere from all tokens that it has, and releases this
    worker. A second SIGTERM ends it at once."""
    asked = threading.Event()

    def ask(*given: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        asked.set()

    def tell() -> None:
        asked.wait()
        say("SIGTERM: giving the seat back")
        end.push(LEAVING, None)

    signal.signal(signal.SIGTERM, ask)
    threading.Thread(target=tell, daemon=True).start()


def released() -> None:
    _end(0, "the run needs this worker no more")


def refuse(why: str) -> None:
    """Ends this worker, which does not fit the run any more."""
    _end(REFUSED, why)


def left_alone() -> None:
    _end(LOST, "the connection to the controller has ended")


def _end(code: int, why: str) -> None:
    """Ends the process from any of its threads."""
    say(why)
    os._exit(code)
