"""Weights on the policy loss: against the gap between sampler and trainer, and by lag. Shapes: M loss tokens.

x is the log-prob whose gap to the sampler's is weighed, without gradient: `old`, or the current one if `old` is the
sampler's itself. w = exp(clamp(x - sampled, ±20)). A token that a rule takes out counts zero in the numerator;
`denominator.py` decides whether it counts in the denominator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.algo.policy.tokens import Tokens, ratio_of, sequence_mean, sequence_sum
from headrace.algo.recipe_parts import Correction, LagWeight, Level


def importance_weight(x: Tensor, tokens: Tokens, level: Level) -> Tensor:
    """[M] w of the token; of its sequence, exp Σ; or the geometric mean over its sequence, exp mean.

    Sources: token, "Your efficient RL framework secretly brings you off-policy RL training" (Yao et al. 2025); sequence
    and geometric, "When speed kills stability" (Liu et al. 2025). exp Σ of a long sequence vanishes (NeMo-RL #2269):
    for thousands of tokens nearly every weight is outside any bounds, and the geometric mean is the one to use.
    """
    gap = x - tokens.sampled
    match level:
        case "token":
            pass
        case "sequence":
            gap = sequence_sum(gap, tokens.sequence)
        case "geometric":
            gap = sequence_mean(gap, tokens.sequence)
    return ratio_of(gap, torch.zeros_like(gap))


def corrected(x: Tensor, tokens: Tokens, correction: Correction) -> tuple[Tensor, dict[str, Tensor]]:
    """([M] the weight, rule -> [M] bool: tokens that it takes out).

    Truncate (TIS): the weight clamped to [low, high]. Mask (MIS; IcePop, arXiv 2510.18855): the weight, zero outside.
    """
    taken: dict[str, Tensor] = {}
    weight = torch.ones_like(tokens.sampled)
    if correction.mode != "none":
        weight = importance_weight(x, tokens, correction.level)
        if correction.mode == "mask":
            taken["mask"] = (weight < correction.low) | (weight > correction.high)
        weight = torch.clamp(weight, correction.low, correction.high)
    return weight, taken | {rule.name: rule(x, tokens) for rule in correction.rules}


def lag_weight(lag: Tensor, rule: LagWeight) -> tuple[Tensor, dict[str, Tensor]]:
    """([M] 1, decay ** lag, or 1 up to `maximum`; rule -> [M] bool: tokens that it takes out)."""
    match rule.kind:
        case "constant":
            return torch.ones_like(lag), {}
        case "exponential":
            return rule.decay**lag, {}
        case "trim":
            return torch.ones_like(lag), {"lag": lag > rule.maximum}
