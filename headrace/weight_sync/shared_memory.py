"""Weight sync on one host: packed buffers in anonymous shared memory.

    full training     | full 0 | full 1 |
    LoRA              | base | adapter a, 0 | adapter a, 1 | adapter b, 0 | adapter b, 1 | ...

The trainer writes version v into slot v % 2, converted to the serving dtype once; the engine maps the same pages and swaps between two
forward passes by pointing its tensors at the other slot. Slot v % 2 may be written again only after v + 1 is live, so a pipeline publishes
one version at a time. Base weights beside adapters are published once and have one slot. The memory has no name (it is a file
descriptor that both processes inherit), so a killed run leaves nothing behind.

Torch is imported inside of functions: the controller opens the memory, and it loads no torch.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from headrace.errors import IdentityError
from headrace.types import Struct
from headrace.weights import AdapterSpec, Manifest, WeightUpdate

if TYPE_CHECKING:
    import torch

    from headrace.weight_sync.packed import PackedBuffer

Manifests = Mapping[str, Manifest]
"""The layouts of all that is published: an adapter's by its name, the model's by the empty name."""


class SharedMemory(Struct, frozen=True, tag="shared_memory"):
    """Protocol `Transport`."""

    fd: int

    @classmethod
    def open(cls) -> SharedMemory:
        return cls(_anonymous_memory())

    @property
    def inherited(self) -> tuple[int, ...]:
        return (self.fd,)

    def sender(self, manifests: Manifests, once: Collection[str] = ()) -> SharedMemorySender:
        return SharedMemorySender(self.fd, manifests, once)

    def receiver(self, manifests: Manifests) -> SharedMemoryReceiver:
        return SharedMemoryReceiver(self.fd, manifests)

    def close(self) -> None:
        os.close(self.fd)


def _anonymous_memory() -> int:
    """Returns a file descriptor. The sender sets its size, and the memory is freed with its last user."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("headrace-weights", 0)
    with tempfile.TemporaryFile() as file:  # already unlinked
        return os.dup(file.fileno())


class SharedMemorySender:
    """The trainer's end."""

    def __init__(self, fd: int, manifests: Manifests, once: Collection[str]) -> None:
        from headrace.weight_sync.packed import PackedBuffer

        self._starts: dict[str, list[int]] = {}
        """First byte of each slot, by name."""
        end = 0
        for name, manifest in manifests.items():
            slots = 1 if name in once else 2
            self._starts[name] = [end + slot * manifest.nbytes for slot in range(slots)]
            end += slots * manifest.nbytes
        os.ftruncate(fd, end)
        memory = memoryview(mmap.mmap(fd, end))
        self._slots = {
            name: [PackedBuffer(manifests[name], memory[start : start + manifests[name].nbytes]) for start in starts]
            for name, starts in self._starts.items()
        }
        self._nbytes = {name: manifest.payload for name, manifest in manifests.items()}

    def send(
        self, version: int, parameters: Iterable[tuple[str, torch.Tensor]], adapter: AdapterSpec | None = None
    ) -> WeightUpdate:
        """`adapter`: the adapter that the parameters belong to; None for the model's own."""
        started = time.perf_counter()
        name = adapter.name if adapter else ""
        slot = version % len(self._slots[name])
        packed = self._slots[name][slot]
        packed.fill(parameters)
        mark = packed.fingerprint()
        return WeightUpdate(
            version=version,
            kind="adapter" if adapter else "full",
            fingerprint=mark,
            nbytes=self._nbytes[name],
            seconds=time.perf_counter() - started,
            where={"offset": self._starts[name][slot]},
            adapter=adapter,
        )


class SharedMemoryReceiver:
    """The engine's end."""

    def __init__(self, fd: int, manifests: Manifests) -> None:
        self._fd, self._manifests = fd, manifests
        self._memory = memoryview(b"")
        self._slots: dict[tuple[str, int], PackedBuffer] = {}
        """Mapped slots by name and first byte."""

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
