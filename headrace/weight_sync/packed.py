"""The packed buffer: all parameters one after another, in the serving dtype. Every transport carries these bytes, and none changes
their layout, their fingerprint, or the tensors that an engine sees in them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
import xxhash

from headrace.core.errors import IdentityError
from headrace.core.weights import FORM, Manifest, TensorSpec, WeightUpdate, of_earlier_form
from headrace.weight_sync.ranges import ValueRange

ALIGNMENT = 64
"""Bytes: a cache line, which vector loads prefer."""
BLOCK = 1 << 18
"""Bytes of a parameter that have a hash of their own. Above 100 KiB, so that xxhash lets other threads of Python run meanwhile."""
DIGEST = 16
"""Bytes of that hash."""


def lay_out(
    parameters: Iterable[tuple[str, torch.Tensor]],
    serving_dtype: torch.dtype,
    tied: Mapping[str, str] | None = None,
    kept: Collection[str] = (),
) -> Manifest:
    """Returns where each parameter lies. Neighbours in canonical order stay neighbours in memory (fused views rely on it). `tied`: see
    `Manifest.tied`; those whose parameter is not among `parameters` are left out. `kept`: names of tensors that keep their own dtype."""
    specs, end = [], 0
    for name, tensor in parameters:
        dtype = serving_dtype if tensor.is_floating_point() and name not in kept else tensor.dtype
        nbytes = tensor.numel() * dtype.itemsize
        specs.append(TensorSpec(name, tuple(tensor.shape), str(dtype).removeprefix("torch."), end, nbytes))
        end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    page = mmap.PAGESIZE
    there = {spec.name for spec in specs}
    others = {name: canonical for name, canonical in (tied or {}).items() if canonical in there}
    return Manifest(tuple(specs), -(-end // page) * page, others)


class PackedBuffer:
    """A packed buffer in memory that the transport owns, with its parameters as tensors that share this memory."""

    def __init__(self, manifest: Manifest, buffer: memoryview) -> None:
        """`buffer`: [manifest.nbytes]"""
        self._manifest, self._buffer = manifest, buffer
        # One storage for the whole buffer, so that an engine can see that two parameters are adjacent.
        whole = torch.frombuffer(buffer, dtype=torch.uint8)
        self.views = views_of(manifest, whole)

    @torch.no_grad()
    def fill(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies the parameters in, converted to the serving dtype."""
        for name, tensor in parameters:
            self.views[name].copy_(tensor)

    @torch.no_grad()
    def fill_values(self, values: Iterable[ValueRange]) -> None:
        """Copies values of some parameters in, converted to the serving dtype."""
        for part in values:
            self.views[part.name].view(-1)[part.first : part.first + len(part.values)].copy_(part.values)

    def fingerprint(self, earlier: bool = False) -> str:
        return fingerprint(self._manifest, self._buffer, earlier)

    def verified(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        """Returns the views after comparing fingerprints. Raises `IdentityError` if the bytes are not those published."""
        check_fingerprint(update, self.fingerprint(of_earlier_form(update.fingerprint)))
        return self.views


def views_of(manifest: Manifest, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the parameters in the bytes `whole` [manifest.nbytes], whose memory they share."""
    return {
        spec.name: whole[spec.offset : spec.offset + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec in manifest.tensors
    }


def check_fingerprint(update: WeightUpdate, found: str) -> None:
    """Raises `IdentityError` if it is not the one that was published."""
    if found != update.fingerprint:
        what = f"the adapter {update.adapter.name}" if update.adapter else "weights"
        raise IdentityError(
            f"{what} of version {update.version} were published with fingerprint {update.fingerprint}, but the engine "
            f"loaded {found}: it keeps serving the version it has and refuses this one"
        )


def fingerprint(manifest: Manifest, buffer: memoryview, earlier: bool = False) -> str:
    """Returns the fingerprint of the bytes in a packed buffer. `earlier`: in the form of `of_earlier_form`, for weights that were saved then."""
    return fingerprint_of(manifest, lambda spec: [buffer[spec.offset : spec.offset + spec.nbytes]], earlier)


def fingerprint_of(
    manifest: Manifest, bytes_of: Callable[[TensorSpec], Iterable[memoryview]], earlier: bool = False
) -> str:
    """Returns the fingerprint of bytes that are found piece by piece. `bytes_of`: is asked for one parameter after the other; all pieces of it
    but the last have whole blocks."""
    if not earlier:
        return combined(manifest, lambda spec: b"".join(digests_of(bytes_of(spec))))
    whole = xxhash.xxh3_128()
    for spec in manifest.tensors:
        whole.update(_head(spec))
        for piece in bytes_of(spec):
            whole.update(piece)
    return whole.hexdigest()


def digests_of(pieces: Iterable[memoryview]) -> Iterator[bytes]:
    """Yields the hashes of the blocks of a parameter."""
    for piece in pieces:
        for start in range(0, len(piece), BLOCK):
            yield xxhash.xxh3_128_digest(piece[start : start + BLOCK])


def combined(manifest: Manifest, digests: Callable[[TensorSpec], bytes]) -> str:
    """Returns the fingerprint of packed weights: xxh3-128 over every parameter's name, shape, dtype and the hashes of its blocks, in canonical
    order. So whoever has some blocks can hash them, and the fingerprint is the same, however many there are.

    Not cryptographic: it guards against mistakes (a lost, torn, stale or foreign update), not against malice.
    """
    whole = xxhash.xxh3_128()
    for spec in manifest.tensors:
        whole.update(_head(spec))
        whole.update(digests(spec))
    return FORM + whole.hexdigest()


def _head(spec: TensorSpec) -> bytes:
    return f"{spec.name}|{spec.shape}|{spec.dtype}|".encode()


def manifest_for(manifests: Mapping[str, Manifest], update: WeightUpdate) -> Manifest:
    """Returns the layout of an update's tensors. Raises `IdentityError` for an adapter that the engine does not know."""
    name = update.adapter.name if update.adapter else ""
    if name not in manifests:
        raise IdentityError(f"the engine was started with no adapter {name} and has no memory for it")
    return manifests[name]
