"""One fingerprint of weights that are split over the ranks of a trainer: each rank hashes the blocks that begin in its part.

    rank 0      asks every rank for the hashes of its blocks, and combines them in canonical order (`packed.combined`)
    each rank   hashes its blocks; the end of a block that goes on in another rank's part it asks that rank for

So no process reads the whole model: 16 bytes for each 256 KiB go to rank 0, and less than a block for each range between two others. The ranks
ask each other over connections of their own, unencrypted, as all that ranks tell each other, and with a token that rank 0 has drawn.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import secrets
import socket
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import msgspec

from headrace.core.errors import RankUnreachable
from headrace.core.types import Struct
from headrace.core.weights import Manifest, TensorSpec
from headrace.weight_sync.ranges import ByteRange, RankParts
from headrace.weight_sync.slots import send_all
from headrace.weight_sync.sockets import (
    INTRODUCTION,
    ConnectionServer,
    reach,
    read_message,
    receive_into,
    send_message,
)

PATIENCE = 600.0
"""Seconds for another rank to hash its part. One that has ended closes its connections at once."""
LONGEST = 1 << 26
"""Bytes of a question."""
AT_ONCE = 4096


class AskRank(Struct, frozen=True):
    token: str
    name: str
    """The adapter's; empty for the model."""
    label: str
    """The copy, as the sender of weights calls it."""
    ranges: list[ByteRange] | None = None
    """Bytes that are asked for; None: the hashes of this rank's blocks."""


class RankAnswer(Struct, frozen=True):
    nbytes: int


class HashedBlocks(NamedTuple):
    """The blocks that begin in one range of a rank. Positions in the packed buffer."""

    start: int
    held: int
    """The end of the range."""
    end: int
    """The end of the last block, which may lie behind the range."""


