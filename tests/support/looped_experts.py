"""Products in FP8 of all experts of a mixture, one after the other: what a GPU's grouped product computes at once."""

from __future__ import annotations

from itertools import pairwise

import torch

from headrace.engine.native.runners.fp8 import Coded, emulated_product


def looped(x: Coded, weights: Coded, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As `fp8.grouped_product`."""
    parts = [
        emulated_product((x[0][a:b], x[1][a:b]), (weights[0][e], weights[1][e]), None, dtype)
        for e, (a, b) in enumerate(pairwise([0, *ends.tolist()]))
    ]
    return torch.cat(parts)
