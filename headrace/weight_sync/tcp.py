"""Weight sync over TCP: engines fetch from a server in the trainer's process, which sends the packed buffer.

    engine    length, {token, name, fingerprint, part}      part: full or delta
    trainer   length, {waits}, any number of times; length, {nbytes} or {refused}; then the bytes

Where the trainer's weights are split over ranks, each rank answers for its own part (`TcpPartSender`), and the engine asks all of them. A
connection serves one question. Whoever does not know the token is answered nothing. The place in an update (`host`, `port`) is recorded
in metrics; the token is in the start messages only.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import itertools
import mmap
import random
import socket
import ssl
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from headrace.core.errors import IdentityError
from headrace.core.protocols import WeightSender
from headrace.core.types import Struct
from headrace.core.weights import AdapterSpec, Manifest, WeightUpdate
from headrace.weight_sync.fetching import FetchingReceiver, SecuredTransport
from headrace.weight_sync.ranges import ByteRange, RankParts, follower_update, make_up
from headrace.weight_sync.rank_digests import RankDigests
from headrace.weight_sync.slots import Manifests, Part, Slots, WeightShelf, anonymous_memory, send_all
from headrace.weight_sync.sockets import (
    INTRODUCTION,
    ConnectionServer,
    SendQueue,
    reach,
    read_message,
    receive_into,
    send_message,
)

if TYPE_CHECKING:
    import torch

    from headrace.weight_sync.fetching import OfferedVersion, OfferingSender


T = TypeVar("T")

PATIENCE = 60.0
"""Seconds in which no byte of an answer arrives, or a piece of it cannot be sent, until a connection counts as broken."""
AT_ONCE = 64
"""Engines that are sent to at a time. Others wait, and are told so."""
CONNECTIONS = 2048
"""Connections at a time, those that wait included. More are closed."""
TRIES = 3
"""Connections that an engine makes for an update before it gives it up."""
RANGES = "ranges"
"""Asked for instead of a fingerprint: where the part of a rank lies in the packed buffer."""
LONGEST_RANGES = 1 << 26
"""Bytes of that answer."""


class Tcp(SecuredTransport, frozen=True, tag="tcp"):
    """Protocol `Transport`."""

    words: ClassVar = "TCP"
    about: ClassVar = "they fetch from the trainer's process"
    reaches: ClassVar = frozenset({"child", "joined", "rollout host"})

    @staticmethod
    def copies(engines: int) -> int:
        """The trainer sends to each."""
        return engines

    def sender(self, manifests: Manifests, once: Collection[str] = ()) -> OfferingSender:
        from headrace.weight_sync.fetching import OfferingSender, Offers

        offers = Offers(manifests, once, self.encoding)
        server = TcpServer(offers, self)
        return OfferingSender(offers, server.where)

    @property
    def takes_parts(self) -> bool:
        return not self.encoding.delta

    def part_sender(self, manifests: Manifests, once: Collection[str], ranks: RankParts) -> TcpPartSender:

        return TcpPartSender(self, manifests, once, ranks)

    def receiver(self, manifests: Manifests) -> FetchingReceiver:
        return FetchingReceiver(manifests, TcpSource(self.token, self.tls.trusting() if self.tls else None))


class Question(Struct, frozen=True):
    token: str
    name: str
    """The adapter's; empty for the model."""
    fingerprint: str
    part: Part


class WeightReply(Struct, frozen=True):
    nbytes: int = 0
    refused: str = ""
    waits: bool = False
    """Whether others are sent to first; another reply follows."""


# -- the trainer's end --------------------------------------------------------------------------------------------------------


class TcpServer:
    """Answers in threads, while the trainer trains."""

    def __init__(self, offers: WeightShelf, transport: Tcp) -> None:
        """Raises OSError if it cannot listen at that address, ConfigError for a certificate that cannot be used."""
        self._offers, self._token = offers, transport.token
        self._tls = transport.tls.serving() if transport.tls else None
        self._connections = ConnectionServer(transport.host, self._serve, at_once=CONNECTIONS)
        self._queue = SendQueue(AT_ONCE)

    @property
    def address(self) -> tuple[str, int]:
        return self._connections.address

    def where(self, name: str, offer: OfferedVersion) -> dict[str, Any]:
        return self._connections.where

    def _serve(self, connection: socket.socket) -> None:
        """Errors end the connection, and the engine at its other end reports them."""
        with contextlib.suppress(OSError, ValueError), self._secured(connection) as connection:
            asked = msgspec.msgpack.decode(read_message(connection), type=Question)
            if hmac.compare_digest(asked.token.encode(), self._token.encode()):
                connection.settimeout(PATIENCE)
                waits = WeightReply(waits=True)
                # what is asked for is looked up when it is its turn: a version may be gone by then
                with self._queue.place(lambda: send_message(connection, waits), PATIENCE / 4):
                    self._answer(connection, asked)

    def _secured(self, connection: socket.socket) -> socket.socket:
        """Raises OSError if the other end does not begin TLS as it must."""
        try:
            return self._tls.wrap_socket(connection, server_side=True) if self._tls else connection
        except OSError:
            connection.close()
            raise

    def _answer(self, connection: socket.socket, asked: Question) -> None:
        found = self._offers.find(asked.name, asked.fingerprint, asked.part)
        if found is None:
            send_message(connection, WeightReply(refused="the trainer no longer has them, or never had"))
        else:
            send_message(connection, WeightReply(len(found)))
            send_all(connection, found)


