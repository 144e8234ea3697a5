"""Weight sync on one host: packed buffers in anonymous shared memory (`memory.py`).

    full training     | full 0 | full 1 |
    LoRA              | base | adapter a, 0 | adapter a, 1 | adapter b, 0 | adapter b, 1 | ...

The trainer writes version v into slot v % 2 of what it publishes, converted to the serving dtype once; the engine maps the
same pages and swaps between two forward passes by re-pointing views. Slot v % 2 may be written again only after v + 1 is
live: a pipeline publishes one version at a time. Base weights beside adapters are published once and have one slot. The
memory has no name (it is a file descriptor that both processes inherit), so a killed run leaves nothing behind that a later
run could trip over.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable, Mapping

import torch
import xxhash

from headrace.errors import IdentityError
from headrace.weights import AdapterSpec, Manifest, TensorSpec, WeightUpdate

ALIGNMENT = 64
"""Bytes: a cache line, and what vector loads like."""

Manifests = Mapping[str, Manifest]
"""Of everything that is published: the model's by the empty name, those of adapters by theirs."""


def lay_out(
    parameters: Iterable[tuple[str, torch.Tensor]], serving_dtype: torch.dtype, slots: int = 2, offset: int = 0
) -> Manifest:
    """Where each parameter lies in a slot. Neighbours in canonical order stay neighbours in memory (fused views rely on it)."""
    specs, end = [], 0
    for name, tensor in parameters:
        dtype = serving_dtype if tensor.is_floating_point() else tensor.dtype
        nbytes = tensor.numel() * dtype.itemsize
        specs.append(TensorSpec(name, tuple(tensor.shape), str(dtype).removeprefix("torch."), end, nbytes))
        end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    page = mmap.PAGESIZE
    return Manifest(tuple(specs), -(-end // page) * page, slots, offset)


def fingerprint(manifest: Manifest, slot: memoryview) -> str:
    """xxh3-128 over every parameter's name, shape, dtype and bytes, in canonical order.

    Not cryptographic: it guards against mistakes (a lost, torn, stale or foreign update), not against malice.
    """
    whole = xxhash.xxh3_128()
    for spec in manifest.tensors:
        whole.update(f"{spec.name}|{spec.shape}|{spec.dtype}|".encode())
        whole.update(slot[spec.offset : spec.offset + spec.nbytes])
    return whole.hexdigest()


class _Slots:
    """Those of one manifest. Both ends map the memory; views are tensors on its pages."""

    def __init__(self, memory: memoryview, manifest: Manifest) -> None:
        self.manifest, self._memory = manifest, memory
        self.views = [self._views(slot) for slot in range(manifest.slots)]

    @property
    def nbytes(self) -> int:
        """Of the parameters of one slot."""
        return sum(spec.nbytes for spec in self.manifest.tensors)

    def slot_of(self, version: int) -> int:
        return version % self.manifest.slots

    def fingerprint(self, slot: int) -> str:
        start = self._start(slot)
        return fingerprint(self.manifest, self._memory[start : start + self.manifest.slot_nbytes])

    def _start(self, slot: int) -> int:
        return self.manifest.offset + slot * self.manifest.slot_nbytes

    def _views(self, slot: int) -> dict[str, torch.Tensor]:
        # One storage for the whole slot, so that an engine can see that two parameters are adjacent.
        packed, start = torch.frombuffer(self._memory, dtype=torch.uint8), self._start(slot)
        return {
            spec.name: packed[start + spec.offset : start + spec.offset + spec.nbytes]
            .view(getattr(torch, spec.dtype))
            .view(spec.shape)
            for spec in self.manifest.tensors
        }


def _map(fd: int, manifests: Manifests) -> dict[str, _Slots]:
    memory = memoryview(mmap.mmap(fd, max(manifest.end for manifest in manifests.values())))
    return {name: _Slots(memory, manifest) for name, manifest in manifests.items()}


class SharedMemorySender:
    """The trainer's end."""

    def __init__(self, fd: int, manifests: Manifests) -> None:
        os.ftruncate(fd, max(manifest.end for manifest in manifests.values()))
        self._slots = _map(fd, manifests)

    @torch.no_grad()
    def send(
        self, version: int, parameters: Iterable[tuple[str, torch.Tensor]], adapter: AdapterSpec | None = None
    ) -> WeightUpdate:
        """`adapter`: whose parameters they are, where they are not the model's."""
        started = time.perf_counter()
        slots = self._slots[adapter.name if adapter else ""]
        slot = slots.slot_of(version)
        for name, tensor in parameters:
            slots.views[slot][name].copy_(tensor)
        mark, seconds = slots.fingerprint(slot), time.perf_counter() - started
        return WeightUpdate(
            version=version,
            kind="adapter" if adapter else "full",
            fingerprint=mark,
            slot=slot,
            nbytes=slots.nbytes,
            seconds=seconds,
            adapter=adapter,
        )


class SharedMemoryReceiver:
    """The engine's end."""

    def __init__(self, fd: int, manifests: Manifests) -> None:
        self._slots = _map(fd, manifests)

    def receive(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        """Views of the update, after its bytes were found to be those published. Raises `IdentityError` if not."""
        name = update.adapter.name if update.adapter else ""
        slots = self._slots.get(name)
        if slots is None:
            raise IdentityError(f"the engine was told of no adapter {name} at its start, and has no memory for it")
        found = slots.fingerprint(update.slot)
        if found != update.fingerprint:
            what = f"the adapter {name}" if name else "weights"
            raise IdentityError(
                f"{what} of version {update.version} were published with fingerprint {update.fingerprint}, but the engine "
                f"loaded {found}: it goes on serving the version it has, and refuses this one"
            )
        return slots.views[update.slot]
