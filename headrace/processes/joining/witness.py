"""A small process beside a worker that offered itself: it sends the run what the worker prints, and says when the worker has ended.

    worker    stdout, stderr ──pipe──▶ witness ──TCP──▶ run: logs/engine.log
                                          └──▶ the stderr that the worker was started with

It outlives the worker, whatever that dies of, so that the run gets its last words and hears of its end at once, rather than after the time in which a
worker may come back. It has a connection of its own, sends each word once and in order, and never holds the worker up: if the run takes nothing,
it cuts the oldest words out and says how many.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable

from headrace.core.errors import HeadraceError
from headrace.core.printing import PrintableBytes
from headrace.processes.joining.connecting import connected, received
from headrace.processes.joining.greeting import CA, TOKEN, Welcome, WitnessHello, WordsSaid, packed
from headrace.version import __version__

KEPT = 1 << 20
"""Bytes that wait to be sent at most."""

PIECE = 1 << 16
AGAIN, FAREWELL = 1.0, 10.0
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
            time.sleep(AGAIN)

    def _send_all(self) -> None:
        """Sends all there is and will be. A piece is forgotten when the run has it."""
        hello = WitnessHello(__version__, self._token, self._session)
        with connected(self._address, self._ca, hello) as sock:
            _answered(received(sock, Welcome))
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._pieces or self._over)
                    said = self._pieces[0] if self._pieces else WordsSaid(self._at, b"", over=True)
                sock.sendall(packed(said))
                _answered(received(sock, Welcome))
                with self._changed:
                    if self._pieces and self._pieces[0] is said:
                        self._waiting -= len(self._pieces.popleft().data)
                if said.over:
                    return


def _answered(welcome: Welcome) -> None:
    if welcome.refused:
        raise HeadraceError(welcome.refused)
