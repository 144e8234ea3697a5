"""Weight sync by broadcast: the trainer's process sends the packed buffer to all engines at once, over a process group of its own (gloo, or
NCCL between processes with GPUs of their own), in buckets of which one travels while the other is filled and read.

No wait is without a bound, and the end of one engine does not end the others' updates: `broadcast_rounds.py` describes how. Whoever connects to the
trainer knows a token; the group's own connections ask for none, and nothing is encrypted.
"""

from __future__ import annotations

import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from headrace.core.errors import IdentityError
from headrace.core.weights import Manifest, WeightUpdate
from headrace.weight_sync.fetching import FetchingReceiver, NetworkTransport
from headrace.weight_sync.round_messages import (
    AbortRound,
    AskWeights,
    BeginRound,
    FromTrainer,
    GotBucket,
    JoinGroup,
    RefuseWeights,
    RoundFailed,
)
from headrace.weight_sync.slots import Manifests, Part
from headrace.weight_sync.sockets import read_message, send_message

if TYPE_CHECKING:
    from headrace.weight_sync.broadcast_rounds import BucketGroup
    from headrace.weight_sync.fetching import OfferingSender


CONNECT = 10.0
"""Seconds for a connection to the trainer."""
TRIES = 6
"""Rounds in which an engine takes part until it gives an update up."""
TURNS = 12
"""An engine waits for its round as long as that many may take in which nothing moves."""


class Broadcast(NetworkTransport, frozen=True, tag="broadcast"):
    """Protocol `Transport`."""

    words: ClassVar = "broadcast"
    about: ClassVar = "the trainer's process sends to all of them at once (gloo, or NCCL)"
    reaches: ClassVar = frozenset({"child", "joined"})
    waits_for_all: ClassVar = True

    @staticmethod
    def copies(engines: int, delta: bool = False) -> int:
        """A binomial tree, as gloo has it."""
        return math.ceil(math.log2(engines + 1))

    patience: float = 10.0
    """Seconds without progress after which a round is given up."""

    def sender(self, manifests: Manifests, once: Collection[str] = ()) -> OfferingSender:
        from headrace.weight_sync.broadcast_rounds import BroadcastServer
        from headrace.weight_sync.fetching import OfferingSender, Offers

        offers = Offers(manifests, once, self.encoding)
        server = BroadcastServer(offers, self.host, self.token, self.patience)
        return OfferingSender(offers, server.where)

    def receiver(self, manifests: Manifests) -> FetchingReceiver:
        return FetchingReceiver(manifests, BroadcastSource(self.token, self.patience))


class BrokenRound(Exception):
    """A round has ended before its bytes had arrived. Its text says why."""


class NoRound(Exception):
    """The trainer begins none."""


