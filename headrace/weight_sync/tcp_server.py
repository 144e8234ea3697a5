"""A server of weights over TCP: in the trainer's process, in each of its ranks, and in engines, which send pieces on to others.

    engine    length, {token, name, fingerprint, part, first, nbytes}
    server    length, {waits}, any number of times; length, {nbytes, whole}, {elsewhere, digest} or {refused}; then the bytes
    engine    if it sends pieces to others: length, {has}, which is acknowledged, or {lost}, after which the server sends the piece itself

A connection serves one question, and lasts until the engine has the piece or has ended: so the server knows who is busy with sending it. Whoever
does not know the token is answered nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import xxhash

from headrace.core.types import Struct
from headrace.weight_sync.relays import Relays
from headrace.weight_sync.slots import Part, send_all
from headrace.weight_sync.sockets import ConnectionServer, SendQueue, read_message, send_message

PATIENCE = 60.0
"""Seconds in which no byte of an answer arrives, or a piece of it cannot be sent, until a connection counts as broken."""
STILL = PATIENCE / 4
"""Seconds after which an engine that waits is told so again."""
AT_ONCE = 64
"""Engines that are sent to at a time, of those that nobody else sends to. Others wait, and are told so."""
CONNECTIONS = 2048
"""Connections at a time, those that wait included. More are closed."""


class Question(Struct, frozen=True):
    token: str
    name: str
    """The adapter's; empty for the model."""
    fingerprint: str
    """Asked of a rank of several: the label of the copy, or `RANGES`."""
    part: Part
    first: int = 0
    nbytes: int = 0
    """The piece that is asked for; 0: all of it."""
    rank: int = 0
    """Asked of an engine: the rank whose part the piece belongs to."""
    relay: int = 0
    """The port at which the engine that asks sends pieces to others; 0: it does not."""


class PieceSaid(Struct, frozen=True):
    """The engine's word when it has been sent a piece, or to another engine for it."""

    has: bool = False
    """Whether it has the piece, and sends it to others."""
    lost: bool = False
    """Whether the other engine did not send the piece, or sent other bytes, so that this server has to."""


class WeightReply(Struct, frozen=True):
    nbytes: int = 0
    refused: str = ""
    waits: bool = False
    """Whether others are sent to first; another reply follows."""
    whole: int = 0
    """Bytes of all that the piece belongs to."""
    elsewhere: str = ""
    """The address of an engine that has the piece."""
    digest: bytes = b""
    """The hash of the piece that the other engine has to send (`digest_of`)."""


class Pieces(NamedTuple):
    data: Sequence[memoryview]
    whole: int


def piece_of(found: memoryview | None, asked: Question) -> Pieces | None:
    if found is None:
        return None
    last = asked.first + asked.nbytes if asked.nbytes else len(found)
    return Pieces([found[asked.first : last]], len(found))


def digest_of(data: Sequence[memoryview]) -> bytes:
    """Returns the xxh3-128 of a piece. It guards against mistakes, not against malice."""
    whole = xxhash.xxh3_128()
    for view in data:
        whole.update(view)
    return whole.digest()


class TcpServer:
    """Answers in threads, beside the work of its process."""

    def __init__(
        self, find: Callable[[Question], Pieces | None], host: str, token: str, tls: ssl.SSLContext | None
    ) -> None:
        """`find`: returns what is asked for, None if it is not there. Raises OSError if it cannot listen at that address."""
        self.relays = Relays()
        self._digests: dict[str, bytes] = {}
        """The hashes of pieces that engines send each other, by their paths."""
        self._find, self._token, self._tls = find, token, tls
        self._connections = ConnectionServer(host, self._serve, at_once=CONNECTIONS)
        self._queue = SendQueue(AT_ONCE)

    @property
    def address(self) -> tuple[str, int]:
        return self._connections.address

    @property
    def where(self) -> dict[str, Any]:
        return self._connections.where

    def close(self) -> None:
        """Answers no new question."""
        self._connections.close()

    def forget(self, kept: str, of: str) -> None:
        """Forgets what is known of pieces whose paths begin with `of`, unless they begin with `kept`."""
        self.relays.forget(kept, of)
        for path in list(self._digests):
            if path.startswith(of) and not path.startswith(kept):
                self._digests.pop(path, None)

    def _serve(self, connection: socket.socket) -> None:
        """Errors end the connection, and the engine at its other end reports them."""
        with contextlib.suppress(OSError, ValueError), self._secured(connection) as connection:
            asked = msgspec.msgpack.decode(read_message(connection), type=Question)
            if hmac.compare_digest(asked.token.encode(), self._token.encode()):
                connection.settimeout(PATIENCE)
                self._admit(connection, asked)

    def _secured(self, connection: socket.socket) -> socket.socket:
        """Raises OSError if the other end does not begin TLS as it must."""
        try:
            return self._tls.wrap_socket(connection, server_side=True) if self._tls else connection
        except OSError:
            connection.close()
            raise

    def _admit(self, connection: socket.socket, asked: Question) -> None:
        """Answers when it is the engine's turn. What is asked for is looked up then: a version may be gone by then."""
        still = lambda: send_message(connection, WeightReply(waits=True))  # noqa: E731
        if not asked.relay:
            with self._queue.place(still, STILL):
                self._answer(connection, asked)
            return
        path = f"{asked.name}/{asked.fingerprint}/{asked.first}"
        asker = f"{connection.getpeername()[0]}:{asked.relay}"
        with self.relays.turn(path, asker, seconds=STILL, waits=2, still=still) as other:
            self._answer(connection, asked, path, other)
            said = _heard(connection)
            if said.lost and other:
                self.relays.lost(path, other)
                with self._queue.place(still, STILL):
                    self._answer(connection, asked)
                said = _heard(connection)
            if said.has:
                self.relays.joined(path, asker)
                send_message(connection, WeightReply())  # when it is so: whoever asks next is sent there

    def _answer(self, connection: socket.socket, asked: Question, path: str = "", other: str = "") -> None:
        """`other`: the address of an engine that sends it instead."""
        found = self._find(asked)
        if found is None:
            send_message(connection, WeightReply(refused="the trainer no longer has them, or never had"))
        elif other:
            if path not in self._digests:
                self._digests[path] = digest_of(found.data)
            send_message(connection, WeightReply(elsewhere=other, digest=self._digests[path]))
        else:
            send_message(connection, WeightReply(sum(map(len, found.data)), whole=found.whole))
            for piece in found.data:
                send_all(connection, piece)


def _heard(connection: socket.socket) -> PieceSaid:
    """Raises OSError if the engine has ended, or says nothing for PATIENCE."""
    return msgspec.msgpack.decode(read_message(connection), type=PieceSaid)
