"""Products of linear layers by the kernels: weights packed once for each of their values, gradients added where they are made.

Contiguous CPU tensors in float32 or bfloat16; sums are float32, and run in one order whatever the number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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


class PackedWeight:
    """A matrix [n, k] as the kernels multiply by it. In bfloat16 it is packed once for each of its values, for both directions; in
    float32, where that would be 8 bytes a parameter, at every use (5 to 10 % of a product over 1,024 rows).

    It also keeps the memory of the gradient: fresh pages cost more than what is computed into them.
    """

    def __init__(self) -> None:
        self._packed_from: tuple[int, int] | None = None
        self._packed: tuple[Tensor, Tensor | None] | None = None
        self._gradient: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        return PackedWeight()

    def packed(self, weight: Tensor, backward: bool = True) -> tuple[Tensor, Tensor | None]:
        """bfloat16, (for y = x Wᵀ, for dx = dy W if `backward`). Packed again if the weight was written to since."""
        now = weight.data_ptr(), weight._version
        if self._packed is None or now != self._packed_from:
            size = _packed_size(weight)
            if self._packed is None:
                self._packed = zeros(size, torch.bfloat16), zeros(size, torch.bfloat16) if backward else None
            _pack(weight, *self._packed)
            self._packed_from = now
        return self._packed

    def release(self) -> None:
        """Gives its memory back. The next use packs again."""
        self._packed = self._packed_from = self._gradient = None

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


def _operands(
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


Layer = tuple[PackedWeight, Tensor, Tensor | None]
"""A weight [n, k] and its bias [n]."""


def linears(
    x: Tensor, layers: Sequence[Layer], dtype: torch.dtype, wide: Sequence[bool] | None = None
) -> tuple[Tensor, ...]:
    """x [..., k] times the transpose of each weight, plus its bias: [..., n] each, from one reading of x. `dtype`, bfloat16 or
    float32, is that of the factors and of the results; results that `wide` marks are always float32, as sums are. A weight's
    gradient is not passed to autograd: the product adds it to `.grad`.
    """
    return _apply_linears(x, None, layers, dtype, wide or [False] * len(layers))


def linear_onto(total: Tensor, x: Tensor, layer: Layer, dtype: torch.dtype) -> Tensor:
    """total [..., n] float32 plus the product of factors in `dtype`, summed from `total` on as the engine does; float32."""
    return _apply_linears(x, total, [layer], dtype, [True])[0]


def _apply_linears(
    x: Tensor, onto: Tensor | None, layers: Sequence[Layer], dtype: torch.dtype, wide: Sequence[bool]
) -> tuple[Tensor, ...]:
    packed, weights, biases = zip(*layers, strict=True)
    return _Linears.apply(x, onto, dtype, packed, wide, *weights, *biases)


def served_bias(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Returns the bias as the engine uses it: rounded to `dtype`, stored in float32."""
    return None if bias is None else bias.detach().to(dtype).float()


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        onto: Tensor | None,
        dtype: torch.dtype,
        packed: Sequence[PackedWeight],
        wide: Sequence[bool],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights = [weight for weight in tensors[: len(packed)] if weight is not None]
        low = x.to(dtype).contiguous()
        outputs = [
            low.new_empty(*x.shape[:-1], len(weight), dtype=torch.float32 if one else dtype)
            for weight, one in zip(weights, wide, strict=True)
        ]
        onto = None if onto is None else onto.contiguous()
        biases = [served_bias(bias, dtype) for bias in tensors[len(packed) :]]
        held = _operands(packed, weights, dtype, backward=False)
        table = (binding.Weight * len(packed))(
            *(
                binding.Weight(
                    across=address(across),
                    down=address(down),
                    bias=address(bias),
                    y=address(y),
                    onto=address(onto),
                    n=y.shape[-1],
                    wide=y.dtype == torch.float32,
                )
                for (across, down), bias, y in zip(held, biases, outputs, strict=True)
            )
        )
        shape = low.numel() // low.shape[-1], low.shape[-1]
        kernels().headrace_linear(dtype == torch.float32, address(low), *shape, table, len(packed))
        ctx.packed, ctx.dtype, ctx.onto = packed, x.dtype, onto is not None
        # Not saved as tensors: checkpointing would give back detached ones, and a gradient left in the `.grad` of those is lost.
        ctx.weights = weights
        ctx.save_for_backward(low)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (low,) = ctx.saved_tensors
        needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[5:])
        d_x, *d_bias = linears_backward(low, ctx.packed, ctx.weights, grads, needs)
        d_x = None if d_x is None else d_x.to(ctx.dtype)
        return d_x, grads[0] if ctx.onto else None, None, None, None, *[None] * len(ctx.weights), *d_bias


