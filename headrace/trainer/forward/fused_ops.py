"""Autograd functions over the kernels: each is one pass over memory forward and one backward.

Contiguous CPU tensors in float32 or bfloat16; sums inside are always float32, and run in one order whatever the number of
threads. They compose with checkpointing: what the backward pass needs is saved the ordinary way.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.native.memory import address, touch, zeros
from headrace.packing import Segment
from headrace.trainer.kernels import binding

SIDE = 32
"""Of the blocks that products are made of."""
STRETCH = 32
"""Rows whose parts of a weight's gradient are summed together."""


def kernels() -> Any:
    """The functions, told how many threads torch uses now."""
    functions = binding.library()
    assert functions is not None
    functions.headrace_threads(torch.get_num_threads())
    return functions


# -- products ---------------------------------------------------------------------------------------------------------------


class PackedWeight:
    """A matrix [n, k] as the kernels multiply by it. In bfloat16 it is packed once for each of its values, for both directions; in
    float32, where that would be 8 bytes a parameter, at every use (5 to 10 % of a product over 1,024 rows).

    It also keeps the memory of the gradient: fresh pages cost more than what is computed into them.
    """

    def __init__(self) -> None:
        self._packed_from: tuple[int, int] | None = None
        self._packed: tuple[Tensor, Tensor] | None = None
        self._gradient: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        return PackedWeight()

    def packed(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """bfloat16, (for y = x Wᵀ, for dx = dy W). Packed again if the weight was written to since."""
        now = weight.data_ptr(), weight._version
        if self._packed is None or now != self._packed_from:
            size = _packed_size(weight)
            self._packed = self._packed or (zeros(size, torch.bfloat16), zeros(size, torch.bfloat16))
            _pack(weight, *self._packed)
            self._packed_from = now
        return self._packed

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
    """Where float32 weights are packed: one room for all layers, for the largest of them."""

    held: Tensor | None = None

    def __call__(self, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        if self.held is None or self.held.numel() < sum(sizes):
            self.held = zeros(sum(sizes), torch.float32)
        return self.held[: sum(sizes)].split(list(sizes))


_room = _Room()


def _operands(
    packed: Sequence[PackedWeight], weights: Sequence[Tensor], dtype: torch.dtype, backward: bool
) -> list[tuple[Tensor | None, Tensor | None]]:
    """Of each weight what `binding.Weight` calls across and down, of which a direction reads one."""
    if dtype == torch.bfloat16:
        return [one.packed(weight) for one, weight in zip(packed, weights, strict=True)]
    rooms = _room([_packed_size(weight) for weight in weights])
    held: list[tuple[Tensor | None, Tensor | None]] = [(None, room) if backward else (room, None) for room in rooms]
    for weight, into in zip(weights, held, strict=True):
        _pack(weight, *into)
    return held


def linears(
    x: Tensor, layers: Sequence[tuple[PackedWeight, Tensor, Tensor | None]], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """x [..., k] times the transpose of each weight [n, k], plus its bias: [..., n] each, from one reading of x. `dtype`, bfloat16 or
    float32, is that of the factors and of the results; sums are float32.

    A weight's gradient is not handed to autograd but added to its `.grad` where the product is made.
    """
    weights = [weight for _, weight, _ in layers]
    biases = [bias for _, _, bias in layers]
    return _Linears.apply(x, dtype, [packed for packed, _, _ in layers], *weights, *biases)


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, packed: list[PackedWeight], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights = [weight for weight in tensors[: len(packed)] if weight is not None]
        low = x.to(dtype).contiguous()
        outputs = [low.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]
        wide = [None if bias is None else bias.float() for bias in tensors[len(packed) :]]
        held = _operands(packed, weights, dtype, backward=False)
        table = (binding.Weight * len(packed))(
            *(
                binding.Weight(
                    across=address(across), down=address(down), bias=address(bias), y=address(y), n=y.shape[-1]
                )
                for (across, down), bias, y in zip(held, wide, outputs, strict=True)
            )
        )
        shape = low.numel() // low.shape[-1], low.shape[-1]
        kernels().headrace_linear(dtype == torch.float32, address(low), *shape, table, len(packed))
        ctx.packed, ctx.dtype = packed, x.dtype
        # Not saved as tensors: checkpointing would give back detached ones, and a gradient left in the `.grad` of those is lost.
        ctx.weights = weights
        ctx.save_for_backward(low)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (low,), weights = ctx.saved_tensors, ctx.weights
        count, wide = len(weights), low.dtype == torch.float32
        shape = low.numel() // low.shape[-1], low.shape[-1]
        d_y = [grad.to(low.dtype).contiguous() for grad in grads]
        trained = ctx.needs_input_grad[3 : 3 + count]
        into = [
            one.gradient(weight) if train else (None, False)
            for one, weight, train in zip(ctx.packed, weights, trained, strict=True)
        ]
        none = [(None, None)] * count
        held = _operands(ctx.packed, weights, low.dtype, backward=True) if ctx.needs_input_grad[0] else none
        table = (binding.Weight * count)(
            *(
                binding.Weight(
                    across=address(across),
                    down=address(down),
                    y=address(d),
                    gradient=address(g),
                    n=d.shape[-1],
                    add=add,
                )
                for (across, down), d, (g, add) in zip(held, d_y, into, strict=True)
            )
        )
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = torch.empty_like(low)
            kernels().headrace_linear_input_gradient(wide, address(d_x), *shape, table, count)
            d_x = d_x.to(ctx.dtype)
        if any(trained):
            kernels().headrace_linear_weight_gradient(wide, address(low), *shape, table, count)
        for weight, (gradient, add) in zip(weights, into, strict=True):
            if gradient is not None and not add:
                _give(weight, gradient)
        needs_bias = ctx.needs_input_grad[3 + count :]
        d_bias = [d.float().flatten(0, -2).sum(0) if need else None for d, need in zip(d_y, needs_bias, strict=True)]
        return d_x, None, None, *[None] * count, *d_bias


def _give(weight: Tensor, gradient: Tensor) -> None:
    if weight.grad is not None:
        weight.grad += gradient
    else:
        weight.grad = gradient if weight.dtype == gradient.dtype else gradient.to(weight.dtype)


# -- rows -------------------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit: float, dtype: torch.dtype) -> Tensor:
    """x / rms(x) · (weight + unit) over the last dimension, in `dtype` (arXiv:1910.07467). unit is 1 for Gemma, else 0."""
    return _Norm.apply(x, None, weight.float(), eps, unit, dtype)[0]


def add_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, unit: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + delta), x + delta), the sum in the dtype of x, which is float32; delta has `dtype`."""
    return _Norm.apply(x, delta, weight.float(), eps, unit, dtype)


def _parts(rows: int, width: int, wanted: bool) -> tuple[Tensor | None, Tensor | None]:
    """(a weight's gradient [width], room for its parts)."""
    if not wanted:
        return None, None
    return torch.empty(width), torch.empty(-(-rows // STRETCH), width)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, unit: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        x, width = x.contiguous(), x.shape[-1]
        rows = x.numel() // width
        delta = None if delta is None else delta.to(dtype).contiguous()
        total = x if delta is None else torch.empty_like(x)
        y, scale = torch.empty(x.shape, dtype=dtype), torch.empty(rows)
        wide = x.dtype == torch.float32, dtype == torch.float32
        kernels().headrace_norm(*wide, *map(address, (x, delta, total, weight, y, scale)), rows, width, eps, unit)
        ctx.save_for_backward(total, weight, scale)
        ctx.unit, ctx.dtype, ctx.delta = unit, dtype, delta is not None
        if delta is None:
            total = x.new_empty(0)
            ctx.mark_non_differentiable(total)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor, d_total: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, scale = ctx.saved_tensors
        width = total.shape[-1]
        rows = total.numel() // width
        d_x = torch.empty_like(total)
        d_delta = torch.empty_like(d_y) if ctx.delta and ctx.dtype != total.dtype else None
        d_total = d_total.contiguous() if ctx.delta and d_total is not None else None
        d_weight, parts = _parts(rows, width, ctx.needs_input_grad[2])
        wide = total.dtype == torch.float32, ctx.dtype == torch.float32
        d_y = d_y.contiguous()  # by a name: nothing else would hold a copy while the kernel reads it
        given = (total, weight, scale, d_y, d_total, d_x, d_delta, d_weight, parts)
        kernels().headrace_norm_backward(*wide, *map(address, given), rows, width, ctx.unit)
        if ctx.delta and d_delta is None:
            d_delta = d_x
        return d_x, d_delta, d_weight, None, None, None


def gated(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    """act(gate) · up of one shape and dtype; act is SiLU or GELU's tanh form (arXiv:2002.05202)."""
    return _Gated.apply(gate, up, gelu)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        ctx.save_for_backward(gate, up)
        ctx.gelu = gelu
        kernels().headrace_gated(gate.dtype == torch.float32, *map(address, (gate, up, y)), y.numel(), gelu)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        d_y = d_y.contiguous()  # see `_Norm.backward`
        given = map(address, (gate, up, d_y, d_gate, d_up))
        kernels().headrace_gated_backward(gate.dtype == torch.float32, *given, gate.numel(), ctx.gelu)
        return d_gate, d_up, None


def rotary(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float, unit: float) -> Tensor:
    """Rotary embedding (arXiv:2104.09864) of x [N, heads, D] by cos and sin [N, D] float32, halves as in `rotate_half`; after
    an RMSNorm of each head where there is a weight [D]. The result is float32."""
    return _Rotary.apply(x, cos, sin, None if weight is None else weight.float(), eps, unit)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float, unit: float
    ) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x, dtype=torch.float32)
        given = map(address, (x, y, cos, sin, weight))
        kernels().headrace_rotary(x.dtype == torch.float32, *given, *x.shape, eps, unit)
        ctx.save_for_backward(x if weight is not None else None, cos, sin, weight)
        ctx.constants, ctx.dtype = (eps, unit), x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, cos, sin, weight = ctx.saved_tensors
        d_y = d_y.contiguous()
        d_x = torch.empty_like(d_y, dtype=ctx.dtype)
        d_weight, parts = _parts(d_y.shape[0], d_y.shape[2], weight is not None and ctx.needs_input_grad[3])
        given = map(address, (x, d_y, d_x, cos, sin, weight, d_weight, parts))
        kernels().headrace_rotary_backward(ctx.dtype == torch.float32, *given, *d_y.shape, *ctx.constants)
        return d_x, None, None, d_weight, None, None


# -- attention --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segments:
    """The segments of a pack as the kernels read them: int32 [segments] each."""

    start: Tensor
    length: Tensor
    parent: Tensor

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Segments:
        columns = [[s.start for s in segments], [s.length for s in segments], [s.parent for s in segments]]
        return cls(*(torch.tensor(column, dtype=torch.int32) for column in columns))

    def trees(self, q: Tensor, k: Tensor, scale: float, window: int) -> binding.Trees:
        return binding.Trees(
            tokens=len(q),
            segments=len(self.start),
            heads=q.shape[1],
            kv_heads=k.shape[1],
            dim=q.shape[2],
            window=window,
            scale=scale,
            start=address(self.start),
            length=address(self.length),
            parent=address(self.parent),
        )


def attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int = 0) -> Tensor:
    """q [N, heads, D] and k [N, kv_heads, D] float32, v [N, kv_heads, D] -> [N, heads, D] in the dtype of v. A token sees itself, what comes before it in its segment, and
    all ancestors of that, as far back as `window` tokens (0: all). Nothing of the size of the scores is kept."""
    return _Attention.apply(q, k, v, segments, scale, window)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        out = torch.empty_like(q, dtype=v.dtype)
        trees = segments.trees(q, k, scale, window)
        kernels().headrace_attention(v.dtype == torch.float32, ctypes.byref(trees), *map(address, (q, k, v, out)))
        ctx.save_for_backward(q, k, v)
        ctx.segments, ctx.constants = segments, (scale, window)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        trees = ctx.segments.trees(q, k, *ctx.constants)
        d_out = d_out.contiguous()  # see `_Norm.backward`
        given = map(address, (q, k, v, d_out, d_q, d_k, d_v))
        kernels().headrace_attention_backward(v.dtype == torch.float32, ctypes.byref(trees), *given)
        return d_q, d_k, d_v, None, None, None