class Link:
    """The connection to one trainer, and the group that its rounds use."""

    def __init__(self, address: tuple[str, int], token: str, patience: float) -> None:
        """Raises OSError if nobody listens there."""
        from headrace.weight_sync.broadcast_rounds import own_gpu

        self.address, self._token, self._patience = address, token, patience
        self._connection = socket.create_connection(address, CONNECT)
        self._connection.settimeout(None)
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._group: BucketGroup | None = None
        self._number = 0
        self.send(JoinGroup(token, own_gpu()))
        threading.Thread(target=self._read, name="weights", daemon=True).start()

    def send(self, message: JoinGroup | AskWeights | GotBucket | RoundFailed) -> None:
        send_message(self._connection, message)

    def _read(self) -> None:
        with suppress(OSError, ValueError):
            while True:
                self._events.put(msgspec.msgpack.decode(read_message(self._connection), type=FromTrainer))
        self._events.put(ConnectionError("the trainer has closed the connection"))

    def close(self) -> None:
        self.leave()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # ends the thread that reads
        self._connection.close()

    def leave(self) -> None:
        if self._group:
            self._group.leave()
        self._group, self._number = None, 0

    def ask(self, name: str, fingerprint: str, part: Part) -> BeginRound | RefuseWeights:
        """Waits for a round. Raises OSError, or NoRound if none begins."""
        self.send(AskWeights(name, fingerprint, part, self._number))
        end = time.monotonic() + TURNS * self._patience
        while True:
            try:
                event = self._next(end - time.monotonic())
            except TimeoutError as error:
                raise NoRound(str(error)) from None
            if isinstance(event, BeginRound | RefuseWeights):
                return event
            if isinstance(event, OSError):
                raise event

    def take(self, begin: BeginRound, into: memoryview) -> None:
        """Fills `into` [begin.nbytes]. Raises OSError or BrokenRound; the group has then been left."""
        try:
            self._take(begin, self._joined(begin), into)
        except BrokenRound as broken:
            self.leave()
            self.send(RoundFailed(begin.round, str(broken)))
            raise

    def _take(self, begin: BeginRound, group: BucketGroup, into: memoryview) -> None:
        import torch

        from headrace.weight_sync.broadcast_rounds import BUCKET, READY

        whole = torch.frombuffer(into, dtype=torch.uint8)
        pieces = whole.split(BUCKET)
        for number in range(min(2, len(pieces))):
            group.carry(number, len(pieces[number]))
        arrived = 0
        while arrived < len(pieces):
            try:
                event = self._next(3 * self._patience)  # the trainer is the first to lose its patience
            except TimeoutError:
                raise BrokenRound("nothing arrives") from None
            if isinstance(event, OSError):
                raise event
            if isinstance(event, AbortRound) and event.round == begin.round:
                raise BrokenRound(event.why)
            if not isinstance(event, tuple) or event[0] != begin.group or event[1] == READY:
                continue
            if isinstance(event[1], Exception):
                raise BrokenRound(str(event[1]))
            pieces[arrived].copy_(group.buckets[arrived % 2][: len(pieces[arrived])])
            self.send(GotBucket(begin.round, arrived))
            if arrived + 2 < len(pieces):
                group.carry(arrived + 2, len(pieces[arrived + 2]))
            arrived += 1

    def _joined(self, begin: BeginRound) -> BucketGroup:
        if self._group is None or self._number != begin.group:
            from headrace.weight_sync.broadcast_rounds import BucketGroup, DistantKeys, GroupStore

            self.leave()
            events, number = self._events, begin.group
            self._number = number
            self._group = BucketGroup(
                GroupStore(DistantKeys(self.address, self._token), number, self._patience),
                begin.rank,
                begin.size,
                backend=begin.backend,
                address=self._connection.getsockname()[0],
                patience=self._patience,
                tell=lambda what: events.put((number, what)),
            )
        return self._group

    def _next(self, seconds: float) -> Any:
        """Raises TimeoutError if nothing happens."""
        try:
            return self._events.get(timeout=max(0.0, seconds))
        except queue.Empty:
            raise TimeoutError("the trainer has begun no round in time") from None


class BroadcastSource:
    """Protocol `Source`."""

    def __init__(self, token: str, patience: float) -> None:
        self._token, self._patience = token, patience
        self._link: Link | None = None

    def full(self, update: WeightUpdate, manifest: Manifest, into: memoryview) -> int:
        def place(nbytes: int) -> memoryview:
            if nbytes != len(into):
                raise IdentityError(
                    f"version {update.version} has {nbytes} bytes, and this engine's weights {len(into)}"
                )
            return into

        return len(self._asked(update, "full", place))

    def delta(self, update: WeightUpdate, limit: int) -> bytes:
        def place(nbytes: int) -> memoryview:
            if nbytes > limit:
                raise IdentityError(f"the delta of version {update.version} has {nbytes} bytes, more than the weights")
            return memoryview(bytearray(nbytes))

        return bytes(self._asked(update, "delta", place))

    def _asked(self, update: WeightUpdate, part: Part, place: Callable[[int], memoryview]) -> memoryview:
        """Returns the filled memory that `place` returned for a number of bytes."""
        address = str(update.where["host"]), int(update.where["port"])
        name = update.adapter.name if update.adapter else ""
        for tried in range(1, TRIES + 1):
            try:
                link = self._linked(address)
                answer = link.ask(name, update.fingerprint, part)
                if isinstance(answer, RefuseWeights):
                    raise _refused(update, address, answer.why)
                try:
                    into = place(answer.nbytes)
                except IdentityError as error:
                    link.send(RoundFailed(answer.round, str(error)))
                    raise
                link.take(answer, into)
                return into
            except NoRound as error:
                raise _refused(update, address, str(error)) from None
            except (OSError, BrokenRound) as error:
                if isinstance(error, OSError) and self._link:
                    self._link.close()
                    self._link = None
                    time.sleep(0.2 * tried)
                if tried == TRIES:
                    raise _refused(update, address, f"{error}, in the last of {TRIES} tries") from error
        raise AssertionError

    def _linked(self, address: tuple[str, int]) -> Link:
        if self._link and self._link.address != address:
            self._link.close()
            self._link = None
        self._link = self._link or Link(address, self._token, self._patience)
        return self._link


def _refused(update: WeightUpdate, address: tuple[str, int], why: str) -> IdentityError:
    return IdentityError(
        f"weights of version {update.version}, published with fingerprint {update.fingerprint}, could not be had from the trainer at "
        f"{address[0]}:{address[1]}: {why}. The engine keeps the version that it has"
    )
