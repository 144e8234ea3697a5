"""Weight sync on one host: two packed buffers in anonymous shared memory (`memory.py`).

The trainer writes version v into slot v % 2, converted to the serving dtype once; the engine maps the same pages and swaps
between two forward passes by re-pointing views. Slot v % 2 may be written again only after v + 1 is live: the pipeline
publishes one version at a time. The memory has no name (it is a file descriptor that both processes inherit), so a killed
run leaves nothing behind that a later run could trip over.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable, Mapping

import torch
import xxhash

from headrace.errors import IdentityError
from headrace.weights import Manifest, TensorSpec, WeightUpdate

ALIGNMENT = 64
"""Bytes: a cache line, and what vector loads like."""


def lay_out(parameters: Iterable[tuple[str, torch.Tensor]], serving_dtype: torch.dtype) -> Manifest:
    """Where each parameter lies in a slot. Neighbours in canonical order stay neighbours in memory (fused views rely on it)."""
    specs, offset = [], 0
    for name, tensor in parameters:
        dtype = serving_dtype if tensor.is_floating_point() else tensor.dtype
        nbytes = tensor.numel() * dtype.itemsize
        specs.append(TensorSpec(name, tuple(tensor.shape), str(dtype).removeprefix("torch."), offset, nbytes))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    page = mmap.PAGESIZE
    return Manifest(tuple(specs), -(-offset // page) * page)


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
    """Both ends map the memory; views are tensors on its pages."""

    def __init__(self, fd: int, manifest: Manifest) -> None:
        self.manifest = manifest
        self._memory = mmap.mmap(fd, 2 * manifest.slot_nbytes)
        self._bytes = memoryview(self._memory)
        self.views = [self._views(slot) for slot in (0, 1)]

    def raw(self, slot: int) -> memoryview:
        size = self.manifest.slot_nbytes
        return self._bytes[slot * size : (slot + 1) * size]

    def _views(self, slot: int) -> dict[str, torch.Tensor]:
        # One storage for the whole slot, so that an engine can see that two parameters are adjacent.
        packed = torch.frombuffer(self._bytes, dtype=torch.uint8)
        start = slot * self.manifest.slot_nbytes
        return {
            spec.name: packed[start + spec.offset : start + spec.offset + spec.nbytes]
            .view(getattr(torch, spec.dtype))
            .view(spec.shape)
            for spec in self.manifest.tensors
        }


class SharedMemorySender:
    """The trainer's end."""

    def __init__(self, fd: int, manifest: Manifest) -> None:
        os.ftruncate(fd, 2 * manifest.slot_nbytes)
        self._slots = _Slots(fd, manifest)

    @torch.no_grad()
    def send(self, version: int, parameters: Iterable[tuple[str, torch.Tensor]]) -> WeightUpdate:
        started, slot = time.perf_counter(), version % 2
        views = self._slots.views[slot]
        for name, tensor in parameters:
            views[name].copy_(tensor)
        mark = fingerprint(self._slots.manifest, self._slots.raw(slot))
        nbytes = sum(spec.nbytes for spec in self._slots.manifest.tensors)
        return WeightUpdate(version, "full", mark, slot, nbytes, time.perf_counter() - started)


class SharedMemoryReceiver:
    """The engine's end."""

    def __init__(self, fd: int, manifest: Manifest) -> None:
        self._slots = _Slots(fd, manifest)

    def receive(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        """Views of the update, after its bytes were found to be those published. Raises `IdentityError` if not."""
        found = fingerprint(self._slots.manifest, self._slots.raw(update.slot))
        if found != update.fingerprint:
            raise IdentityError(
                f"weights of version {update.version} were published with fingerprint {update.fingerprint}, but the engine "
                f"loaded {found}: it goes on serving the version it has, and refuses this one"
            )
        return self._slots.views[update.slot]