# -- the engine's end ---------------------------------------------------------------------------------------------------------


class TcpSource:
    """Protocol `Source`."""

    def __init__(self, token: str, tls: ssl.SSLContext | None) -> None:
        self._token, self._tls = token, tls
        self._ranges: dict[tuple[str, ...], list[list[ByteRange]]] = {}
        """Ranges of each rank, by what is published, and where."""

    def full(self, update: WeightUpdate, manifest: Manifest, into: memoryview) -> int:
        if "parts" in update.where:
            return self._parts(update, manifest, into)

        def read(connection: socket.socket, nbytes: int) -> int:
            if nbytes != len(into):
                raise IdentityError(
                    f"version {update.version} has {nbytes} bytes, and this engine's weights {len(into)}"
                )
            receive_into(connection, into)
            return nbytes

        return self._asked(update, _place(update), update.fingerprint, read)

    def delta(self, update: WeightUpdate, limit: int) -> bytes:
        reading = functools.partial(_whole_answer, limit=limit, what=f"the delta of version {update.version}")
        return self._asked(update, _place(update), update.fingerprint, reading, part="delta")

    def _parts(self, update: WeightUpdate, manifest: Manifest, into: memoryview) -> int:
        """Fetches the part of each rank to its place."""
        places = [(str(host), int(port)) for host, port in update.where["parts"]]
        parts = list(zip(places, self._ranges_at(update, manifest, places), strict=True))
        start = random.randrange(
            len(parts)
        )  # all engines are told of a version at once, and would begin at the same rank
        for place, own in parts[start:] + parts[:start]:

            def read(connection: socket.socket, nbytes: int, own: list[ByteRange] = own) -> None:
                if nbytes != sum(part.nbytes for part in own):
                    raise IdentityError(
                        f"a part of version {update.version} has {nbytes} bytes, which is another length"
                    )
                for part in own:
                    receive_into(connection, into[part.offset : part.offset + part.nbytes])

            self._asked(update, place, str(update.where["label"]), read)
        return manifest.payload

    def _ranges_at(
        self, update: WeightUpdate, manifest: Manifest, places: list[tuple[str, int]]
    ) -> list[list[ByteRange]]:
        """Raises IdentityError if the parts do not make up the whole."""
        name = update.adapter.name if update.adapter else ""
        key = name, *(f"{host}:{port}" for host, port in places)
        if key not in self._ranges:
            reading = functools.partial(_whole_answer, limit=LONGEST_RANGES, what="the layout of a part")
            answers = [self._asked(update, place, RANGES, reading) for place in places]
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
        fingerprint: str,
        read: Callable[[socket.socket, int], T],
        part: Part = "full",
    ) -> T:
        host, port = place
        name = update.adapter.name if update.adapter else ""
        for tried in range(1, TRIES + 1):
            try:
                with reach(place, INTRODUCTION, self._tls) as connection:
                    connection.settimeout(PATIENCE)
                    send_message(connection, Question(self._token, name, fingerprint, part))
                    reply = _reply(connection)
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


def _reply(connection: socket.socket) -> WeightReply:
    """Returns the reply, however many wait before it."""
    while (reply := msgspec.msgpack.decode(read_message(connection), type=WeightReply)).waits:
        pass
    return reply


def _place(update: WeightUpdate) -> tuple[str, int]:
    return str(update.where["host"]), int(update.where["port"])


def _whole_answer(connection: socket.socket, nbytes: int, *, limit: int, what: str) -> bytes:
    if nbytes > limit:
        raise IdentityError(f"{what} has {nbytes} bytes, more than it may")
    buffer = bytearray(nbytes)
    receive_into(connection, memoryview(buffer))
    return bytes(buffer)


