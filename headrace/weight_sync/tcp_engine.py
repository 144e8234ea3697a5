"""An engine's end of weight sync over TCP: it fetches in pieces, from the trainer or from other engines, and sends each piece on as soon as it has it.

Each engine begins at another piece, so that all of them soon have something that the others lack. What another engine sends is not
trusted: the trainer tells the hash of each piece that another one sends, and in the end the fingerprint is compared. A piece that differs is
fetched from the trainer and passed on as the trainer has it.
"""

from __future__ import annotations

import functools
import random
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import msgspec
import xxhash
from msgspec.structs import replace

from headrace.core.errors import IdentityError
from headrace.core.printing import echo
from headrace.core.weights import Manifest, WeightUpdate
from headrace.weight_sync.fetching import RelayingReceiver
from headrace.weight_sync.ranges import ByteRange, make_up
from headrace.weight_sync.slots import LONGEST_MANIFEST, Manifests
from headrace.weight_sync.sockets import INTRODUCTION, reach, read_message, receive_into, send_message
from headrace.weight_sync.tcp_server import PATIENCE, Pieces, PieceSaid, Question, TcpServer, WeightReply

T = TypeVar("T")

OTHERS = 15.0
"""Seconds for which another engine may be silent; then the trainer is asked."""
CONNECT = 3.0
"""Seconds for a connection to another engine."""
FAR = 3
"""Engines in a row that are silent, or that this one cannot reach, until it fetches a version from the trainer alone."""
TRIES = 3
"""Connections that an engine makes for a piece before it gives the update up."""
RANGES = "ranges"
"""Asked for instead of a fingerprint: where the part of a rank lies in the packed buffer."""
LONGEST_RANGES = 1 << 26
"""Bytes of that answer."""
LAYOUT = "layout"
"""Asked for instead of a fingerprint: the layout of the whole buffer."""
HASHED = 1 << 20
"""Bytes that are hashed at a time, while the processor's cache still has them."""
MOST, SMALLEST = 64, 1 << 24
"""Pieces of a rank's part, and bytes of a piece where there would be more."""


class Arriving(NamedTuple):
    """A version that is being fetched."""

    name: str
    fingerprint: str
    into: memoryview
    has: set[tuple[int, int]]
    """Its pieces that have arrived: rank, and first byte in the part of that rank."""


class PieceRoom(NamedTuple):
    """The place of a piece in the packed buffer."""

    views: Sequence[memoryview]
    whole: int
    """Bytes of the part that the piece belongs to."""


