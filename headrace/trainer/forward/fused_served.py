"""Autograd functions whose forward pass is the engine's, with its order of sums and its roundings; see `kernels/src/served.h`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.native.memory import address
from headrace.trainer.forward.fused_products import (
    Layer,
    PackedWeight,
    kernels,
    linears_backward,
    packed_in_room,
    served_bias,
)
from headrace.trainer.kernels import binding


def gated_linear(x: Tensor, gate: Layer, up: Layer, gelu: bool) -> Tensor:
    """act(x Gᵀ) · (x Uᵀ) in bfloat16, of products that nothing has rounded before."""
    (packed, weights, biases) = zip(gate, up, strict=True)
    return _GatedLinear.apply(x, packed, gelu, *weights, *biases)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: tuple[PackedWeight, PackedWeight], gelu: bool, *tensors: Any) -> Tensor:
        weights, biases = tensors[:2], [served_bias(bias, torch.bfloat16) for bias in tensors[2:]]
        low = x.to(torch.bfloat16).contiguous()
        gate, up, y = (low.new_empty(*x.shape[:-1], len(weights[0])) for _ in range(3))
        across = [one.packed(weight)[0] for one, weight in zip(packed, weights, strict=True)]
        gate_up = [
            binding.Weight(across=address(panels), bias=address(bias), y=address(into), n=y.shape[-1])
            for panels, bias, into in zip(across, biases, (gate, up), strict=True)
        ]
        shape = low.numel() // low.shape[-1], low.shape[-1]
        kernels().headrace_linear_gated(address(low), *shape, *gate_up, address(y), gelu)
        ctx.packed, ctx.gelu, ctx.dtype = packed, gelu, x.dtype
        ctx.weights = weights  # see `_Linears.forward`
        ctx.save_for_backward(low, gate, up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        low, gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        d_y = d_y.contiguous()  # see `fused_ops._Norm.backward`
        given = map(address, (gate, up, d_y, d_gate, d_up))
        kernels().headrace_gated_backward(False, *given, gate.numel(), ctx.gelu)
        needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[3:])
        d_x, *d_bias = linears_backward(low, ctx.packed, ctx.weights, (d_gate, d_up), needs)
        return None if d_x is None else d_x.to(ctx.dtype), None, None, None, None, *d_bias


class Asked(NamedTuple):
    """The log-probs that are wanted of each row: ids[offsets[u]:offsets[u + 1]] of row u."""

    offsets: Tensor
    """[U + 1] int64"""
    ids: Tensor
    """[P] int64"""


def log_probabilities(
    hidden: Tensor, packed: PackedWeight, weight: Tensor, temperature: float, asked: Asked
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [U, H] bfloat16 or float32 and head [V, H] -> the log-probs asked for [P], the log-sum-exp of each row's logits over the
    temperature [U], and the entropy [U] in nats; float32. Logits are float32 and lie in cache."""
    offsets, ids = asked
    found = torch.empty(len(ids))
    logsumexp, entropy = torch.empty(2, len(hidden)).unbind()
    across = packed.packed(weight, backward=False)[0] if hidden.dtype == torch.bfloat16 else packed_in_room(weight)
    into = map(address, (offsets, ids, found, logsumexp, entropy))
    given = (address(across), len(weight), 1 / temperature, *into)
    kernels().headrace_log_probabilities(hidden.dtype == torch.float32, address(hidden), *hidden.shape, *given)
    return found, logsumexp, entropy
