"""Autograd functions over the kernels: each is one pass over memory forward and one backward.

Contiguous CPU tensors in float32 or bfloat16; sums inside are always float32, and run in one order whatever the number of
threads. They compose with checkpointing: what the backward pass needs is saved the ordinary way.
"""

from __future__ import annotations

import ctypes
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
    """A matrix [n, k] as the kernels multiply by it: bfloat16, packed once for each of its values, for both directions.

    It also keeps the memory of the gradient: fresh pages cost more than what is computed into them.
    """

    def __init__(self) -> None:
        self._packed_from: tuple[int, int] | None = None
        self._packed: tuple[Tensor, Tensor] | None = None
        self._gradient: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        return PackedWeight()

    def packed(self, weight: Tensor, backward: bool = True) -> tuple[Tensor, Tensor]:
        """(for y = x Wᵀ, for dx = dy W, empty unless `backward`). Packed again if the weight was written to since."""
        now = weight.data_ptr(), weight._version
        if self._packed is None or now != self._packed_from:
            (n, k), area = weight.shape, SIDE * SIDE
            size = -(-n // SIDE) * -(-k // SIDE) * area
            if self._packed is None:
                down = zeros(size, torch.bfloat16) if backward else torch.empty(0, dtype=torch.bfloat16)
                self._packed = zeros(size, torch.bfloat16), down
            source = weight.detach().float().contiguous()
            places = [address(one) if len(one) else None for one in self._packed]
            kernels().headrace_pack_weight(address(source), n, k, *places)
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


Layer = tuple[PackedWeight, Tensor, Tensor | None]
"""A weight [n, k] and its bias [n]."""


def linears(x: Tensor, layers: Sequence[Layer], wide: Sequence[bool] = ()) -> tuple[Tensor, ...]:
    """x [..., k] times the transpose of each weight, plus its bias: [..., n] each, in bfloat16 or float32 (`wide`), from one
    reading of x.

    A weight's gradient is not handed to autograd but added to its `.grad` where the product is made.
    """
    return _apply_linears(x, None, layers, wide or [False] * len(layers))


def linear_onto(total: Tensor, x: Tensor, layer: Layer) -> Tensor:
    """total [..., n] float32 plus the product, summed from `total` on as the engine does; float32."""
    return _apply_linears(x, total, [layer], [True])[0]


def _apply_linears(x: Tensor, onto: Tensor | None, layers: Sequence[Layer], wide: Sequence[bool]) -> tuple[Tensor, ...]:
    packed, weights, biases = zip(*layers, strict=True)
    return _Linears.apply(x, onto, packed, wide, *weights, *biases)


def low_bias(bias: Tensor | None) -> Tensor | None:
    """As it is served: float32, of numbers that bfloat16 has."""
    return None if bias is None else bias.detach().bfloat16().float()


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        onto: Tensor | None,
        packed: Sequence[PackedWeight],
        wide: Sequence[bool],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = tensors[: len(packed)], tensors[len(packed) :]
        rows = x.numel() // x.shape[-1]
        low = x.to(torch.bfloat16).contiguous()
        dtypes = [torch.float32 if one else torch.bfloat16 for one in wide]
        outputs = [
            low.new_empty(*x.shape[:-1], weight.shape[0], dtype=dtype)
            for weight, dtype in zip(weights, dtypes, strict=True)
            if weight is not None
        ]
        onto = None if onto is None else onto.contiguous()
        low_biases = [low_bias(bias) for bias in biases]
        held = [one.packed(weight) for one, weight in zip(packed, weights, strict=True) if weight is not None]
        table = (binding.Weight * len(packed))(
            *(
                binding.Weight(
                    *map(address, (across, down, bias, y, None, onto)), y.shape[-1], 0, y.dtype == torch.float32
                )
                for (across, down), bias, y in zip(held, low_biases, outputs, strict=True)
            )
        )
        kernels().headrace_linear(address(low), rows, x.shape[-1], table, len(packed))
        ctx.packed, ctx.dtype, ctx.onto = packed, x.dtype, onto is not None
        ctx.save_for_backward(low, *weights)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        low, *weights = ctx.saved_tensors
        needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[4:])
        d_x, *d_bias = linears_backward(low, ctx.packed, weights, grads, needs)
        d_x = None if d_x is None else d_x.to(ctx.dtype)
        return d_x, grads[0] if ctx.onto else None, None, None, *[None] * len(weights), *d_bias