class TcpSource:
    """Protocol `RelayedSource`."""

    def __init__(self, token: str, tls: ssl.SSLContext | None, smallest: int = SMALLEST) -> None:
        """`smallest`: bytes of a piece."""
        self._token, self._tls, self._smallest = token, tls, smallest
        self._ranges: dict[tuple[str, ...], list[list[ByteRange]]] = {}
        """Ranges of each rank, by what is published, and where."""
        self._parts: dict[str, list[list[ByteRange]]] = {}
        """Ranges of each rank for what was fetched last, by name."""
        self._arriving: Arriving | None = None
        self._server: TcpServer | None = None
        self._avoided: set[str] = set()
        """Addresses of other engines that were silent, or sent other bytes, since this version began."""
        self._silent = 0
        """Number of silent ones since another engine has sent something."""
        self.verified: Callable[[str, str], memoryview | None] = lambda name, fingerprint: None
        """Returns a version that this engine has, and has compared."""
        self.others = 0
        self.direct = False

    def full(self, update: WeightUpdate, manifest: Manifest, into: memoryview) -> int:
        name, label = _name(update), str(update.where.get("label", update.fingerprint))
        places, split = _places(update), "parts" in update.where
        self._parts[name] = ranges = self._ranges_at(update, manifest, places) if split else [[ByteRange(0, len(into))]]
        self._arriving = Arriving(name, update.fingerprint, into, set())
        self._avoided, self._silent = set(), min(self._silent, FAR - 1)  # one is tried with every version
        wanted = [(rank, *piece) for rank, own in enumerate(ranges) for piece in _cut(_length(own), self._smallest)]
        self._serve(places[0])
        start = random.randrange(len(wanted))  # all engines are told of a version at once
        for rank, first, nbytes in wanted[start:] + wanted[:start]:
            question = Question(self._token, name, label, "full", first=first, nbytes=nbytes, rank=rank)
            room = PieceRoom(views(into, ranges[rank], first, nbytes), _length(ranges[rank]))
            self._piece(update, places[rank], question, room)
        return manifest.payload if split else len(into)

    def delta(self, update: WeightUpdate, limit: int) -> bytes:
        reading = functools.partial(_whole_answer, limit=limit, what=f"the delta of version {update.version}")
        return self._asked(
            update, _places(update)[0], Question(self._token, _name(update), update.fingerprint, "delta"), reading
        )

    def manifest(self, update: WeightUpdate) -> Manifest:
        """Returns the layout of an update that the engine was not prepared for."""
        reading = functools.partial(_whole_answer, limit=LONGEST_MANIFEST, what="the layout of the weights")
        question = Question(self._token, _name(update), LAYOUT, "full")
        return msgspec.msgpack.decode(self._asked(update, _places(update)[0], question, reading), type=Manifest)

    def close(self) -> None:
        """Sends other engines nothing more: they ask the trainer."""
        if self._server:
            self._server.close()

    def _pieces(self, asked: Question) -> Pieces | None:
        """Returns a piece for another engine."""
        found, arriving = self.verified(asked.name, asked.fingerprint), self._arriving
        if found is None and arriving and (asked.name, asked.fingerprint) == (arriving.name, arriving.fingerprint):
            found = arriving.into if (asked.rank, asked.first) in arriving.has else None
        ranges = self._parts.get(asked.name, [])
        if found is None or not 0 <= asked.rank < len(ranges):
            return None
        own = ranges[asked.rank]
        return Pieces(views(found, own, asked.first, asked.nbytes), _length(own))

    def _serve(self, place: tuple[str, int]) -> None:
        """Begins to send pieces to others, at the address at which this machine reaches the trainer."""
        if self._server is None and self._tls is None:
            with suppress(OSError), reach(place, INTRODUCTION, None) as connection:
                self._server = TcpServer(self._pieces, connection.getsockname()[0], self._token, None)

    def _piece(self, update: WeightUpdate, place: tuple[str, int], question: Question, room: PieceRoom) -> None:
        alone = self.direct or self._silent >= FAR
        relay = self._server.address[1] if self._server and not alone else 0

        def read(connection: socket.socket, reply: WeightReply) -> None:
            there = replace(question, fingerprint=update.fingerprint)
            if reply.elsewhere and not self._from(reply, there, room.views):
                send_message(connection, PieceSaid(lost=True))
                reply = _reply(connection)
            if not reply.elsewhere:
                self._filled(connection, update, reply, room)
            if self._arriving:
                self._arriving.has.add((question.rank, question.first))
            if relay:
                with suppress(OSError, ValueError):  # then nobody is sent here for it
                    send_message(connection, PieceSaid(has=True))
                    _reply(connection)

        self._asked(update, place, replace(question, relay=relay), read)

    def _filled(self, connection: socket.socket, update: WeightUpdate, reply: WeightReply, room: PieceRoom) -> None:
        """Reads the piece from the trainer."""
        if reply.refused:
            raise _refused(update, connection.getpeername()[:2], reply)
        if (found := reply.whole or reply.nbytes) != room.whole:
            raise IdentityError(f"version {update.version} has {found} bytes, and this engine's weights {room.whole}")
        for view in room.views:
            receive_into(connection, view)

    def _from(self, named: WeightReply, question: Question, into: Sequence[memoryview]) -> bool:
        """Returns whether another engine has sent the piece."""
        address = named.elsewhere
        host, _, port = address.rpartition(":")
        if address in self._avoided:
            return False
        try:
            with reach((host, int(port)), CONNECT, None) as connection:
                connection.settimeout(OTHERS)
                send_message(connection, question)
                if _reply(connection).nbytes != question.nbytes:
                    return False
                same = _hashed(connection, into) == named.digest
        except TimeoutError:
            self._avoided.add(address)
            self._silent += 1
            return False
        except (OSError, ValueError):
            return False
        self._silent = 0
        if same:
            self.others += 1
        else:
            self._avoided.add(address)
            echo(
                f"the engine at {address} sent other bytes than were published: the trainer is asked for them", err=True
            )
        return same

    def _ranges_at(
        self, update: WeightUpdate, manifest: Manifest, places: list[tuple[str, int]]
    ) -> list[list[ByteRange]]:
        """Raises IdentityError if the parts do not make up the whole."""
        name = _name(update)
        key = name, *(f"{host}:{port}" for host, port in places)
        if key not in self._ranges:
            reading = functools.partial(_whole_answer, limit=LONGEST_RANGES, what="the layout of a part")
            question = Question(self._token, name, RANGES, "full")
            answers = [self._asked(update, place, question, reading) for place in places]
            found = [msgspec.msgpack.decode(answer, type=list[ByteRange]) for answer in answers]
            if not make_up(manifest, found):
                raise IdentityError(f"the parts of version {update.version} do not make up this engine's weights")
            self._ranges = {key: found} | {
                other: ranges for other, ranges in self._ranges.items() if other[1:] == key[1:]
            }
        return self._ranges[key]

    def _asked(
        self,
        update: WeightUpdate,
        place: tuple[str, int],
        question: Question,
        read: Callable[[socket.socket, WeightReply], T],
    ) -> T:
        host, port = place
        for tried in range(1, TRIES + 1):
            try:
                with reach(place, INTRODUCTION, self._tls) as connection:
                    connection.settimeout(PATIENCE)
                    send_message(connection, question)
                    reply = _reply(connection)
                    if not reply.refused:
                        return read(connection, reply)
                    raise _refused(update, place, reply)
            except (OSError, ValueError) as error:
                if tried == TRIES:
                    raise IdentityError(
                        f"weights of version {update.version} could not be fetched from the trainer at {host}:{port} in {TRIES} tries "
                        f"({error}). The engine keeps the version that it has"
                    ) from error
                time.sleep(0.2 * tried)
        raise AssertionError


