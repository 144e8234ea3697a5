"""Autograd functions over the kernels: each is one pass over memory forward and one backward.

Contiguous CPU tensors in float32 or bfloat16; sums inside are always float32, and their order does not depend on the number of
threads. They work with checkpointing: the inputs of the backward pass are saved in the ordinary way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.native.memory import address
from headrace.trainer.forward.fused.fused_weights import kernels
from headrace.trainer.kernels import binding
from headrace.trainer.packing import Segment

STRETCH = 32
"""Rows whose parts of a weight's gradient are summed together."""


# -- rows -------------------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit: float, dtype: torch.dtype, *, wide: bool = False) -> Tensor:
    """x / rms(x) · (weight + unit) over the last dimension, in `dtype` (arXiv:1910.07467). unit is 1 for Gemma, else 0. `wide`: only the
    weight is rounded to `dtype`; the result is float32."""
    return _Norm.apply(x, served(weight, dtype), eps, unit, torch.float32 if wide else dtype, None)


def add_rms_norm(total: Tensor, x: Tensor, *, weight: Tensor, eps: float, unit: float, dtype: torch.dtype) -> Tensor:
    """total + x / rms(x) · (weight + unit), all float32; the weight is rounded to `dtype`. Gemma adds the results of its layers so."""
    return _Norm.apply(x, served(weight, dtype), eps, unit, torch.float32, total.contiguous())


def served(weight: Tensor, dtype: torch.dtype) -> Tensor:
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


def valued(x: Tensor, value: Tensor) -> Tensor:
    """x with another value, which differs by rounding; the gradient passes as it is."""
    return _Valued.apply(x, value)


class _Valued(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.clone()

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
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, unit: float, dtype: torch.dtype, onto: Tensor | None
    ) -> Tensor:
        x, width = x.contiguous(), x.shape[-1]
        rows = x.numel() // width
        y, scale = torch.empty(x.shape, dtype=dtype), torch.empty(rows)
        wide = x.dtype == torch.float32, dtype == torch.float32
        kernels().headrace_norm(*wide, *map(address, (x, weight, y, scale)), rows, width, eps, unit, address(onto))
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
        d_y = d_y.contiguous()  # by a name: nothing else would hold a copy while the kernel reads it
        given = (x, weight, scale, d_y, d_x, d_weight, parts)
        kernels().headrace_norm_backward(*wide, *map(address, given), rows, width, ctx.unit)
        return d_x, d_weight, None, None, None, d_y if ctx.needs_input_grad[5] else None


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


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, *, weight: Tensor | None, eps: float, unit: float, dtype: torch.dtype
) -> Tensor:
    """Rotary embedding (arXiv:2104.09864) of x [N, heads, D] by cos and sin [N, D] float32, halves as in `rotate_half`; after
    an RMSNorm of each head if there is a weight [D]. The result is float32, rounded to `dtype`."""
    return _Rotary.apply(x, cos, sin, None if weight is None else served(weight, dtype), eps, unit, dtype)


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
        how = eps, unit, dtype != torch.float32
        kernels().headrace_rotary(x.dtype == torch.float32, *given, *x.shape, *how)
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


def attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, window: int = 0) -> Tensor:
    """q [N, heads, D] and k [N, kv_heads, D] float32, v [N, kv_heads, D] -> [N, heads, D] in the dtype of v. A token attends
    to itself, to the earlier tokens of its segment, and to all ancestors of the segment, as far back as `window` tokens (0:
    all). No tensor of the size of the scores is kept. In bfloat16 q and k are rounded, and the forward pass is the engine's,
    block by block."""
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
