"""Autograd functions whose forward pass is the engine's, with its order of sums and its roundings; see `kernels/src/served.h`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.native.memory import address
from headrace.trainer.forward.fused.fused_products import LinearLayer, Together, flattened, rows_of
from headrace.trainer.forward.fused.fused_weights import PackedWeight, kernels, packed_in_room


def gated_linear(x: Tensor, gate: LinearLayer, up: LinearLayer, gelu: bool) -> Tensor:
    """act(x Gᵀ) · (x Uᵀ) in bfloat16, of products that nothing has rounded before."""
    return _GatedLinear.apply(x, gelu, *flattened([gate, up]))


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gelu: bool, packed: Sequence[PackedWeight], scales: Sequence[float], *tensors: Any
    ) -> Tensor:
        together = Together(packed, scales, tensors)
        low = x.to(torch.bfloat16).contiguous()
        gate, up = together.outputs(low, [False, False])
        y = torch.empty_like(gate)
        table, held, thin = together.factors(low, [gate, up])
        kernels().headrace_linear_gated(address(low), *rows_of(low), *table, address(y), gelu)
        del held
        ctx.together, ctx.gelu, ctx.dtype = together, gelu, x.dtype
        ctx.save_for_backward(low, thin, gate, up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        low, thin, gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        d_y = d_y.contiguous()  # see `fused_ops._Norm.backward`
        given = map(address, (gate, up, d_y, d_gate, d_up))
        kernels().headrace_gated_backward(False, *given, gate.numel(), ctx.gelu)
        needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[4:])
        d_x, *others = ctx.together.backward(low, thin, (d_gate, d_up), needs)
        return None if d_x is None else d_x.to(ctx.dtype), None, None, None, None, None, *others


class Asked(NamedTuple):
    """The log-probs that are wanted of each row: ids[offsets[u]:offsets[u + 1]] of row u."""

    offsets: Tensor
    """[U + 1] int64"""
    ids: Tensor
    """[P] int64"""
    targets: Tensor | None = None
    """[U + 1] int64: the first ids of row u are its targets[u]:targets[u + 1], and then follow those that were kept for each of these."""
    counts: Tensor | None = None
    """[M] int64: how many were kept for each target; 0 if nothing was cut."""
    set_of: Tensor | None = None
    """[M] int64: the set that was left for each target, -1 for none."""
    sets: Tensor | None = None
    """[D, W] uint8: these sets as bits, the lowest of a byte first."""


class FoundLogprobs(NamedTuple):
    """All float32."""

    values: Tensor
    """[P] the log-probs asked for."""
    among: Tensor | None
    """[M] log-probs of the targets among what was kept for them; anything for those from which nothing was cut."""
    logsumexp: Tensor
    """[U] of each row's logits over the temperature."""
    entropy: Tensor
    """[U] in nats."""


def log_probabilities(
    hidden: Tensor, packed: PackedWeight, weight: Tensor, temperature: float, asked: Asked
) -> FoundLogprobs:
    """hidden [U, H] bfloat16 or float32, head [V, H]. Logits are float32 and lie in cache."""
    among = None if asked.counts is None else torch.empty(len(asked.counts))
    found = FoundLogprobs(torch.empty(len(asked.ids)), among, *torch.empty(2, len(hidden)).unbind())
    across = packed.packed(weight, backward=False)[0] if hidden.dtype == torch.bfloat16 else packed_in_room(weight)
    width = 0 if asked.sets is None else asked.sets.shape[1]
    given = (address(across), len(weight), 1 / temperature, *map(address, asked), width, *map(address, found))
    kernels().headrace_log_probabilities(hidden.dtype == torch.float32, address(hidden), *hidden.shape, *given)
    return found
