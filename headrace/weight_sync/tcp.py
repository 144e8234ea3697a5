"""Weight sync over TCP: engines fetch from a server in the trainer's process, which sends the packed buffer.

    engine    length, {token, name, fingerprint, part}      part: full or delta
    trainer   length, {nbytes} or {refused}; then the bytes

A connection serves one question. Whoever does not know the token is answered nothing. The place in an update (`host`, `port`) is recorded
in metrics; the token is in the start messages only.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.errors import IdentityError
from headrace.types import Struct
from headrace.weight_sync.fetching import FetchingReceiver, NetworkTransport
from headrace.weight_sync.slots import Manifests, Part, send_all
from headrace.weights import Manifest, WeightUpdate

if TYPE_CHECKING:
    from headrace.weight_sync.offers import OfferedVersion, OfferingSender, Offers

LONGEST = 4096
"""Bytes of a question, and of the answer before the weights."""
PATIENCE = 60.0
"""Seconds in which no byte of an answer arrives, or a piece of it cannot be sent, until a connection counts as broken."""
INTRODUCTION = 10.0
"""Seconds for a question to arrive."""
AT_ONCE = 64
"""Connections that are served at a time. More are closed."""
TRIES = 3
"""Connections that an engine makes for an update before it gives it up."""

_LENGTH = struct.Struct("<I")


class Tcp(NetworkTransport, frozen=True, tag="tcp"):
    """Protocol `Transport`."""

    def sender(self, manifests: Manifests, once: Collection[str] = ()) -> OfferingSender:
        from headrace.weight_sync.offers import OfferingSender, Offers

        offers = Offers(manifests, once, self.encoding)
        server = TcpServer(offers, self.host, self.token)
        return OfferingSender(offers, server.where)

    def receiver(self, manifests: Manifests) -> FetchingReceiver:
        return FetchingReceiver(manifests, TcpSource(self.token))


class Question(Struct, frozen=True):
    token: str
    name: str
    """The adapter's; empty for the model."""
    fingerprint: str
    part: Part


class WeightReply(Struct, frozen=True):
    nbytes: int = 0
    refused: str = ""


# -- the trainer's end --------------------------------------------------------------------------------------------------------


class TcpServer:
    """Answers in threads, while the trainer trains."""

    def __init__(self, offers: Offers, host: str, token: str) -> None:
        """Raises OSError if it cannot listen at that address."""
        self._offers, self._token = offers, token
        self._listening = socket.create_server((host, 0), family=_family(host))
        self._host, self._port = host, self._listening.getsockname()[1]
        self._places = threading.BoundedSemaphore(AT_ONCE)
        threading.Thread(target=self._accept, name="weights", daemon=True).start()

    def where(self, name: str, offer: OfferedVersion) -> dict[str, Any]:
        return {"host": self._host, "port": self._port}

    def _accept(self) -> None:
        while True:
            connection, _ = self._listening.accept()
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """Errors end the connection, and the engine at its other end reports them."""
        try:
            with connection, contextlib.suppress(OSError, ValueError):
                connection.settimeout(INTRODUCTION)
                asked = msgspec.msgpack.decode(_read_message(connection), type=Question)
                if hmac.compare_digest(asked.token.encode(), self._token.encode()):
                    connection.settimeout(PATIENCE)
                    self._answer(connection, asked)
        finally:
            self._places.release()

    def _answer(self, connection: socket.socket, asked: Question) -> None:
        found = self._offers.find(asked.name, asked.fingerprint, asked.part)
        if found is None:
            _send_message(connection, WeightReply(refused="the trainer no longer has them, or never had"))
        else:
            _send_message(connection, WeightReply(len(found)))
            send_all(connection, found)


# -- the engine's end ---------------------------------------------------------------------------------------------------------


class TcpSource:
    """Protocol `Source`."""

    def __init__(self, token: str) -> None:
        self._token = token

    def full(self, update: WeightUpdate, manifest: Manifest, into: memoryview) -> int:
        def read(connection: socket.socket, nbytes: int) -> int:
            if nbytes != len(into):
                raise IdentityError(
                    f"version {update.version} has {nbytes} bytes, and this engine's weights {len(into)}"
                )
            _read_into(connection, into)
            return nbytes

        return self._asked(update, "full", read)

    def delta(self, update: WeightUpdate, limit: int) -> bytes:
        def read(connection: socket.socket, nbytes: int) -> bytes:
            if nbytes > limit:
                raise IdentityError(f"the delta of version {update.version} has {nbytes} bytes, more than the weights")
            buffer = bytearray(nbytes)
            _read_into(connection, memoryview(buffer))
            return bytes(buffer)

        return self._asked(update, "delta", read)

    def _asked(self, update: WeightUpdate, part: Part, read: Any) -> Any:
        host, port = str(update.where["host"]), int(update.where["port"])
        name = update.adapter.name if update.adapter else ""
        for tried in range(1, TRIES + 1):
            try:
                with socket.create_connection((host, port), INTRODUCTION) as connection:
                    connection.settimeout(PATIENCE)
                    _send_message(connection, Question(self._token, name, update.fingerprint, part))
                    reply = msgspec.msgpack.decode(_read_message(connection), type=WeightReply)
                    if not reply.refused:
                        return read(connection, reply.nbytes)
                    raise IdentityError(
                        f"weights of version {update.version}, published with fingerprint {update.fingerprint}, cannot be fetched from "
                        f"{host}:{port}: {reply.refused}. The engine keeps the version that it has"
                    )
            except (OSError, ValueError) as error:
                if tried == TRIES:
                    raise IdentityError(
                        f"weights of version {update.version} could not be fetched from the trainer at {host}:{port} in {TRIES} tries "
                        f"({error}). The engine keeps the version that it has"
                    ) from error
                time.sleep(0.2 * tried)
        raise AssertionError


# -- bytes --------------------------------------------------------------------------------------------------------------------


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _send_message(connection: socket.socket, message: Struct) -> None:
    body = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(body)) + body)


def _read_message(connection: socket.socket) -> bytes:
    """Raises ValueError for a message that is too long, OSError if it ends early."""
    head = bytearray(_LENGTH.size)
    _read_into(connection, memoryview(head))
    (length,) = _LENGTH.unpack(head)
    if length > LONGEST:
        raise ValueError(f"a message of {length} bytes")
    body = bytearray(length)
    _read_into(connection, memoryview(body))
    return bytes(body)


def _read_into(connection: socket.socket, buffer: memoryview) -> None:
    at = 0
    while at < len(buffer):
        got = connection.recv_into(buffer[at:])
        if not got:
            raise ConnectionError(f"the connection ended {len(buffer) - at} bytes too early")
        at += got
