"""Weights as the kernels multiply by them: packed once for each of their values, or at every use.

Contiguous CPU tensors in float32 or bfloat16.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headrace.native.memory import address, keep_freed_memory, touch, zeros
from headrace.trainer.kernels import binding

SIDE = 32
"""The side of the blocks that products are computed in."""
ROOM = 64 << 20
"""Bytes that are touched at once."""
MOST_TOKENS = 2048
"""The most tokens that memory is reserved for: a budget may be far above the size of a batch."""


def kernels() -> Any:
    """The kernels, set to torch's present number of threads."""
    functions = binding.library()
    assert functions is not None
    functions.headrace_threads(torch.get_num_threads())
    return functions


class _Passes(threading.local):
    forward_only = False
    """Whether this thread makes no backward pass at the moment."""


_passes = _Passes()


@contextmanager
def forward_only() -> Iterator[None]:
    """Within this context weights are packed for the forward pass alone: no backward pass follows."""
    before, _passes.forward_only = _passes.forward_only, True
    try:
        yield
    finally:
        _passes.forward_only = before


class PackedWeight:
    """A matrix [n, k] as the kernels multiply by it, or several of one size that lie in one tensor. In bfloat16 it is packed once for each
    of its values, for both directions; in float32, where that would be 8 bytes a parameter, at every use (5 to 10 % of a product over
    1,024 rows).

    It also keeps the memory of the gradient: fresh pages cost more than what is computed into them.
    """

    def __init__(self, matrices: int = 1) -> None:
        self._matrices = matrices
        self._packed_from: list[tuple[int, int] | None] = [None, None]
        """The value that each direction was packed from."""
        self._packed: list[Tensor | None] = [None, None]
        self._gradient: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        return PackedWeight(self._matrices)

    def packed(self, weight: Tensor, backward: bool = True) -> tuple[Tensor, Tensor | None]:
        """bfloat16, (for y = x Wᵀ, for dx = dy W if `backward`, and where no backward pass is excluded). Packed again if the weight was
        written to since."""
        now, wanted = (weight.data_ptr(), weight._version), (True, backward and not _passes.forward_only)
        stale = [side for side in (0, 1) if wanted[side] and self._packed_from[side] != now]
        if stale:
            matrices = weight.detach().reshape(self._matrices, -1, weight.shape[-1])
            for side in stale:
                if self._packed[side] is None:
                    self._packed[side] = zeros(self._matrices * _packed_size(matrices[0]), torch.bfloat16)
                self._packed_from[side] = now
            rooms = [room.view(self._matrices, -1) if room is not None else None for room in self._packed]
            for number, matrix in enumerate(matrices):
                into = [room[number] if room is not None and side in stale else None for side, room in enumerate(rooms)]
                _pack(matrix, *into)
        across, down = self._packed
        assert across is not None
        return across, down if wanted[1] else None

    def release(self) -> None:
        """Gives its memory back. The next use packs again."""
        self._packed, self._packed_from, self._gradient = [None, None], [None, None], None

    def gradient(self, weight: Tensor) -> tuple[Tensor, bool]:
        """(where to write the gradient, float32 [n, k]; whether to add to what is there)."""
        if weight.dtype != torch.float32:  # memory is dear there: none is kept
            return torch.empty(weight.shape, dtype=torch.float32), False
        held = weight.grad
        if held is not None and held.dtype == torch.float32 and held.is_contiguous():
            return held, True
        if self._gradient is None or self._gradient.numel() != weight.numel():
            self._gradient = touch(zeros(weight.numel(), torch.float32))
        return self._gradient.view(weight.shape), False


