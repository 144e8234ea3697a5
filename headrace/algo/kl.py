"""Divergence from a reference model, estimated on the sampled tokens (Schulman 2020, "Approximating KL divergence").

k1 = lp - ref (unbiased, of any sign), k2 = ½(lp - ref)², k3 = exp(ref - lp) - (ref - lp) - 1 (unbiased, never negative).
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.algo.recipes import MAX_KL, MAX_LOG_RATIO, Estimator
from headrace.algo.tokens import ratio_of


def kl_estimate(logprob: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """[M] of KL(policy || reference); the log ratio clamped to ±20, the value to ±10."""
    gap = torch.clamp(reference - logprob, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            value = -gap
        case "k2":
            value = gap**2 / 2
        case "k3":
            value = torch.expm1(gap) - gap
    return torch.clamp(value, -MAX_KL, MAX_KL)


def kl_loss(logprob: Tensor, sampled: Tensor, reference: Tensor, estimator: Estimator, unbiased: bool) -> Tensor:
    """[M] to add to the loss. `unbiased` multiplies by r = π/sampler, *with* its gradient (DeepSeek-V3.2, arXiv 2512.02556):
    then value and gradient are right under tokens that older weights sampled. AlgoConfig refuses k1 here.

    Without it, on policy, the expected gradient of k2 is that of KL(policy || reference), of k3 that of KL(reference ||
    policy), of k1 zero.
    """
    value = kl_estimate(logprob, reference, estimator)
    return ratio_of(logprob, sampled) * value if unbiased else value
