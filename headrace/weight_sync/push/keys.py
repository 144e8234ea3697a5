"""The keys through which the members of a process group find each other, in the trainer's process.

torch's own store over TCP asks nobody for a token. This one travels by the server of the weights, which does."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from typing import Protocol

import msgspec
import torch.distributed as dist

from headrace.weight_sync.push.round_messages import GetKey, KeyValue, PutKey
from headrace.weight_sync.sockets import read_message, send_message

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
