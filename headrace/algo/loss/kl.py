"""Divergence from a reference model, estimated on the sampled tokens (Schulman 2020, "Approximating KL divergence").

k1 = lp - ref (unbiased, of any sign), k2 = ½(lp - ref)², k3 = exp(ref - lp) - (ref - lp) - 1 (unbiased, never
negative).

Only the log ratio is bounded, to ±20, and its gradient passes the bound unchanged: descent on any of them ends at 0,
wherever it starts. A bound on the *value*, as in verl, removes the gradient of k3 from ref - lp = 2.6 on; multiplied by
a ratio with a gradient it reverses it, and a token that is too improbable is pushed further down.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.algo.policy.tokens import log_ratio, ratio_of
from headrace.algo.recipe_parts import Estimator


def kl_estimate(logprob: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """[M] estimates of KL(policy || reference)."""
    gap = log_ratio(reference, logprob)
    match estimator:
        case "k1":
            return -gap
        case "k2":
            return gap**2 / 2
        case "k3":
            return torch.expm1(gap) - gap


def kl_loss(logprob: Tensor, sampled: Tensor, reference: Tensor, estimator: Estimator, unbiased: bool) -> Tensor:
    """[M] to add to the loss. `unbiased` multiplies by r = π/sampler, *with* its gradient (DeepSeek-V3.2, arXiv
    2512.02556): then value and gradient are right for tokens that older weights sampled. AlgoConfig refuses k1 here.

    Without it, on policy, the expected gradient of k2 is that of KL(policy || reference), that of k3 is KL(reference ||
    policy)'s, and that of k1 is zero.
    """
    value = kl_estimate(logprob, reference, estimator)
    return ratio_of(logprob, sampled) * value if unbiased else value
