"""Weight sync over TCP: engines fetch pieces of the packed buffer from a server in the trainer's process (`tcp_server.py`), and from each
other (`tcp_engine.py`).

Where the trainer's weights are split over ranks, each rank answers for its own part (`TcpPartSender`), and the engine asks all of them. The place
in an update (`host`, `port`) is recorded in metrics; the token is in the start messages only.
"""

from __future__ import annotations

import itertools
import mmap
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from headrace.core.protocols import WeightSender
from headrace.core.weights import AdapterSpec, Manifest, WeightUpdate
from headrace.weight_sync.fetching import SecuredTransport
from headrace.weight_sync.ranges import ByteRange, RankParts, follower_update
from headrace.weight_sync.rank_digests import RankDigests
from headrace.weight_sync.slots import Manifests, Part, Shelves, Slots, anonymous_memory
from headrace.weight_sync.tcp_engine import LAYOUT, RANGES, TcpReceiver, TcpSource
from headrace.weight_sync.tcp_server import Pieces, Question, TcpServer, piece_of

if TYPE_CHECKING:
    import torch

    from headrace.weight_sync.fetching import OfferedVersion, OfferingSender


class Tcp(SecuredTransport, frozen=True, tag="tcp"):
    """Protocol `Transport`."""

    words: ClassVar = "TCP"
    about: ClassVar = "they fetch from the trainer's process and from each other"
    reaches: ClassVar = frozenset({"child", "joined", "rollout host", "fetching server"})
    keeps_for_sleepers: ClassVar = frozenset({"fetching server"})

    @staticmethod
    def copies(engines: int, delta: bool = False) -> int:
        """Pieces leave the trainer twice, and engines send them on. Differences are sent by the trainer alone."""
        return engines if delta else min(engines, 2)

    def sender(self, manifests: Manifests, once: Collection[str] = ()) -> OfferingSender:
        from headrace.weight_sync.fetching import OfferingSender, Offers

        offers = Offers(manifests, once, self.encoding)
        server = self._server(offers)

        def where(name: str, offer: OfferedVersion) -> dict[str, Any]:
            server.forget(f"{name}/{offer.fingerprint}/", f"{name}/")
            return server.where

        return OfferingSender(offers, where)

    def _server(self, shelf: Shelves) -> TcpServer:
        """Raises OSError if it cannot listen at that address, ConfigError for a certificate that cannot be used."""

        def find(asked: Question) -> Pieces | None:
            if asked.fingerprint == LAYOUT and asked.name in shelf.manifests:
                return piece_of(memoryview(msgspec.msgpack.encode(shelf.manifests[asked.name])), asked)
            return piece_of(shelf.find(asked.name, asked.fingerprint, asked.part), asked)

        return TcpServer(find, self.host, self.token, self.tls.serving() if self.tls else None)

    @property
    def takes_parts(self) -> bool:
        return not self.encoding.delta

    def part_sender(self, manifests: Manifests, once: Collection[str], ranks: RankParts) -> TcpPartSender:

        return TcpPartSender(self, manifests, once, ranks)

    def receiver(self, manifests: Manifests) -> TcpReceiver:
        return TcpReceiver(manifests, TcpSource(self.token, self.tls.trusting() if self.tls else None))


# --- The trainer's end over TCP where its weights are split over ranks
# Each rank keeps and serves its own part of the packed buffer.
#
#     every rank    two slots of the ranges that it holds, and a server
#     rank 0        the fingerprint, of hashes that each rank makes of its part (`rank_digests.py`)
#     engine        asks each rank for its ranges once, and for its part of every version, which other engines may send
#
# No process holds the whole model, and the bytes, their layout and their fingerprint are those of one rank's.


class TcpPartSender(WeightSender):
    """Protocol `WeightSender`, in every rank."""

    def __init__(self, transport: Tcp, manifests: Manifests, once: Collection[str], ranks: RankParts) -> None:
        self.manifests, self._ranks = manifests, ranks
        self._own = ranks.ranges[ranks.rank]
        self._slots = Slots(anonymous_memory(), {name: _room(ranges) for name, ranges in self._own.items()}, once)
        self._labels = {name: [""] * self._slots.count(name) for name in manifests}
        self._copies: Counter[str] = Counter()
        self._server = transport._server(self)
        self._addresses: Sequence[tuple[str, int]] = ranks.exchange(self._server.address)
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
        self._server.forget(f"{name}/{label}/", f"{name}/")
        self._ranks.exchange(None)  # from here on every rank serves it
        seconds = time.perf_counter() - started
        if self._ranks.rank:
            return lambda: follower_update(version, adapter)
        return lambda: WeightUpdate(
            version=version,
            kind="adapter" if adapter else "full",
            fingerprint=self._digests.fingerprint(name, label),
            nbytes=self.manifests[name].payload,
            seconds=seconds,
            where={"parts": [list(address) for address in self._addresses], "label": label},
            adapter=adapter,
        )

    def _fill(self, name: str, number: int) -> None:
        import torch

        room = torch.frombuffer(self._slots.buffer(name, number), dtype=torch.uint8)
        dtypes = {spec.name: getattr(torch, spec.dtype) for spec in self.manifests[name].tensors}
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
