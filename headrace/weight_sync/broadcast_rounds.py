"""The process group of a broadcast, and the trainer's end of its rounds, each of which brings one version to the engines that ask for it."""

from __future__ import annotations

import hmac
import math
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from headrace.weight_sync.round_messages import (
    AbortRound,
    AskWeights,
    Backend,
    BeginRound,
    FromEngine,
    FromTrainer,
    GetKey,
    GotBucket,
    JoinGroup,
    KeyValue,
    PutKey,
    RefuseWeights,
    RoundFailed,
)
from headrace.weight_sync.sockets import ConnectionServer, read_message, send_message

if TYPE_CHECKING:
    from headrace.weight_sync.fetching import OfferedVersion, Offers


# --- The keys through which the members of a process group find each other
# The keys through which the members of a process group find each other, in the trainer's process.
#
# torch's own store over TCP asks nobody for a token. This one travels by the server of the weights, which does.


PATIENCE = 10.0
"""Seconds for a connection, and for an answer that nobody has to wait for."""
LONGEST_VALUE = 1 << 16
"""Bytes of a value: a member's addresses, one for each other member."""


class Keys:
    """Thread-safe."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, str], bytes] = {}
        self._closed = 0
        """All groups up to this number were given up."""
        self._change = threading.Condition()

    def put(self, group: int, key: str, value: bytes) -> None:
        with self._change:
            if group > self._closed:
                self._values[group, key] = value
                self._change.notify_all()

    def get(self, group: int, key: str, seconds: float) -> bytes | None:
        """Waits until somebody puts it. Returns None after `seconds`, or if its group is given up meanwhile."""
        with self._change:
            self._change.wait_for(lambda: (group, key) in self._values or group <= self._closed, seconds)
            return self._values.get((group, key))

    def close(self, group: int) -> None:
        """Forgets the keys of this group and of all before it. Nobody waits for them any longer."""
        with self._change:
            self._closed = group
            self._values = {key: value for key, value in self._values.items() if key[0] > group}
            self._change.notify_all()


class KeyPlace(Protocol):
    """The keys of all groups, as a member reaches them."""

    def put(self, group: int, key: str, value: bytes) -> None: ...

    def get(self, group: int, key: str, seconds: float) -> bytes | None: ...


class GroupStore(dist.Store):
    """The keys of one group, as torch asks for them."""

    def __init__(self, place: KeyPlace, group: int, seconds: float) -> None:
        super().__init__()
        self._place, self._group, self._seconds = place, group, seconds

    def set(self, key: str, value: bytes | str) -> None:
        self._place.put(self._group, key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Raises TimeoutError if nobody puts it in time."""
        found = self._place.get(self._group, key, self._seconds)
        if found is None:
            raise TimeoutError(f"nobody put {key}")
        return found

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


class DistantKeys:
    """Protocol `KeyPlace`, in an engine: a connection for each question."""

    def __init__(self, address: tuple[str, int], token: str) -> None:
        self._address, self._token = address, token

    def put(self, group: int, key: str, value: bytes) -> None:
        self._asked(PutKey(self._token, group, key, value), PATIENCE)

    def get(self, group: int, key: str, seconds: float) -> bytes | None:
        found = self._asked(GetKey(self._token, group, key), seconds + PATIENCE)
        return None if found.missing else found.value

    def _asked(self, message: PutKey | GetKey, seconds: float) -> KeyValue:
        """Raises OSError."""
        with socket.create_connection(self._address, PATIENCE) as connection:
            connection.settimeout(seconds)
            send_message(connection, message)
            return msgspec.msgpack.decode(read_message(connection, LONGEST_VALUE), type=KeyValue)


# --- A process group that broadcasts buckets, one after another, in a thread of its own.
#
# No other thread waits for it: it reports what has happened, and whoever has waited too long leaves it. A broadcast that never ends (torch
# 2.13, gloo: one receiver was killed, and another waits on) then keeps its thread and its two buckets, never the memory that an engine serves
# from: bytes are copied out of a bucket by whoever receives them.


BUCKET = 1 << 23
"""Bytes. Larger ones are no faster, and two of them stay in the cache."""

READY = -1
"""The number that a group reports when all members have met."""

Tell = Callable[[int | Exception], None]
"""Called with `READY`, with the number of each bucket that was carried, or with the error after which nothing follows."""


