"""The trainer's end over TCP where its weights are split over ranks: each rank keeps and serves its own part of the packed buffer.

    every rank    two slots of the ranges that it holds, and a server (`tcp.py`)
    rank 0        the fingerprint: it reads the other ranks' parts in canonical order, in pieces that it keeps no longer than to hash them
    engine        asks each rank for its ranges once, and for its part of every version

No process holds the whole model, and the bytes, their layout and their fingerprint are those of one rank's.
"""

from __future__ import annotations

import mmap
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack

import msgspec
import torch

from headrace.core.protocols import WeightSender
from headrace.core.weights import AdapterSpec, Manifest, TensorSpec, WeightUpdate
from headrace.weight_sync.over_tcp.tcp import PATIENCE, RANGES, Question, Tcp, TcpServer, WeightReply
from headrace.weight_sync.packed import fingerprint_of
from headrace.weight_sync.ranges import ByteRange, RankParts, follower_update
from headrace.weight_sync.slots import PIECE, Manifests, Part, Slots, anonymous_memory
from headrace.weight_sync.sockets import INTRODUCTION, reach, read_message, receive_into, send_message


class TcpPartSender(WeightSender):
    """Protocol `WeightSender`, in every rank."""

    def __init__(self, transport: Tcp, manifests: Manifests, once: Collection[str], ranks: RankParts) -> None:
        self._manifests, self._ranks, self._token = manifests, ranks, transport.token
        self._own = ranks.ranges[ranks.rank]
        self._slots = Slots(anonymous_memory(), {name: _room(ranges) for name, ranges in self._own.items()}, once)
        self._labels = {name: [""] * self._slots.count(name) for name in manifests}
        self._copies: Counter[str] = Counter()
        self._tls = transport.tls.trusting() if transport.tls else None
        server = TcpServer(self, transport)
        self._addresses: Sequence[tuple[str, int]] = ranks.exchange(server.address)

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
            fingerprint=self._fingerprint(name, label),
            nbytes=self._manifests[name].payload,
            seconds=seconds,
            where={"parts": [list(address) for address in self._addresses], "label": label},
            adapter=adapter,
        )

    @torch.no_grad()
    def _fill(self, name: str, number: int) -> None:
        room = torch.frombuffer(self._slots.buffer(name, number), dtype=torch.uint8)
        dtypes = {spec.name: getattr(torch, spec.dtype) for spec in self._manifests[name].tensors}
        at = 0
        for run in self._ranks.runs(name):
            converted = run.values.to(dtypes[run.name]).contiguous().view(torch.uint8)
            room[at : at + len(converted)].copy_(converted)
            at += len(converted)

    def _fingerprint(self, name: str, label: str) -> str:
        """Raises OSError if another rank cannot be read from."""
        with ExitStack() as stack:
            readers: list[Callable[[int], memoryview]] = []
            for rank, address in enumerate(self._addresses):
                if rank == self._ranks.rank:
                    own = self.find(name, label, "full")
                    assert own is not None
                    readers.append(_memory_reader(own))
                else:
                    connection = stack.enter_context(reach(address, INTRODUCTION, self._tls))
                    readers.append(_rank_reader(connection, Question(self._token, name, label, "full")))
            order = sorted((one, rank) for rank, ranges in enumerate(self._ranks.ranges) for one in ranges[name])
            left = iter(order)

            def bytes_of(spec: TensorSpec) -> Iterator[memoryview]:
                at = spec.offset
                while at < spec.offset + spec.nbytes:
                    one, rank = next(left)
                    for start in range(0, one.nbytes, PIECE):
                        yield readers[rank](min(PIECE, one.nbytes - start))
                    at += one.nbytes

            return fingerprint_of(self._manifests[name], bytes_of)


def _length(ranges: Sequence[ByteRange]) -> int:
    return sum(one.nbytes for one in ranges)


def _room(ranges: Sequence[ByteRange]) -> Manifest:
    """The layout of a slot for a part: whole pages, at least one."""
    return Manifest((), -(-max(1, _length(ranges)) // mmap.PAGESIZE) * mmap.PAGESIZE)


def _memory_reader(memory: memoryview) -> Callable[[int], memoryview]:
    """Returns a function that gives the next bytes, as many as it is asked for."""
    at = 0

    def read(nbytes: int) -> memoryview:
        nonlocal at
        at += nbytes
        return memory[at - nbytes : at]

    return read


def _rank_reader(connection: socket.socket, question: Question) -> Callable[[int], memoryview]:
    """The same, from another rank. The bytes are valid until the next call. Raises OSError."""
    connection.settimeout(PATIENCE)
    send_message(connection, question)
    reply = msgspec.msgpack.decode(read_message(connection), type=WeightReply)
    if reply.refused:
        raise ConnectionError(f"another rank has no part of this version: {reply.refused}")
    room = memoryview(bytearray(PIECE))

    def read(nbytes: int) -> memoryview:
        receive_into(connection, room[:nbytes])
        return room[:nbytes]

    return read
