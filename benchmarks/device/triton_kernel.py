"""A kernel of three lines: whether Triton compiles at all on a machine. It needs a file of its own, which Triton reads."""

import torch
import triton
import triton.language as tl


@triton.jit
def _doubled(x, y, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(y + place, 2 * tl.load(x + place))


def doubled(x: torch.Tensor) -> torch.Tensor:
    """x [64] -> 2 x"""
    y = torch.empty_like(x)
    _doubled[(1,)](x, y, COUNT=64)
    return y