class BucketGroup:
    def __init__(
        self, store: dist.Store, rank: int, size: int, *, backend: Backend, address: str, patience: float, tell: Tell
    ) -> None:
        """`address`: of this machine, at which the others reach it. `patience`: seconds for the members to meet."""
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        self.buckets = [torch.empty(BUCKET, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._group: Any = None
        self._work: queue.SimpleQueue[tuple[int, torch.Tensor] | None] = queue.SimpleQueue()

        def make() -> Any:
            make_one = _nccl if backend == "nccl" else _gloo
            return make_one(store, rank, size, address, timedelta(seconds=patience))

        threading.Thread(target=self._run, args=(make, tell), name="broadcast", daemon=True).start()

    def carry(self, number: int, nbytes: int) -> None:
        """Broadcasts the first bytes of bucket `number % 2` from rank 0, after all that was asked for before."""
        self._work.put((number, self.buckets[number % 2][:nbytes]))

    def leave(self) -> None:
        """Gives the group up. Returns at once; its thread ends when the broadcast that it waits for has ended, if ever."""
        self._work.put(None)
        if self._device.type == "cuda" and self._group is not None:
            threading.Thread(target=self._group.abort, daemon=True).start()

    def _run(self, make: Callable[[], Any], tell: Tell) -> None:
        try:
            group = self._group = make()
            tell(READY)
            options = dist.BroadcastOptions()
            options.rootRank = 0
            while work := self._work.get():
                number, bucket = work
                group.broadcast([bucket], options).wait()
                if self._device.type == "cuda":  # not the device: an engine may be capturing a graph
                    torch.cuda.current_stream().synchronize()
                tell(number)
        except Exception as error:
            tell(error)
        self._group = None


def _gloo(store: dist.Store, rank: int, size: int, address: str, patience: timedelta) -> Any:
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=address)]
    options._timeout = patience
    return kind(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int, address: str, patience: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = patience
    return dist.ProcessGroupNCCL(store, rank, size, options)


def own_gpu() -> str:
    """Returns the identity of the GPU that this process uses; empty for none."""
    if not torch.cuda.is_initialized() or not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


# --- The trainer's end of a broadcast
# In rounds, each of which brings one version to the engines that ask for it.
#
# A round begins when every engine that is connected has asked, or `GATHER` seconds after the first one did. Its members form a process group,
# which stays for the next round if that has the same members. Every member acknowledges every bucket, so that the trainer is never more
# than two of them ahead, and knows who is behind. A round is aborted as soon as a member's connection ends, and when nothing has moved for
# `patience` seconds. Then the group is left (a broadcast cannot be ended from outside), all members are told, and those that are left ask
# again: for a new group. Whoever was behind when nothing moved is served alone from then on, until that has worked, so that it delays nobody.


GATHER = 0.5
"""Seconds for which those that have asked wait for the others. Whoever has not asked by then is waited for no more until it asks."""
AT_ONCE = 256
"""Connections at a time. More are closed."""


class RoundLost(Exception):
    """A round cannot end. Its text says why."""


@dataclass(eq=False, kw_only=True)
class GroupMember:
    """An engine, as the trainer knows it."""

    connection: socket.socket
    gpu: str
    asked: AskWeights | None = None
    question: int = 0
    """Its place among all questions that were asked."""
    buckets: int = 0
    """Number of buckets of the current round that it has acknowledged."""
    waited_for: bool = True
    alone: bool = False

    def send(self, message: FromTrainer) -> None:
        """The end of a connection is reported by the thread that reads from it."""
        with suppress(OSError):
            send_message(self.connection, message)


@dataclass(frozen=True)
class StandingGroup:
    number: int
    members: tuple[GroupMember, ...]
    carrier: BucketGroup
    backend: Backend


Event = tuple[Any, Any]
"""(member, its message, or None at its end), or (number of a group, what its `Tell` was called with)."""


class BroadcastServer:
    """Answers engines in threads, and broadcasts in another one, beside the trainer's own."""

    def __init__(self, offers: Offers, host: str, token: str, patience: float) -> None:
        """Raises OSError if it cannot listen at that address."""
        self._offers, self._token, self._patience = offers, token, patience
        self._keys, self._events = Keys(), queue.SimpleQueue[Event]()
        self._members: list[GroupMember] = []
        self._group: StandingGroup | None = None
        self._groups = self._rounds = self._questions = 0
        self._connections = ConnectionServer(host, self._serve, at_once=AT_ONCE)
        threading.Thread(target=self._run, name="weights", daemon=True).start()

    def where(self, name: str, offer: OfferedVersion) -> dict[str, Any]:
        return self._connections.where

    # -- connections ------------------------------------------------------------------------------------------------------

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError):
            message = msgspec.msgpack.decode(read_message(connection, LONGEST_VALUE), type=FromEngine)
            token = getattr(message, "token", "")
            if not hmac.compare_digest(token.encode(), self._token.encode()):
                return
            match message:
                case JoinGroup():
                    self._listen(GroupMember(connection=connection, gpu=message.gpu))
                case PutKey():
                    self._keys.put(message.group, message.key, message.value)
                    send_message(connection, KeyValue())
                case GetKey():
                    value = self._keys.get(message.group, message.key, self._patience)
                    send_message(connection, KeyValue(value or b"", value is None))

    def _listen(self, member: GroupMember) -> None:
        """Reads what a member says, for as long as it is there."""
        member.connection.settimeout(None)
        # a stopped engine reads nothing, and may not hold up who writes to it
        patience = struct.pack("ll", math.ceil(self._patience), 0)
        member.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        try:
            while True:
                self._events.put((member, msgspec.msgpack.decode(read_message(member.connection), type=FromEngine)))
        finally:
            self._events.put((member, None))

    # -- rounds -----------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            members = self._gathered()
            try:
                self._round(members)
            except RoundLost as lost:
                self._leave_group()
                for member in members:
                    member.send(AbortRound(self._rounds, str(lost)))

    def _gathered(self) -> list[GroupMember]:
        """Waits until somebody asks, and for those who may still do."""
        since = 0.0
        while True:
            asking = [member for member in self._members if member.asked]
            missing = [member for member in self._members if not member.asked and member.waited_for]
            since = (since or time.monotonic()) if asking else 0.0
            left = since + GATHER - time.monotonic()
            if asking and (not missing or left <= 0):
                for member in missing:
                    member.waited_for = False
                return _together(asking)
            with suppress(queue.Empty):
                self._note(*self._events.get(timeout=left if asking else None))

    def _note(self, who: Any, what: Any) -> None:
        if not isinstance(who, GroupMember):
            return  # of a group that was left
        if what is None:
            who.asked = None
            with suppress(ValueError):
                self._members.remove(who)
        elif isinstance(what, AskWeights):
            self._questions += 1
            who.asked, who.question, who.waited_for = what, self._questions, True
            if who not in self._members:
                self._members.append(who)

    def _round(self, members: Sequence[GroupMember]) -> None:
        """Raises RoundLost."""
        asked = members[0].asked
        assert asked
        found = self._offers.find(asked.name, asked.fingerprint, asked.part)
        if found is None:
            for member in members:
                member.asked = None
                member.send(RefuseWeights("the trainer no longer has them, or never had"))
            return
        self._rounds += 1
        group = self._joined(members)
        for rank, member in enumerate(members, 1):
            member.asked, member.buckets = None, 0
            begin = BeginRound(
                round=self._rounds,
                group=group.number,
                rank=rank,
                size=len(members) + 1,
                backend=group.backend,
                nbytes=len(found),
            )
            member.send(begin)
        self._carry(group, found)
        for member in members:
            member.alone = False

    def _joined(self, members: Sequence[GroupMember]) -> StandingGroup:
        """Returns the group of these members: the one that is there, or a new one that they have yet to join."""
        standing, held = self._group, {member.asked.group for member in members if member.asked}
        if standing and standing.members == tuple(members) and held == {standing.number}:
            return standing
        self._leave_group()
        self._groups += 1
        number = self._groups
        gpus = {own_gpu(), *(member.gpu for member in members)}
        backend: Backend = "nccl" if len(gpus) > len(members) and "" not in gpus else "gloo"
        carrier = BucketGroup(
            GroupStore(self._keys, number, self._patience),
            0,
            len(members) + 1,
            backend=backend,
            address=self._connections.address[0],
            patience=self._patience,
            tell=lambda what: self._events.put((number, what)),
        )
        self._group = StandingGroup(number, tuple(members), carrier, backend)
        return self._group

    def _leave_group(self) -> None:
        if self._group:
            self._group.carrier.leave()
            self._keys.close(self._group.number)
            self._group = None

    def _carry(self, group: StandingGroup, found: memoryview) -> None:
        """Raises RoundLost."""
        writable = memoryview(bytearray(found)) if found.readonly else found  # torch warns of others
        source, count = torch.frombuffer(writable, dtype=torch.uint8), -(-len(found) // BUCKET)
        started, carried = 0, 0
        while True:
            acknowledged = min(member.buckets for member in group.members)
            if acknowledged == carried == count:
                return
            while started < min(count, carried + 2, acknowledged + 2):
                piece = source[started * BUCKET : (started + 1) * BUCKET]
                group.carrier.buckets[started % 2][: len(piece)].copy_(piece)
                group.carrier.carry(started, len(piece))
                started += 1
            carried += self._progress(group, acknowledged)

    def _progress(self, group: StandingGroup, acknowledged: int) -> int:
        """Waits until something has moved. Returns the number of buckets that the group has carried meanwhile."""
        end = time.monotonic() + self._patience
        while True:
            try:
                who, what = self._events.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                for member in group.members:
                    member.alone = len(group.members) > 1 and member.buckets == acknowledged
                raise RoundLost(f"nothing has moved for {self._patience:g} seconds") from None
            self._note(who, what)
            if who == group.number:
                if isinstance(what, Exception):
                    raise RoundLost(f"the trainer's end failed: {what}")
                return int(what != READY)
            if who not in group.members:
                continue
            if what is None:
                raise RoundLost("the connection of an engine has ended")
            if isinstance(what, RoundFailed) and what.round == self._rounds:
                raise RoundLost(f"an engine's end failed: {what.why}")
            if isinstance(what, GotBucket) and what.round == self._rounds:
                who.buckets = what.number + 1
                return 0


def _together(asking: Sequence[GroupMember]) -> list[GroupMember]:
    """Returns whoever has waited the longest, with all who want the same. Not what most want: engines that are served ask again for each
    version, and would keep one that has come back and needs the whole waiting for ever. Those who are served alone come last."""
    many = [member for member in asking if not member.alone]
    first = min(many or asking, key=lambda member: member.question)
    return [member for member in many if _wanted(member) == _wanted(first)] or [first]


def _wanted(member: GroupMember) -> Any:
    return member.asked and (member.asked.name, member.asked.fingerprint, member.asked.part)