# --- The trainer's end over TCP where its weights are split over ranks
# Each rank keeps and serves its own part of the packed buffer.
#
#     every rank    two slots of the ranges that it holds, and a server (`tcp.py`)
#     rank 0        the fingerprint, of hashes that each rank makes of its part (`rank_digests.py`)
#     engine        asks each rank for its ranges once, and for its part of every version
#
# No process holds the whole model, and the bytes, their layout and their fingerprint are those of one rank's.


class TcpPartSender(WeightSender):
    """Protocol `WeightSender`, in every rank."""

    def __init__(self, transport: Tcp, manifests: Manifests, once: Collection[str], ranks: RankParts) -> None:
        self._manifests, self._ranks = manifests, ranks
        self._own = ranks.ranges[ranks.rank]
        self._slots = Slots(anonymous_memory(), {name: _room(ranges) for name, ranges in self._own.items()}, once)
        self._labels = {name: [""] * self._slots.count(name) for name in manifests}
        self._copies: Counter[str] = Counter()
        server = TcpServer(self, transport)
        self._addresses: Sequence[tuple[str, int]] = ranks.exchange(server.address)
        self._places = {name: _placed(ranges) for name, ranges in self._own.items()}
        self._digests = RankDigests(transport.host, manifests, ranks, self._held)

    @property
    def held_bytes(self) -> int:
        """Bytes of this rank's slots."""
        return sum(self._slots.count(name) * len(self._slots.buffer(name, 0)) for name in self._own)

    def find(self, name: str, fingerprint: str, part: Part) -> memoryview | None:
        """Returns this rank's part of a version (named by its label), or its ranges."""
        if fingerprint == RANGES and name in self._own:
            return memoryview(msgspec.msgpack.encode(self._own[name]))
        labels = self._labels.get(name, [])
        if fingerprint not in labels:
            return None
        return self._slots.buffer(name, labels.index(fingerprint))[: _length(self._own[name])]

    def copy(
        self, version: int, parameters: Iterable[tuple[str, torch.Tensor]], adapter: AdapterSpec | None = None
    ) -> Callable[[], WeightUpdate]:
        """The parameters are not read: that would gather each of them whole."""
        started = time.perf_counter()
        name = adapter.name if adapter else ""
        number = self._copies[name] % self._slots.count(name)
        self._copies[name] += 1
        label = f"copy {self._copies[name]}"
        self._labels[name][number] = ""
        self._fill(name, number)
        self._labels[name][number] = label
        self._ranks.exchange(None)  # from here on every rank serves it
        seconds = time.perf_counter() - started
        if self._ranks.rank:
            return lambda: follower_update(version, adapter)
        return lambda: WeightUpdate(
            version=version,
            kind="adapter" if adapter else "full",
            fingerprint=self._digests.fingerprint(name, label),
            nbytes=self._manifests[name].payload,
            seconds=seconds,
            where={"parts": [list(address) for address in self._addresses], "label": label},
            adapter=adapter,
        )

    def _fill(self, name: str, number: int) -> None:
        import torch

        room = torch.frombuffer(self._slots.buffer(name, number), dtype=torch.uint8)
        dtypes = {spec.name: getattr(torch, spec.dtype) for spec in self._manifests[name].tensors}
        at = 0
        with torch.no_grad():
            for part in self._ranks.values(name):
                converted = part.values.to(dtypes[part.name]).contiguous().view(torch.uint8)
                room[at : at + len(converted)].copy_(converted)
                at += len(converted)

    def _held(self, name: str, label: str, wanted: ByteRange) -> memoryview:
        """Returns bytes of a copy of this rank's part. Raises ValueError for others."""
        held = self.find(name, label, "full")
        offsets, starts = self._places[name]
        number = bisect_right(offsets, wanted.offset) - 1
        if held is None or number < 0:
            raise ValueError(f"this rank has no byte {wanted.offset} of {label}")
        at = starts[number] + wanted.offset - offsets[number]
        if not starts[number] <= at <= at + wanted.nbytes <= starts[number + 1]:
            raise ValueError(f"this rank does not have {wanted.nbytes} bytes from {wanted.offset} on of {label}")
        return held[at : at + wanted.nbytes]


def _placed(ranges: Sequence[ByteRange]) -> tuple[list[int], list[int]]:
    """Returns where each range begins in the packed buffer, and in the part, whose end is the last one."""
    assert list(ranges) == sorted(ranges), "in canonical order"
    starts = itertools.accumulate((part.nbytes for part in ranges), initial=0)
    return [part.offset for part in ranges], list(starts)


def _length(ranges: Sequence[ByteRange]) -> int:
    return sum(part.nbytes for part in ranges)


def _room(ranges: Sequence[ByteRange]) -> Manifest:
    """The layout of a slot for a part: whole pages, at least one."""
    return Manifest((), -(-max(1, _length(ranges)) // mmap.PAGESIZE) * mmap.PAGESIZE)
