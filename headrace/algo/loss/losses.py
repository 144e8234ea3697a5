"""Policy losses: per-token numbers in, per-token numbers out. Shapes: M loss tokens of a microbatch.

`old` [M] (no gradient) is what the ratio r = exp(logprob - old) is anchored at: `objective.old_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from headrace.algo.loss.tokens import TokenLoss, Tokens, binary_kl, log_ratio, ratio_of, sequence_mean, sequence_sum
from headrace.algo.recipes import READS, Recipe

LossFunction = Callable[[Tokens, Tensor], TokenLoss]
"""(tokens, old [M]) -> TokenLoss"""


def ppo_clip(tokens: Tokens, old: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0) -> TokenLoss:
    """-min(r·A, clip(r, 1 - low, 1 + high)·A) (PPO, arXiv 1707.06347; two bounds as in DAPO, arXiv 2503.14476).

    Choice: no dual clip (arXiv 1912.09729) unless asked for: of a bad token the loss is then at most -A·c.
    """
    return _clipped(ratio_of(tokens.logprob, old), tokens.advantage, clip_low, clip_high, dual_clip)


def _clipped(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float = 0.0) -> TokenLoss:
    loss = -torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)
    clipped = torch.where(advantage > 0, ratio > 1 + high, (advantage < 0) & (ratio < 1 - low))
    if dual:
        bad = advantage < 0
        loss = torch.where(bad, torch.minimum(loss, -advantage * dual), loss)
        clipped = clipped | (bad & (ratio > dual))
    return TokenLoss(loss, clipped)


def _unclipped(loss: Tensor) -> TokenLoss:
    return TokenLoss(loss, torch.zeros_like(loss, dtype=torch.bool))


def importance(tokens: Tokens, old: Tensor) -> TokenLoss:
    """-r·A: importance sampling without a bound; for those who bound it elsewhere (M2PO)."""
    return _unclipped(-ratio_of(tokens.logprob, old) * tokens.advantage)


def reinforce(tokens: Tokens, old: Tensor, cap: float) -> TokenLoss:
    """-sg(min(r, cap))·A·logprob: on policy plain REINFORCE (Williams 1992), off policy truncated importance sampling.

    Choice: cap 2, as OAT, slime, open-instruct, Tunix and verl have it.
    """
    ratio = ratio_of(tokens.logprob, old).detach()
    return TokenLoss(-torch.clamp(ratio, max=cap) * tokens.advantage * tokens.logprob, ratio > cap)


def gspo(tokens: Tokens, old: Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    """PPO's clip on the sequence's s = exp(mean_t(logprob - old)), gradient through the mean (GSPO, arXiv 2507.18071, eq. 5).

    Choice: the paper's form; verl and SkyRL compute `gspo_token`.
    """
    ratio = ratio_of(sequence_mean(tokens.logprob - old, tokens.sequence), torch.zeros_like(old))
    return _clipped(ratio, tokens.advantage, clip_low, clip_high)


def gspo_token(tokens: Tokens, old: Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    """As `gspo` in value; every token's gradient flows through its own log-prob (arXiv 2507.18071, eq. 13)."""
    mean = sequence_mean(tokens.logprob.detach() - old, tokens.sequence)
    ratio = ratio_of(mean + tokens.logprob - tokens.logprob.detach(), torch.zeros_like(old))
    return _clipped(ratio, tokens.advantage, clip_low, clip_high)


