"""Connections that carry weights, over TLS or not: who listens for them, and small messages on them (frames of msgpack)."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.core.types import Struct
from headrace.processes.frames import StreamEnded, framed, read_frame

LONGEST = 4096
"""Bytes of a message."""

INTRODUCTION = 10.0
"""Seconds for a first message to arrive."""


class ConnectionServer:
    """Listens at a free port of `host`, and serves each connection in a thread of its own, with INTRODUCTION as its first timeout."""

    def __init__(self, host: str, serve: Callable[[socket.socket], None], *, at_once: int) -> None:
        """`serve`: closes the connection. `at_once`: connections at a time; more are closed. Raises OSError if it cannot listen there."""
        self._listening = socket.create_server((host, 0), family=family_of(host))
        self.address: tuple[str, int] = host, self._listening.getsockname()[1]
        self._serve, self._places = serve, threading.BoundedSemaphore(at_once)
        threading.Thread(target=self._accept, name="weights", daemon=True).start()

    @property
    def where(self) -> dict[str, Any]:
        """The place, as an update names it."""
        return {"host": self.address[0], "port": self.address[1]}

    def _accept(self) -> None:
        while True:
            connection, _ = self._listening.accept()
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
