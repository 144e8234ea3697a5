"""Mixtures of experts as autograd functions, with the engine's order of sums and its roundings; see `kernels/src/experts.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from headrace.native.memory import address
from headrace.trainer.forward.fused.fused_ops import served
from headrace.trainer.forward.fused.fused_products import input_gradient, weight_gradient
from headrace.trainer.forward.fused.fused_weights import PackedWeight, give, kernels, packed_now
from headrace.trainer.kernels import binding

VECTOR = 16
"""The numbers that the kernels read at once."""


# -- the router -------------------------------------------------------------------------------------------------------------


def router_scores(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x [N, H] times the transpose of the router [E, H], of factors in `dtype`: [N, E] float32."""
    return _Scores.apply(x.to(dtype), served(weight, dtype))


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x, scores = x.contiguous(), torch.empty(len(x), len(weight))
        router = pad(weight, (0, -x.shape[-1] % VECTOR)).contiguous()
        given = (address(x), *x.shape, address(router), len(weight), address(scores))
        kernels().headrace_router_scores(x.dtype == torch.float32, *given)
        ctx.save_for_backward(x, weight)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_scores, wide = d_scores.contiguous(), x.float()
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            d_x = input_gradient(torch.empty_like(wide), [(d_scores, packed_now(weight, torch.float32, down=True))])
            d_x = d_x.to(x.dtype)
        if ctx.needs_input_grad[1]:
            d_weight = torch.empty_like(weight)
            weight_gradient(wide, [d_scores], [d_weight], [False])
        return d_x, d_weight


def choice(scores: Tensor, chosen: int, normalised: bool, recorded: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts with the highest scores [N, E], or the recorded ones [N, K], as ([N, K] their weights, [N, K] int64). The weights are a
    softmax over all experts, divided by its sum over the chosen ones if `normalised`."""
    return _Choice.apply(scores, chosen, normalised, recorded)


class _Choice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, chosen: int, normalised: bool, recorded: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        rows, experts = scores.shape
        which = torch.empty(rows, chosen, dtype=torch.int64)
        if recorded is not None:
            which.copy_(recorded)
        scores, weights = scores.contiguous(), torch.empty(rows, chosen)
        given = (address(scores), rows, experts, chosen, normalised, recorded is not None)
        kernels().headrace_choose(*given, address(which), address(weights))
        ctx.save_for_backward(scores, weights, which)
        ctx.normalised = normalised
        ctx.mark_non_differentiable(which)
        return weights, which

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_weights: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        scores, weights, which = ctx.saved_tensors
        along = (d_weights * weights).sum(-1, keepdim=True)
        if ctx.normalised:  # a softmax over the chosen scores
            d_scores = torch.zeros_like(scores).scatter_(1, which, weights * (d_weights - along))
        else:
            d_scores = (scores.softmax(-1) * -along).scatter_add_(1, which, weights * d_weights)
        return d_scores, None, None, None


# -- the experts ------------------------------------------------------------------------------------------------------------


class Stacks(NamedTuple):
    """The weights of a layer's experts."""

    gate_up: Tensor
    """[E, 2I, H]: the gates first."""
    down: Tensor
    """[E, H, I]"""
    packed: tuple[PackedWeight, PackedWeight]
    """One of 2E matrices, and one of E."""
    gelu: bool

    def operands(self, dtype: torch.dtype, backward: bool) -> list[Tensor]:
        """Both as the kernels read them: in bfloat16 packed for one direction."""
        weights = (self.gate_up, self.down)
        if dtype == torch.bfloat16:
            return [one.packed(weight)[backward] for one, weight in zip(self.packed, weights, strict=True)]  # type: ignore[misc]
        return [weight.detach().float().contiguous() for weight in weights]


def experts(x: Tensor, weights: Tensor, which: Tensor, stacks: Stacks, dtype: torch.dtype) -> Tensor:
    """The sum over a row's experts `which` [N, K] of weight · down(act(gate(x)) · up(x)), from x [N, H] on in factors of `dtype`: [N, H]
    float32. The gradients of the experts' weights are not passed to autograd: they are added to their `.grad`."""
    return _Experts.apply(x.to(dtype), weights, which, stacks, stacks.gate_up, stacks.down)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, which: Tensor, stacks: Stacks, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        x, weights, which = x.contiguous(), weights.float().contiguous(), which.long().contiguous()
        kept = x.new_empty(3, which.numel(), down.shape[-1]).unbind()
        out, told = torch.empty(x.shape), torch.empty(which.numel(), x.shape[-1])
        held = stacks.operands(x.dtype, backward=False)
        mixture = _mixture(stacks, which, weights, operands=held, kept=kept, told=told)
        kernels().headrace_experts(x.dtype == torch.float32, ctypes.byref(mixture), address(x), address(out))
        ctx.save_for_backward(x, weights, which, *kept)
        ctx.stacks = stacks  # see `fused_products.Together`
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, which, *kept = ctx.saved_tensors
        stacks, needs = ctx.stacks, ctx.needs_input_grad[4:]
        low, by_x, by_weights = d_out.to(x.dtype).contiguous(), torch.empty_like(x), torch.empty_like(weights)
        told, held = torch.empty(len(kept[0]), x.shape[-1]), stacks.operands(x.dtype, backward=True)
        mixture = _mixture(stacks, which, weights, operands=held, kept=kept, told=told)
        matrices = (stacks.gate_up, stacks.down)
        into = [
            one.gradient(weight) if need else (None, False)
            for one, weight, need in zip(stacks.packed, matrices, needs, strict=True)
        ]
        (mixture.by_gate_up, mixture.add_gate_up), (mixture.by_down, mixture.add_down) = (
            (address(gradient), add) for gradient, add in into
        )
        given = map(address, (x, low, by_x, by_weights))
        kernels().headrace_experts_backward(x.dtype == torch.float32, ctypes.byref(mixture), *given)
        for weight, (gradient, add) in zip(matrices, into, strict=True):
            if gradient is not None and not add:
                give(weight, gradient)
        return by_x, by_weights, None, None, None, None


def _mixture(
    stacks: Stacks,
    which: Tensor,
    weights: Tensor,
    *,
    operands: Sequence[Tensor],
    kept: Sequence[Tensor],
    told: Tensor,
) -> binding.MixtureStruct:
    count, hidden, inner = stacks.down.shape
    sizes = {"rows": len(which), "hidden": hidden, "inner": inner, "experts": count, "chosen": which.shape[1]}
    gate_up, down = map(address, operands)
    gate, up, y = map(address, kept)
    given = {
        "which": address(which),
        "weights": address(weights),
        "gate_up": gate_up,
        "down": down,
        "told": address(told),
    }
    return binding.MixtureStruct(**sizes, **given, gate=gate, up=up, y=y, gelu=stacks.gelu)
