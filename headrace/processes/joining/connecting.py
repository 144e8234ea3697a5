"""A connection to the controller, and the messages that are read from it before its bytes are frames."""

from __future__ import annotations

import socket
from typing import TypeVar

import msgspec

from headrace.core.types import Struct
from headrace.processes.frames import StreamEnded, read_frame
from headrace.processes.joining.greeting import HELLO_SECONDS, WELCOME_BYTES, packed
from headrace.web.tls import connect_over_tls

M = TypeVar("M", bound=Struct)


def own_address(address: str) -> str:
    """Returns the address of this machine from which it reaches `address` (HOST:PORT). Nothing is sent. Raises OSError if there is no way."""
    host, _, port = address.rpartition(":")
    family, kind, *_, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as asking:
        asking.connect(where)
        return str(asking.getsockname()[0])


def connected(address: str, ca: str, hello: Struct) -> socket.socket:
    """Connects, and sends the first message. `ca`: see `dial`. Raises OSError, and ConfigError for a file without certificates."""
    host, _, port = address.rpartition(":")
    where = (host.strip("[]"), int(port))
    if ca:
        sock = connect_over_tls(where, ca, HELLO_SECONDS)
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
        said = "the controller closed the connection without an answer; is it a headrace controller?"
        raise ConnectionError(said) from None
