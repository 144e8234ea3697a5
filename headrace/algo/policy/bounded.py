"""A clamp whose gradient is that of its argument everywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Bounded(torch.autograd.Function):
    """(gap, most) -> the gap within ±most, with the gradient of the gap itself: a token beyond the bound is still
    pulled back."""

    @staticmethod
    def forward(ctx: Any, gap: Tensor, most: float) -> Tensor:
        return torch.clamp(gap, -most, most)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