def linears_backward(
    low: Tensor,
    packed: Sequence[PackedWeight],
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """[dx in the dtype of `low`, gradients of the biases] of products of `low`; the weights' gradients are added to their `.grad`.

    `needs`: whether x, each weight and each bias wants one.
    """
    count, wide = len(weights), low.dtype == torch.float32
    shape = low.numel() // low.shape[-1], low.shape[-1]
    d_y = [grad.to(low.dtype).contiguous() for grad in grads]
    trained, biased = needs[1 : 1 + count], needs[1 + count :]
    into = [
        one.gradient(weight) if train else (None, False)
        for one, weight, train in zip(packed, weights, trained, strict=True)
    ]
    none = [(None, None)] * count
    held = _operands(packed, weights, low.dtype, backward=True) if needs[0] else none
    table = (binding.Weight * count)(
        *(
            binding.Weight(
                across=address(across), down=address(down), y=address(d), gradient=address(g), n=d.shape[-1], add=add
            )
            for (across, down), d, (g, add) in zip(held, d_y, into, strict=True)
        )
    )
    d_x = None
    if needs[0]:
        d_x = torch.empty_like(low)
        kernels().headrace_linear_input_gradient(wide, address(d_x), *shape, table, count)
    if any(trained):
        kernels().headrace_linear_weight_gradient(wide, address(low), *shape, table, count)
    for weight, (gradient, add) in zip(weights, into, strict=True):
        if gradient is not None and not add:
            _give(weight, gradient)
    return [d_x, *(d.float().flatten(0, -2).sum(0) if need else None for d, need in zip(d_y, biased, strict=True))]


def _give(weight: Tensor, gradient: Tensor) -> None:
    if weight.grad is not None:
        weight.grad += gradient
    else:
        weight.grad = gradient if weight.dtype == gradient.dtype else gradient.to(weight.dtype)


def reserve(model: Any, tokens: int, dtype: torch.dtype) -> None:
    """Does in advance what would delay the first steps. Packs the weights for bfloat16, and makes the system allocate the memory of the
    weights that will change (until then they may be mapped from the file), of their gradients, of the optimizer's state, and of the
    activations of `tokens` tokens (at most MOST_TOKENS) in `dtype` that are kept for the backward pass."""
    keep_freed_memory()
    head = model.get_output_embeddings()
    layers = [module for module in model.modules() if hasattr(module, "packed") and module is not head]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    state = sum(parameter.nbytes + 8 * parameter.numel() for parameter in trained)
    kept = dtype.itemsize * sum(sum(module.weight.shape) for module in layers) * min(tokens, MOST_TOKENS)
    rooms = [touch(torch.empty(ROOM, dtype=torch.uint8)) for _ in range((state + kept) // ROOM)]
    del rooms  # freed, and kept for later allocations
    for parameter in trained:
        parameter.data = parameter.data.clone()
    if hasattr(head, "packed") and dtype == torch.bfloat16:
        head.packed.packed(head.weight, backward=False)
    for module in layers:
        if dtype == torch.bfloat16:
            module.packed.packed(module.weight)
        if module.weight.requires_grad and module.weight.dtype == torch.float32:
            module.packed.gradient(module.weight)


def release(model: Any) -> None:
    """Gives the memory back that products keep from step to step: packed weights, and room for gradients and for packing."""
    for module in model.modules():
        if isinstance(packed := getattr(module, "packed", None), PackedWeight):
            packed.release()
    _room.held = None
