"""The packed buffer: all parameters one after the other, in the serving dtype. Every transport carries these bytes.
Their layout, their fingerprint, and the engine's views of them do not depend on the transport."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping

import torch
import xxhash

from headrace.errors import IdentityError
from headrace.weights import Manifest, TensorSpec, WeightUpdate

ALIGNMENT = 64
"""Bytes: the size of a cache line, which suits vector loads."""


def lay_out(parameters: Iterable[tuple[str, torch.Tensor]], serving_dtype: torch.dtype) -> Manifest:
    """Places each parameter. Neighbours in canonical order stay neighbours in memory (fused views rely on it)."""
    specs, end = [], 0
    for name, tensor in parameters:
        dtype = serving_dtype if tensor.is_floating_point() else tensor.dtype
        nbytes = tensor.numel() * dtype.itemsize
        specs.append(TensorSpec(name, tuple(tensor.shape), str(dtype).removeprefix("torch."), end, nbytes))
        end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    page = mmap.PAGESIZE
    return Manifest(tuple(specs), -(-end // page) * page)


class Packed:
    """A packed buffer in memory that it does not own: its parameters as tensors that view these bytes."""

    def __init__(self, manifest: Manifest, buffer: memoryview) -> None:
        """`buffer`: [manifest.nbytes]"""
        self._manifest, self._buffer = manifest, buffer
        # One storage for the whole buffer, so that an engine can see that two parameters are adjacent.
        whole = torch.frombuffer(buffer, dtype=torch.uint8)
        self.views: dict[str, torch.Tensor] = {
            spec.name: whole[spec.offset : spec.offset + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
            for spec in manifest.tensors
        }

    @torch.no_grad()
    def fill(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies the parameters, converted to the serving dtype."""
        for name, tensor in parameters:
            self.views[name].copy_(tensor)

    def fingerprint(self) -> str:
        return fingerprint(self._manifest, self._buffer)

    def verified(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        """Returns the views, after checking that the bytes are those published. Raises `IdentityError` if they are not."""
        found = self.fingerprint()
        if found != update.fingerprint:
            what = f"the adapter {update.adapter.name}" if update.adapter else "weights"
            raise IdentityError(
                f"{what} of version {update.version} were published with fingerprint {update.fingerprint}, but the engine "
                f"loaded {found}: it goes on serving the version it has, and refuses this one"
            )
        return self.views


def fingerprint(manifest: Manifest, buffer: memoryview) -> str:
    """Returns the xxh3-128 of every parameter's name, shape, dtype and bytes, in canonical order.

    It is not cryptographic: it guards against mistakes (a lost, torn, stale or foreign update), not against malice.
    """
    whole = xxhash.xxh3_128()
    for spec in manifest.tensors:
        whole.update(f"{spec.name}|{spec.shape}|{spec.dtype}|".encode())
        whole.update(buffer[spec.offset : spec.offset + spec.nbytes])
    return whole.hexdigest()


def manifest_for(manifests: Mapping[str, Manifest], update: WeightUpdate) -> Manifest:
    """Returns the layout of an update. Raises `IdentityError` for an adapter that the engine does not know."""
    name = update.adapter.name if update.adapter else ""
    if name not in manifests:
        raise IdentityError(f"the engine was told of no adapter {name} at its start, and has no memory for it")
    return manifests[name]
