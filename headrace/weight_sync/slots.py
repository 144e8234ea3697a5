"""The memory of packed buffers: two slots for what is published again and again, one for what is published once.

    full training     | full 0 | full 1 |
    LoRA              | base | adapter a, 0 | adapter a, 1 | adapter b, 0 | adapter b, 1 | ...

While one slot is served, the other is filled. The memory has no name (it is a file descriptor), so a killed process leaves nothing
behind, and other processes can map it. Torch is imported where it is used: the controller makes
the memory, and loads no torch.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Literal, Protocol

from headrace.core.weights import Manifest

if TYPE_CHECKING:
    from headrace.weight_sync.packed import PackedBuffer

Manifests = Mapping[str, Manifest]
"""The layouts of all that is published: an adapter's by its name, the model's by the empty name."""


def anonymous_memory() -> int:
    """Returns a file descriptor. `Slots` sets its size, and the memory is freed with its last user."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("headrace-weights", 0)
    with tempfile.TemporaryFile() as file:  # already unlinked
        return os.dup(file.fileno())


Part = Literal["full", "delta"]


class WeightShelf(Protocol):
    """The versions that a server has."""

    def find(self, name: str, fingerprint: str, part: Part) -> memoryview | None: ...


class Shelves(WeightShelf, Protocol):
    """A shelf of weights that also has their layouts."""

    @property
    def manifests(self) -> Manifests: ...


LONGEST_MANIFEST = 1 << 26
"""Bytes of a layout, for engines that were not prepared for it: 64 MiB are enough for a million tensors."""


PIECE = 1 << 23
"""Bytes that are sent at a time."""


def send_all(connection: socket.socket, data: memoryview) -> None:
    """Sends it in pieces, because the timeout of a socket is for all that one call sends. Raises OSError.

    Not by `sendfile`: the kernel then handles memory page by page, which costs more than the copy that it saves
    (docs/benchmarks_history.md)."""
    for start in range(0, len(data), PIECE):
        connection.sendall(data[start : start + PIECE])


class Slots:
    def __init__(self, fd: int, manifests: Manifests, once: Collection[str] = ()) -> None:
        """`fd`: where the memory is. `once`: the names of what is published once."""
        self.fd, self._manifests = fd, manifests
        self._starts: dict[str, list[int]] = {}
        end = 0
        for name, manifest in manifests.items():
            count = 1 if name in once else 2
            self._starts[name] = [end + number * manifest.nbytes for number in range(count)]
            end += count * manifest.nbytes
        os.ftruncate(fd, end)
        self._memory = memoryview(mmap.mmap(fd, end))
        self._packed: dict[tuple[str, int], PackedBuffer] = {}

    def count(self, name: str) -> int:
        return len(self._starts[name])

    def start(self, name: str, number: int) -> int:
        """Returns the first byte of a slot."""
        return self._starts[name][number]

    def buffer(self, name: str, number: int) -> memoryview:
        """Returns the bytes of a slot: [manifest.nbytes]."""
        start = self.start(name, number)
        return self._memory[start : start + self._manifests[name].nbytes]

    def packed(self, name: str, number: int) -> PackedBuffer:
        from headrace.weight_sync.packed import PackedBuffer

        key = (name, number)
        if key not in self._packed:
            self._packed[key] = PackedBuffer(self._manifests[name], self.buffer(name, number))
        return self._packed[key]
