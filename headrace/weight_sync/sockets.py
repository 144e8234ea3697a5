"""Connections that carry weights, over TLS or not: who listens for them, and small messages on them (frames of msgpack)."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from headrace.core.types import Struct
from headrace.processes.frames import StreamEnded, framed, read_frame

LONGEST = 4096
"""Bytes of a message."""

BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted: all engines hear of a version at once."""

INTRODUCTION = 10.0
"""Seconds for a first message to arrive."""

AGAIN = 0.1
"""Seconds until it accepts again after it could not."""


class ConnectionServer:
    """Listens at a free port of `host`, and serves each connection in a thread of its own, with INTRODUCTION as its first timeout."""

    def __init__(self, host: str, serve: Callable[[socket.socket], None], *, at_once: int) -> None:
        """`serve`: closes the connection. `at_once`: connections at a time; more are closed. Raises OSError if it cannot listen there."""
        self._listening = socket.create_server((host, 0), family=family_of(host), backlog=BACKLOG)
        self.address: tuple[str, int] = host, self._listening.getsockname()[1]
        self._serve, self._places, self._closed = serve, threading.BoundedSemaphore(at_once), False
        threading.Thread(target=self._accept, name="weights", daemon=True).start()

    @property
    def where(self) -> dict[str, Any]:
        """The place, as an update names it."""
        return {"host": self.address[0], "port": self.address[1]}

    def close(self) -> None:
        """Ends the listening; connections that are served go on to their end. Nothing keeps then what `serve` belongs to."""
        self._closed = True
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts; closing alone does not
        self._listening.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listening.accept()
            except OSError:  # closed; or this process has too many files open for the moment
                time.sleep(0 if self._closed else AGAIN)
                continue
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._served, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _served(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(INTRODUCTION)
            self._serve(connection)
        finally:
            self._places.release()


class SendQueue:
    """Places for those that are sent to at a time. Others wait, in the order in which they came.

    >>> queue = SendQueue(places=1)
    >>> with queue.place(lambda: None, seconds=5):
    ...     pass
    """

    def __init__(self, places: int) -> None:
        self._free, self._lock, self._waiting = places, threading.Lock(), deque[threading.Event]()

    @contextmanager
    def place(self, still: Callable[[], object], seconds: float) -> Iterator[None]:
        """The context in which one has a place. `still`: called every `seconds` while it waits; what it raises ends the waiting."""
        came = threading.Event()
        with self._lock:
            self._waiting.append(came)
            self._admit()
        try:
            while not came.wait(seconds):
                still()
            yield
        finally:
            with self._lock:
                if came.is_set():
                    self._free += 1
                else:
                    self._waiting.remove(came)
                self._admit()

    def _admit(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            self._waiting.popleft().set()


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def reach(place: tuple[str, int], seconds: float, tls: ssl.SSLContext | None) -> socket.socket:
    """Returns a connection. Raises OSError, which an error of TLS is too. One thread at a time may use it."""
    connection = socket.create_connection(place, seconds)
    if tls is None:
        return connection
    try:
        return tls.wrap_socket(connection)
    except BaseException:
        connection.close()
        raise


def send_message(connection: socket.socket, message: Struct) -> None:
    connection.sendall(framed(msgspec.msgpack.encode(message)))


def read_message(connection: socket.socket, longest: int = LONGEST) -> bytes:
    """Raises ValueError for a message that is too long, OSError if it ends early."""
    return read_frame(connection.recv, longest)


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fills the buffer. Raises OSError if the connection ends before."""
    at = 0
    while at < len(buffer):
        got = connection.recv_into(buffer[at:])
        if not got:
            raise StreamEnded(f"the connection ended {len(buffer) - at} bytes too early")
        at += got