def _packed_size(weight: Tensor) -> int:
    n, k = weight.shape
    return -(-n // SIDE) * -(-k // SIDE) * SIDE * SIDE


def _pack(weight: Tensor, across: Tensor | None, down: Tensor | None) -> None:
    source = weight.detach().float().contiguous()
    wide = (down if across is None else across).dtype == torch.float32  # type: ignore[union-attr]
    kernels().headrace_pack_weight(wide, address(source), *weight.shape, address(across), address(down))


class _Room(threading.local):
    """The buffer in which float32 weights are packed: one for all layers, as large as the largest needs."""

    held: Tensor | None = None

    def __call__(self, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        if self.held is None or self.held.numel() < sum(sizes):
            self.held = zeros(sum(sizes), torch.float32)
        return self.held[: sum(sizes)].split(list(sizes))


_room = _Room()


def packed_in_room(weight: Tensor) -> Tensor:
    """float32, for y = x Wᵀ. Good until the next product of this thread."""
    (room,) = _room([_packed_size(weight)])
    _pack(weight, room, None)
    return room


def packed_now(weight: Tensor, dtype: torch.dtype, down: bool = False) -> Tensor:
    """The weight [n, k] rounded to `dtype` and packed for y = x Wᵀ, or `down` for dx = dy W: of what is small or used once."""
    room = torch.empty(_packed_size(weight), dtype=dtype)
    _pack(weight, None if down else room, room if down else None)
    return room


def operands(
    packed: Sequence[PackedWeight], weights: Sequence[Tensor], dtype: torch.dtype, backward: bool
) -> list[tuple[Tensor | None, Tensor | None]]:
    """Returns for each weight the two packings that `binding.Weight` calls across and down. Each direction reads one of them."""
    if dtype == torch.bfloat16:
        return [one.packed(weight) for one, weight in zip(packed, weights, strict=True)]
    rooms = _room([_packed_size(weight) for weight in weights])
    held: list[tuple[Tensor | None, Tensor | None]] = [(None, room) if backward else (room, None) for room in rooms]
    for weight, into in zip(weights, held, strict=True):
        _pack(weight, *into)
    return held


def give(weight: Tensor, gradient: Tensor) -> None:
    """Adds a gradient to the weight's `.grad`, which may keep it."""
    if weight.grad is not None:
        weight.grad += gradient
    else:
        weight.grad = gradient if weight.dtype == gradient.dtype else gradient.to(weight.dtype)


def packed_of(module: Any) -> Iterator[tuple[PackedWeight, Tensor]]:
    """Yields what a module has packed, and the weight that it is packed from: one of a linear layer, two of experts."""
    if isinstance(one := getattr(module, "packed", None), PackedWeight):
        yield one, module.weight
    for name, one in getattr(module, "packed_stacks", {}).items():
        yield one, getattr(module, name)


def reserve(model: Any, tokens: int, dtype: torch.dtype) -> None:
    """Does in advance what would delay the first steps. Packs the weights for bfloat16, and makes the system allocate the memory of the
    weights that will change (until then they may be mapped from the file), of their gradients, of the optimizer's state, and of the
    activations of `tokens` tokens (at most MOST_TOKENS) in `dtype` that are kept for the backward pass."""
    keep_freed_memory()
    head = model.get_output_embeddings()
    layers = [pair for module in model.modules() if module is not head for pair in packed_of(module)]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    state = sum(parameter.nbytes + 8 * parameter.numel() for parameter in trained)
    kept = dtype.itemsize * sum(sum(weight.shape[-2:]) for _, weight in layers) * min(tokens, MOST_TOKENS)
    rooms = [touch(torch.empty(ROOM, dtype=torch.uint8)) for _ in range((state + kept) // ROOM)]
    del rooms  # freed, and kept for later allocations
    for parameter in trained:
        parameter.data = parameter.data.clone()
    if hasattr(head, "packed") and dtype == torch.bfloat16:
        head.packed.packed(head.weight, backward=False)
    for packed, weight in layers:
        if dtype == torch.bfloat16:
            packed.packed(weight)
        if weight.requires_grad and weight.dtype == torch.float32:
            packed.gradient(weight)


def release(model: Any) -> None:
    """Gives the memory back that products keep from step to step: packed weights, and room for gradients and for packing."""
    for module in model.modules():
        for packed, _ in packed_of(module):
            packed.release()
    _room.held = None
