"""Tokens selected over the whole optimizer step. Shapes: M loss tokens of the step, all microbatches and ranks.

The log-probs come from a forward pass without gradient before the first microbatch, so that no split of the step
changes the selection. Ties are broken by position.
"""

from __future__ import annotations

import torch
from torch import Tensor


def m2po(logprob: Tensor, sampled: Tensor, tau: float) -> Tensor:
    """[M] bool: all but the tokens with the largest (log ratio)² that keep its mean at τ or above (M2PO, arXiv
    2510.01161)."""
    moment = (logprob - sampled).cpu().double() ** 2  # a running sum on CUDA differs from call to call (C8)
    ascending, order = torch.sort(moment, stable=True)
    mean = torch.cumsum(ascending, 0) / torch.arange(1, len(moment) + 1)
    keep = torch.zeros_like(moment, dtype=torch.bool)
    keep[order] = mean < tau  # running means of ascending values ascend: what is kept is a prefix
    return keep.to(logprob.device)


def covariance(logprob: Tensor, sampled: Tensor, advantage: Tensor, fraction: float) -> Tensor:
    """[M] bool: all but the `fraction` of tokens with the largest (logprob - mean)·(A - mean), at least one.

    Clip-Cov and KL-Cov (arXiv 2505.22617): these tokens reduce the entropy most. Choice: 2e-4 of the tokens (SkyRL
    0.2). Clip-Cov of the paper draws among those inside bounds; here the largest are taken, without chance, so that a
    step can be replayed. Two tokens always have equal covariances, so that a choice would depend on their order: below
    three, none is taken.
    """
    value = (logprob - logprob.double().mean()) * (advantage - advantage.double().mean())
    count = max(1, int(fraction * len(value))) if len(value) > 2 else 0
    keep = torch.ones_like(value, dtype=torch.bool)
    keep[torch.sort(value, descending=True, stable=True).indices[:count]] = False
    return keep
