"""Functions with gradients of their own: a clamp that keeps the gradient everywhere, and sums over sequences that are the same in every run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Bounded(torch.autograd.Function):
    """(gap, most) -> the gap within ±most, with the gradient of the gap itself: a token beyond the bound is still
    pulled back."""

    @staticmethod
    def forward(ctx: Any, gap: Float[Tensor, "*shape"], most: float) -> Float[Tensor, "*shape"]:
        return torch.clamp(gap, -most, most)

    @staticmethod
    def backward(ctx: Any, grad: Float[Tensor, "*shape"]) -> tuple[Float[Tensor, "*shape"], None]:
        return grad, None


class SequenceSum(torch.autograd.Function):
    """(values [M], sequence [M]) -> at every token, the sum of the values over its sequence.

    The gradient of a token is the sum of the gradients over its sequence: the same function. (Autograd's own for an index adds them up in an
    order that differs from call to call, on CUDA and in threads; a step has to be replayed bit for bit, C8.)
    """

    @staticmethod
    def forward(ctx: Any, values: Float[Tensor, " M"], sequence: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
        ctx.save_for_backward(sequence)
        return _summed(values, sequence)

    @staticmethod
    def backward(ctx: Any, grad: Float[Tensor, " M"]) -> tuple[Float[Tensor, " M"], None]:
        return _summed(grad.contiguous(), *ctx.saved_tensors), None


def _summed(values: Float[Tensor, " M"], sequence: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
    order = sequence.argsort(stable=True)
    sums = torch.segment_reduce(values[order], "sum", lengths=sequence.bincount(), unsafe=True)
    return sums[sequence]
