"""Logits in float32 from factors in half precision."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear


def wide_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, H], weight [V, H] -> [R, V] float32. The product of half-precision matrices is rounded to half precision, which knows a logit of
    20 to 1/16; on CUDA its sums are returned as they are. Autograd is not recorded there."""
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return linear(x, weight).float()
