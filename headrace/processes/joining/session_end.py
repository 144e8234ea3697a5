"""The worker's end of a connection that may break and come back. It has the methods of a socket that `wire.WorkerEnd` uses."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from headrace.core.errors import HeadraceError
from headrace.core.printing import say
from headrace.processes.frames import read_frame
from headrace.processes.joining.greeting import DESERTED, SILENCE
from headrace.processes.joining.outbox import LONGEST_BODY, Outbox, opened, segment

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
