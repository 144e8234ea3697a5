"""A clamp whose gradient is that of its argument everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


class Bounded(torch.autograd.Function):
    """(gap, most) -> the gap within ±most, with the gradient of the gap itself: a token beyond the bound is still
    pulled back."""

    @staticmethod
    def forward(ctx: Any, gap: Float[Tensor, "*shape"], most: float) -> Float[Tensor, "*shape"]:
        return torch.clamp(gap, -most, most)

    @staticmethod
    def backward(ctx: Any, grad: Float[Tensor, "*shape"]) -> tuple[Float[Tensor, "*shape"], None]:
        return grad, None