def blocks_of(manifest: Manifest, ranges: Sequence[ByteRange]) -> list[HashedBlocks]:
    """Returns the blocks that begin in each of these ranges, in their order. A range lies within one parameter."""
    from headrace.weight_sync.packed import BLOCK

    starts = [spec.offset for spec in manifest.tensors]
    found = []
    for part in ranges:
        spec = manifest.tensors[bisect_right(starts, part.offset) - 1]
        at, held = part.offset - spec.offset, part.offset - spec.offset + part.nbytes
        first = -(-at // BLOCK) * BLOCK
        last = min(spec.nbytes, -(-held // BLOCK) * BLOCK)
        found.append(
            HashedBlocks(
                spec.offset + min(first, held),
                spec.offset + held,
                spec.offset + last if first < held else spec.offset + held,
            )
        )
    return found


class RankDigests:
    """This rank's end, which answers in threads. Every rank makes it at the same time."""

    def __init__(
        self,
        host: str,
        manifests: Mapping[str, Manifest],
        ranks: RankParts,
        read: Callable[[str, str, ByteRange], memoryview],
        *,
        shared: bool = False,
    ) -> None:
        """`read`: returns bytes of a copy that this rank holds, by name, label and place; raises ValueError if it does not hold them.
        `shared`: whether every rank can read all bytes."""
        self._manifests, self._ranks, self._read, self._shared = manifests, ranks, read, shared
        self._met = threading.Event()
        """Set when this rank knows the token: another one may know it sooner, and ask."""
        self._server = ConnectionServer(host, self._serve, at_once=AT_ONCE)
        told = ranks.exchange((self._server.address, secrets.token_hex(16)))
        self._addresses, self._token = [address for address, _ in told], told[0][1]
        self._met.set()

    def fingerprint(self, name: str, label: str) -> str:
        """Returns the fingerprint of a copy that every rank has made. Raises RankUnreachable if another rank does not answer."""
        from headrace.weight_sync.packed import BLOCK, DIGEST, combined

        try:
            answers = self._answers(name, label)
        except OSError as error:
            raise RankUnreachable(f"hashes of published weights: {error}") from error
        manifest, order, at = self._manifests[name], self._sorted(name), [0] * len(answers)
        left = zip(order, blocks_of(manifest, [part for part, _ in order]), strict=True)
        waiting = next(left, None)

        def digests(spec: TensorSpec) -> bytes:
            nonlocal waiting
            found = []
            while waiting and waiting[0][0].offset < spec.offset + spec.nbytes:
                (_, rank), blocks = waiting
                start, at[rank] = at[rank], at[rank] + DIGEST * -(-(blocks.end - blocks.start) // BLOCK)
                found.append(answers[rank][start : at[rank]])
                waiting = next(left, None)
            return b"".join(found)

        made = combined(manifest, digests)
        if at != [len(answer) for answer in answers]:
            raise ValueError("another rank has hashed other blocks than its own")
        return made

    def _answers(self, name: str, label: str) -> list[memoryview]:
        """The hashes of each rank's blocks."""
        ranks = range(len(self._addresses))
        with ExitStack() as stack:
            others = {
                rank: stack.enter_context(self._asked(rank, AskRank(self._token, name, label)))
                for rank in ranks
                if rank != self._ranks.rank
            }  # all of them hash at the same time
            own = self._digests(name, label)
            return [memoryview(own if rank == self._ranks.rank else _answer(others[rank])) for rank in ranks]

    def _sorted(self, name: str) -> list[tuple[ByteRange, int]]:
        """All ranges in the order of the buffer, with their ranks."""
        return sorted((part, rank) for rank, ranges in enumerate(self._ranks.ranges) for part in ranges[name])

    def _digests(self, name: str, label: str) -> bytes:
        """Returns the hashes of this rank's blocks."""
        from headrace.weight_sync.packed import BLOCK, digests_of

        found: list[bytes] = []
        blocks = blocks_of(self._manifests[name], sorted(self._ranks.ranges[self._ranks.rank][name]))
        if self._shared:
            for one in blocks:
                found += digests_of([self._read(name, label, ByteRange(one.start, one.end - one.start))])
            return b"".join(found)
        ends = self._ends(name, label, [(one.held, one.end) for one in blocks if one.end > one.held])
        for one in blocks:
            own = self._read(name, label, ByteRange(one.start, one.held - one.start))
            if one.end > one.held:
                whole = len(own) // BLOCK * BLOCK
                found += digests_of([own[:whole], memoryview(bytes(own[whole:]) + next(ends))])
            else:
                found += digests_of([own])
        return b"".join(found)

    def _ends(self, name: str, label: str, gaps: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """Yields the bytes between each two places, which other ranks hold."""
        order, pieces = self._sorted(name), list[list[tuple[int, ByteRange]]]()
        starts = [part.offset for part, _ in order]
        for start, end in gaps:
            several, number = list[tuple[int, ByteRange]](), bisect_right(starts, start) - 1
            while start < end:
                part, rank = order[number]
                several.append((rank, ByteRange(start, min(end, part.offset + part.nbytes) - start)))
                start, number = part.offset + part.nbytes, number + 1
            pieces.append(several)
        got: dict[int, Iterator[bytes]] = {}
        for rank in sorted({rank for several in pieces for rank, _ in several}):
            wanted = [part for several in pieces for holder, part in several if holder == rank]
            with self._asked(rank, AskRank(self._token, name, label, wanted)) as connection:
                answer = memoryview(_answer(connection))
            sizes = itertools.accumulate((part.nbytes for part in wanted), initial=0)
            got[rank] = iter([bytes(answer[first:last]) for first, last in itertools.pairwise(sizes)])
        for several in pieces:
            yield b"".join(next(got[rank]) for rank, _ in several)

    @contextlib.contextmanager
    def _asked(self, rank: int, question: AskRank) -> Iterator[socket.socket]:
        with reach(self._addresses[rank], INTRODUCTION, None) as connection:
            connection.settimeout(PATIENCE)
            send_message(connection, question)
            yield connection

    def _serve(self, connection: socket.socket) -> None:
        """Errors end the connection, and the rank at its other end reports them."""
        with contextlib.suppress(OSError, ValueError, KeyError), connection:
            asked = msgspec.msgpack.decode(read_message(connection, LONGEST), type=AskRank)
            if not self._met.wait(PATIENCE) or not hmac.compare_digest(asked.token.encode(), self._token.encode()):
                return
            connection.settimeout(PATIENCE)
            if asked.ranges is None:
                pieces = [memoryview(self._digests(asked.name, asked.label))]
            else:
                pieces = [self._read(asked.name, asked.label, part) for part in asked.ranges]
            send_message(connection, RankAnswer(sum(map(len, pieces))))
            for piece in pieces:
                send_all(connection, piece)


def _answer(connection: socket.socket) -> bytearray:
    reply = msgspec.msgpack.decode(read_message(connection), type=RankAnswer)
    room = bytearray(reply.nbytes)
    receive_into(connection, memoryview(room))
    return room
