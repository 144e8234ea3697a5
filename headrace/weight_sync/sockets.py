"""Connections that carry weights, over TLS or not, and small messages on them: a length, then msgpack."""

from __future__ import annotations

import socket
import ssl
import struct

import msgspec

from headrace.types import Struct

LONGEST = 4096
"""Bytes of a message."""

_LENGTH = struct.Struct("<I")


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
