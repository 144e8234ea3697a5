"""Weight sync on one host: packed buffers in anonymous shared memory (`slots.py`).

The trainer writes version v into slot v % 2, converted to the serving dtype once; the engine maps the same pages and swaps between two
forward passes by pointing its tensors at the other slot. Slot v % 2 may be written again only after v + 1 is live, so a pipeline publishes
one version at a time. Both processes inherit the descriptor of the memory.

Torch is imported inside of functions: the controller opens the memory, and it loads no torch.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from headrace.core.errors import IdentityError
from headrace.core.protocols import WeightSender
from headrace.core.weights import AdapterSpec, WeightUpdate
from headrace.weight_sync.kind import LOOPBACK, PLAIN, Opening, TransportKind
from headrace.weight_sync.ranges import ByteRange, RankParts, follower_update
from headrace.weight_sync.rank_digests import RankDigests
from headrace.weight_sync.slots import Manifests, Slots, anonymous_memory

if TYPE_CHECKING:
    import torch

    from headrace.weight_sync.packed import PackedBuffer


class SharedMemory(TransportKind, frozen=True, tag="shared_memory"):
    """Protocol `Transport`."""

    words: ClassVar = "shared memory"
    about: ClassVar = "engines map the trainer's pages"
    reaches: ClassVar = frozenset({"child"})
    sends_bytes: ClassVar = False
    keeps_for_sleepers: ClassVar = frozenset({"child"})
    keeps: ClassVar = "two packed buffers"
    takes_parts = True

    fd: int

    @classmethod
    def open(cls, opening: Opening = PLAIN) -> SharedMemory:
        return cls(anonymous_memory())

    @property
    def inherited(self) -> tuple[int, ...]:
        return (self.fd,)

    def sender(self, manifests: Manifests, once: Collection[str] = ()) -> SharedMemorySender:
        return SharedMemorySender(self.fd, manifests, once, None)

    def part_sender(self, manifests: Manifests, once: Collection[str], ranks: RankParts) -> SharedMemorySender:
        """Each rank fills its part of the same memory."""
        return SharedMemorySender(self.fd, manifests, once, ranks)

    def receiver(self, manifests: Manifests) -> SharedMemoryReceiver:
        return SharedMemoryReceiver(self.fd, manifests)

    def close(self) -> None:
        os.close(self.fd)


class SharedMemorySender(WeightSender):
    """The trainer's end."""

    def __init__(self, fd: int, manifests: Manifests, once: Collection[str], ranks: RankParts | None) -> None:
        self._slots, self._manifests, self._ranks = Slots(fd, manifests, once), manifests, ranks
        self._digests = RankDigests(LOOPBACK, manifests, ranks, self._bytes, shared=True) if ranks else None

    def copy(
        self, version: int, parameters: Iterable[tuple[str, torch.Tensor]], adapter: AdapterSpec | None = None
    ) -> Callable[[], WeightUpdate]:
        started = time.perf_counter()
        name = adapter.name if adapter else ""
        slot = version % self._slots.count(name)
        packed = self._slots.packed(name, slot)
        if self._ranks:  # the parameters are not read: that would gather each of them whole
            packed.fill_values(self._ranks.values(name))
            self._ranks.exchange(None)  # from here on all of it is there
            if self._ranks.rank:
                return lambda: follower_update(version, adapter)
        else:
            packed.fill(parameters)
        seconds = time.perf_counter() - started
        return lambda: WeightUpdate(
            version=version,
            kind="adapter" if adapter else "full",
            fingerprint=self._digests.fingerprint(name, str(slot)) if self._digests else packed.fingerprint(),
            nbytes=self._manifests[name].payload,
            seconds=seconds,
            where={"offset": self._slots.start(name, slot)},
            adapter=adapter,
        )

    def _bytes(self, name: str, slot: str, wanted: ByteRange) -> memoryview:
        return self._slots.buffer(name, int(slot))[wanted.offset : wanted.offset + wanted.nbytes]


class SharedMemoryReceiver:
    """The engine's end."""

    def __init__(self, fd: int, manifests: Manifests) -> None:
        self._fd, self._manifests = fd, manifests
        self._memory = memoryview(b"")
        self._slots: dict[tuple[str, int], PackedBuffer] = {}
        """Mapped slots by name and first byte."""
        self.received = 0

    def receive(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        """Returns views of the update after comparing fingerprints. Raises `IdentityError` if the bytes are not those published."""
        from headrace.weight_sync.packed import PackedBuffer, manifest_for

        manifest, start = manifest_for(self._manifests, update), int(update.where["offset"])
        key = (update.adapter.name if update.adapter else "", start)
        if key not in self._slots:
            self._slots[key] = PackedBuffer(manifest, self._mapped(start, start + manifest.nbytes, update))
        return self._slots[key].verified(update)

    def _mapped(self, start: int, end: int, update: WeightUpdate) -> memoryview:
        if not self._memory and (size := os.fstat(self._fd).st_size):
            self._memory = memoryview(mmap.mmap(self._fd, size))
        if end > len(self._memory):
            raise IdentityError(
                f"version {update.version} ends at byte {end}, but the shared memory has {len(self._memory)} bytes: the trainer "
                "and the engine do not share the same memory"
            )
        return self._memory[start:end]
