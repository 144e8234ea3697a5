"""Connections that carry weights, over TLS or not: who listens for them, and small messages on them (a length, then msgpack)."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.core.types import Struct

LONGEST = 4096
"""Bytes of a message."""

_LENGTH = struct.Struct("<I")


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
    body = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(body)) + body)


def read_message(connection: socket.socket, longest: int = LONGEST) -> bytes:
    """Raises ValueError for a message that is too long, OSError if it ends early."""
    head = bytearray(_LENGTH.size)
    receive_into(connection, memoryview(head))
    (length,) = _LENGTH.unpack(head)
    if length > longest:
        raise ValueError(f"a message of {length} bytes")
    body = bytearray(length)
    receive_into(connection, memoryview(body))
    return bytes(body)


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fills the buffer. Raises OSError if the connection ends before."""
    at = 0
    while at < len(buffer):
        got = connection.recv_into(buffer[at:])
        if not got:
            raise ConnectionError(f"the connection ended {len(buffer) - at} bytes too early")
        at += got