def cispo(tokens: Tokens, old: Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    """-sg(clip(r, 1 - low, 1 + high))·A·logprob (MiniMax-M1, arXiv 2506.13585): no token loses its gradient.

    Choice: the upper bound is 1 + high as written in the paper; TRL clamps at `high` itself. low = 1 is no lower bound.
    """
    ratio = ratio_of(tokens.logprob, old).detach()
    weight = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    return TokenLoss(-weight * tokens.advantage * tokens.logprob, weight != ratio)


def sapo(tokens: Tokens, old: Tensor, tau: float, tau_negative: float) -> TokenLoss:
    """-(4/τ)·σ(τ·(r - 1))·A, a soft gate in place of a clip (SAPO, arXiv 2511.20347); τ differs for A > 0 and the rest."""
    ratio = ratio_of(tokens.logprob, old)
    temperature = torch.full_like(ratio, tau_negative).masked_fill(tokens.advantage > 0, tau)
    return _unclipped(-4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * tokens.advantage)


def dppo_tv(tokens: Tokens, old: Tensor, delta: float, cap: float) -> TokenLoss:
    """-keep·A·sg(min(r, cap))·logprob (DPPO, arXiv 2602.04879): a token goes when its *probability* moved by more than δ
    in the direction in which its advantage pushes. A ratio would punish rare tokens for moves that change nothing."""
    return _inside_region(tokens, old, _moved_too_far(tokens, old, delta), cap)


def _inside_region(tokens: Tokens, old: Tensor, left: Tensor, cap: float) -> TokenLoss:
    weight = torch.clamp(ratio_of(tokens.logprob, old).detach(), max=cap)
    return TokenLoss(-weight * tokens.advantage * tokens.logprob * ~left, left)


def _moved_too_far(tokens: Tokens, old: Tensor, delta: float) -> Tensor:
    moved = torch.exp(tokens.logprob.detach()) - torch.exp(old)
    return torch.where(tokens.advantage > 0, moved > delta, moved < -delta)


def dppo_kl(tokens: Tokens, old: Tensor, delta: float, cap: float) -> TokenLoss:
    """As `dppo_tv`, but a token goes when the binary KL(old || current) is above δ and its probability moved in the direction in
    which its advantage pushes (DPPO-Binary-KL, arXiv 2602.04879; verl's loss of this name)."""
    now = tokens.logprob.detach()
    pushed = torch.where(tokens.advantage > 0, now > old, now < old)
    return _inside_region(tokens, old, pushed & (binary_kl(old, now) > delta), cap)


def dppo_tv_quadratic(tokens: Tokens, old: Tensor, delta: float, penalty: float) -> TokenLoss:
    """-keep·A·r + penalty·(log r)^2, an earlier default of prime-rl: `keep` as in `dppo_tv`; r has its gradient and no cap.

    Runs of headrace before 2026-11-22 call it dppo_kl (`algo/earlier.py`), which is another algorithm in the paper.
    """
    return _masked_importance(tokens, old, _moved_too_far(tokens, old, delta), penalty)


def ipo(tokens: Tokens, old: Tensor, delta: float, penalty: float) -> TokenLoss:
    """As `dppo_tv_quadratic`, but a token goes when its probability moved by more than δ in *either* direction (prime-rl).

    Choice: δ = 0.3 and no penalty, as prime-rl has it now; it was 0.1 and 1e-3 at first. Its cap of 1e4 on r is our e^20.
    """
    left = (torch.exp(tokens.logprob.detach()) - torch.exp(old)).abs() > delta
    return _masked_importance(tokens, old, left, penalty)


def _masked_importance(tokens: Tokens, old: Tensor, left: Tensor, penalty: float) -> TokenLoss:
    policy = torch.where(left, 0.0, ratio_of(tokens.logprob, old) * tokens.advantage)
    return TokenLoss(penalty * log_ratio(tokens.logprob, old) ** 2 - policy, left)


def kimi(tokens: Tokens, old: Tensor, tau: float) -> TokenLoss:
    """-A·logprob + (τ/2)·(logprob - old)^2 (Kimi k1.5, arXiv 2501.12599): mirror descent, no importance weight.

    Choice: the square is per token, as ROLL and prime-rl have it; the paper's is per sequence.
    """
    return _unclipped(tau / 2 * log_ratio(tokens.logprob, old) ** 2 - tokens.advantage * tokens.logprob)


def topr(tokens: Tokens, old: Tensor) -> TokenLoss:
    """Good: -A·logprob; the rest: -sg(clip(ratio, 0, 1))·A·logprob (TOPR, arXiv 2503.14286).

    Choice: the ratio is the trajectory's, exp(Σ_t(logprob - old)), as in the paper; ROLL's is `topr_token`. That of a long
    trajectory vanishes quickly: then only the good ones teach.
    """
    return _tapered(tokens, sequence_sum(tokens.logprob.detach() - old, tokens.sequence))


def topr_token(tokens: Tokens, old: Tensor) -> TokenLoss:
    """As `topr` with every token's own ratio (ROLL)."""
    return _tapered(tokens, tokens.logprob.detach() - old)


def _tapered(tokens: Tokens, gap: Tensor) -> TokenLoss:
    ratio = ratio_of(gap, torch.zeros_like(gap))
    good = tokens.advantage > 0
    weight = torch.where(good, 1.0, torch.clamp(ratio, max=1.0))
    return TokenLoss(-weight * tokens.advantage * tokens.logprob, ~good & (ratio > 1))


def gmpo(tokens: Tokens, old: Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    """-A·exp(mean_t of the clipped log ratios): the geometric mean over a sequence (GMPO, arXiv 2507.20673).

    Bounds are in log space, exp(-low) to exp(high), and clip in the direction of the token's advantage, as PPO's do.
    """
    gap = log_ratio(tokens.logprob, old)
    good = tokens.advantage > 0
    bounded = torch.where(good, torch.clamp(gap, max=clip_high), torch.clamp(gap, min=-clip_low))
    clipped = torch.where(good, gap > clip_high, gap < -clip_low)
    return TokenLoss(-torch.exp(sequence_mean(bounded, tokens.sequence)) * tokens.advantage, clipped)


def kl_cov(tokens: Tokens, old: Tensor, penalty: float) -> TokenLoss:
    """-r·A, and penalty·|logprob - old| on the tokens that the step's selection marked (KL-Cov, arXiv 2505.22617)."""
    assert tokens.keep is not None, "filled in from selection_of"
    drift = log_ratio(tokens.logprob, old).abs()
    return _unclipped(-ratio_of(tokens.logprob, old) * tokens.advantage + penalty * drift * ~tokens.keep)


def ce(tokens: Tokens, old: Tensor) -> TokenLoss:
    """-weight·logprob, the advantage as the weight: cross-entropy on what was sampled, no ratio at all.

    Its own denominator: `groups.Algorithm` takes rollouts of weight zero out of the mask, so that they do not count.
    """
    return _unclipped(-tokens.advantage * tokens.logprob)


LOSSES: dict[str, Callable[..., TokenLoss]] = {
    "ppo_clip": ppo_clip,
    "importance": importance,
    "reinforce": reinforce,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dppo_tv_quadratic": dppo_tv_quadratic,
    "ipo": ipo,
    "kimi": kimi,
    "topr": topr,
    "topr_token": topr_token,
    "gmpo": gmpo,
    "kl_cov": kl_cov,
    "ce": ce,
}


def bound_loss(recipe: Recipe) -> LossFunction:
    """The recipe's loss with its constants filled in."""
    return partial(LOSSES[recipe.loss], **{name: getattr(recipe, name) for name in READS[recipe.loss]})