def linears_backward(
    low: Tensor,
    packed: Sequence[PackedWeight],
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """[dx in bfloat16, gradients of the biases] of products of `low`; the weights' gradients are added to their `.grad`.

    `needs`: whether x, each weight and each bias wants one.
    """
    count, k = len(weights), low.shape[-1]
    rows = low.numel() // k
    d_y = [grad.to(torch.bfloat16).contiguous() for grad in grads]
    held = [one.packed(weight) for one, weight in zip(packed, weights, strict=True)]
    trained, biased = needs[1 : 1 + count], needs[1 + count :]
    into = [
        one.gradient(weight) if train else (None, False)
        for one, weight, train in zip(packed, weights, trained, strict=True)
    ]
    table = (binding.Weight * count)(
        *(
            binding.Weight(*map(address, (across, down, None, d, g, None)), d.shape[-1], add, 0)
            for (across, down), d, (g, add) in zip(held, d_y, into, strict=True)
        )
    )
    d_x = None
    if needs[0]:
        d_x = torch.empty_like(low)
        kernels().headrace_linear_input_gradient(address(d_x), rows, k, table, count)
    if any(trained):
        kernels().headrace_linear_weight_gradient(address(low), rows, k, table, count)
    for weight, (gradient, add) in zip(weights, into, strict=True):
        if gradient is not None and not add:
            _give(weight, gradient)
    return [d_x, *(d.float().flatten(0, -2).sum(0) if need else None for d, need in zip(d_y, biased, strict=True))]


def _give(weight: Tensor, gradient: Tensor) -> None:
    if weight.grad is not None:
        weight.grad += gradient
    else:
        weight.grad = gradient if weight.dtype == gradient.dtype else gradient.to(weight.dtype)


# -- rows -------------------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit: float, dtype: torch.dtype) -> Tensor:
    """x / rms(x) · (weight + unit) over the last dimension, in `dtype` (arXiv:1910.07467). unit is 1 for Gemma, else 0."""
    return _Norm.apply(x, _served(weight, dtype), eps, unit, dtype)


def _served(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """float32, of numbers that `dtype` has: as the engine has it. The gradient passes as it is."""
    return _Rounded.apply(weight.float(), dtype) if dtype != torch.float32 else weight.float()


def rounded(x: Tensor) -> Tensor:
    """float32 x, of numbers that bfloat16 has."""
    return _Rounded.apply(x, torch.bfloat16)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        return d_y, None


def _parts(rows: int, width: int, wanted: bool) -> tuple[Tensor | None, Tensor | None]:
    """(a weight's gradient [width], room for its parts)."""
    if not wanted:
        return None, None
    return torch.empty(width), torch.empty(-(-rows // STRETCH), width)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, unit: float, dtype: torch.dtype) -> Tensor:
        x, width = x.contiguous(), x.shape[-1]
        rows = x.numel() // width
        y, scale = torch.empty(x.shape, dtype=dtype), torch.empty(rows)
        wide = x.dtype == torch.float32, dtype == torch.float32
        kernels().headrace_norm(*wide, *map(address, (x, weight, y, scale)), rows, width, eps, unit)
        ctx.save_for_backward(x, weight, scale)
        ctx.unit, ctx.dtype = unit, dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        width = x.shape[-1]
        rows = x.numel() // width
        d_x = torch.empty_like(x)
        d_weight, parts = _parts(rows, width, ctx.needs_input_grad[1])
        wide = x.dtype == torch.float32, ctx.dtype == torch.float32
        given = (x, weight, scale, d_y.contiguous(), d_x, d_weight, parts)
        kernels().headrace_norm_backward(*wide, *map(address, given), rows, width, ctx.unit)
        return d_x, d_weight, None, None, None


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
        given = map(address, (gate, up, d_y.contiguous(), d_gate, d_up))
        kernels().headrace_gated_backward(gate.dtype == torch.float32, *given, gate.numel(), ctx.gelu)
        return d_gate, d_up, None


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float, unit: float, dtype: torch.dtype
) -> Tensor:
    """Rotary embedding (arXiv:2104.09864) of x [N, heads, D] by cos and sin [N, D] float32, halves as in `rotate_half`; after
    an RMSNorm of each head where there is a weight [D]. The result is float32, of numbers that `dtype` has."""
    return _Rotary.apply(x, cos, sin, None if weight is None else _served(weight, dtype), eps, unit, dtype)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        weight: Tensor | None,
        eps: float,
        unit: float,
        dtype: torch.dtype,
    ) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x, dtype=torch.float32)
        given = map(address, (x, y, cos, sin, weight))
        kernels().headrace_rotary(x.dtype == torch.float32, *given, *x.shape, eps, unit, dtype != torch.float32)
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
        return d_x, None, None, d_weight, None, None, None


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
        places = [address(column) for column in (self.start, self.length, self.parent)]
        return binding.Trees(len(q), len(self.start), q.shape[1], k.shape[1], q.shape[2], window, scale, *places)


def attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int = 0) -> Tensor:
    """q [N, heads, D] and k [N, kv_heads, D] float32, v [N, kv_heads, D] -> [N, heads, D] in the dtype of v. A token sees itself, what comes before it in its segment, and
    all ancestors of that, as far back as `window` tokens (0: all). Nothing of the size of the scores is kept. In bfloat16 q and k
    are rounded, and the forward pass is the engine's, block by block."""
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
        given = map(address, (q, k, v, d_out.contiguous(), d_q, d_k, d_v))
        kernels().headrace_attention_backward(v.dtype == torch.float32, ctypes.byref(trees), *given)
        return d_q, d_k, d_v, None, None, None