class TcpReceiver(RelayingReceiver):
    """Protocol `WeightReceiver`, and a server of what it has received. Over TLS it serves nobody: engines have no certificates."""

    def __init__(self, manifests: Manifests, source: TcpSource) -> None:
        super().__init__(manifests, source)
        source.verified = functools.partial(self.find, part="full")
        self._tcp = source

    def close(self) -> None:
        self._tcp.close()


def views(into: memoryview, ranges: Sequence[ByteRange], first: int, nbytes: int) -> list[memoryview]:
    """Returns where these bytes of a part lie in the packed buffer."""
    found, at, last = [], 0, first + nbytes
    for part in ranges:
        start, end = max(first, at), min(last, at + part.nbytes)
        if start < end:
            found.append(into[part.offset + start - at : part.offset + end - at])
        at += part.nbytes
    return found


def _cut(nbytes: int, smallest: int) -> list[tuple[int, int]]:
    """Returns first byte and length of the pieces of a part."""
    size = max(smallest, -(-nbytes // MOST))
    return [(first, min(size, nbytes - first)) for first in range(0, nbytes, size)]


def _length(ranges: Sequence[ByteRange]) -> int:
    return sum(part.nbytes for part in ranges)


def _reply(connection: socket.socket) -> WeightReply:
    """Returns the reply, however many wait before it."""
    while (reply := msgspec.msgpack.decode(read_message(connection), type=WeightReply)).waits:
        pass
    return reply


def _refused(update: WeightUpdate, place: tuple[str, int], reply: WeightReply) -> IdentityError:
    host, port = place
    return IdentityError(
        f"weights of version {update.version}, published with fingerprint {update.fingerprint}, cannot be fetched from "
        f"{host}:{port}: {reply.refused}. The engine keeps the version that it has"
    )


def _hashed(connection: socket.socket, into: Sequence[memoryview]) -> bytes:
    """Fills these views, and returns the hash of all of them (`digest_of`)."""
    whole = xxhash.xxh3_128()
    for view in into:
        for start in range(0, len(view), HASHED):
            receive_into(connection, some := view[start : start + HASHED])
            whole.update(some)
    return whole.digest()


def _places(update: WeightUpdate) -> list[tuple[str, int]]:
    """Returns the address of the trainer, or of each of its ranks."""
    where = update.where
    return [(str(host), int(port)) for host, port in where.get("parts") or [(where["host"], where["port"])]]


def _name(update: WeightUpdate) -> str:
    return update.adapter.name if update.adapter else ""


def _whole_answer(connection: socket.socket, reply: WeightReply, *, limit: int, what: str) -> bytes:
    if reply.nbytes > limit:
        raise IdentityError(f"{what} has {reply.nbytes} bytes, more than it may")
    buffer = bytearray(reply.nbytes)
    receive_into(connection, memoryview(buffer))
    return bytes(buffer)
