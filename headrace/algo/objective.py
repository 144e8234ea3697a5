"""The composed loss of an algorithm, which the trainer computes on every microbatch:

old        the log-probs that ratios are taken against
advantage  the rewards' + the teacher's
loss       the policy loss, a value of `policy/` (or the user's function)
× weight   the correction's and the lag's; zero for tokens that a rule takes out
+ KL       the divergence from the reference
+ teacher  the divergence from the teacher
- bonus    the entropy (`with_bonus`, where microbatches are added up)

A token that a rule takes out keeps the last two, unless `algo.denominator = kept` removes it from them too. The parts come first, in the
order in which a step needs them; `Objective` puts them together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.algo.config import AlgoConfig
from headrace.algo.policy.loss import LossFunction, Reach
from headrace.algo.policy.tokens import (
    TokenLoss,
    Tokens,
    TopTokens,
    log_ratio,
    ratio_of,
    sequence_mean,
    sequence_sum,
    unclipped,
)
from headrace.algo.recipe_parts import (
    KL,
    Aggregation,
    Correction,
    Demonstrated,
    Distill,
    Entropy,
    Estimator,
    LagWeight,
    Level,
    Old,
    Select,
)
from headrace.algo.recipes import Recipe

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


# --- Aggregation of per-token losses to one number
# The weight of each loss token, fixed before the first microbatch runs.
#
# C9: the denominator is that of the whole optimizer step. With these weights the losses of microbatches simply add up, so
# no split of the step can change its gradient. (A mean of the means of microbatches depends on the split: TRL #7206.)


AggregationFunction = Callable[[Sequence[int], int], list[float]]
"""(loss tokens of every sequence of the step, length constant) -> the weight of each loss token of that sequence.

A sequence is a trajectory: all rows of one agent in one rollout (`training_rows.with_trajectories`). One without loss tokens is in no
denominator.
"""


def token_mean(counts: Sequence[int], constant: int) -> list[float]:
    """Every token weighs the same: sum / all loss tokens (DAPO)."""
    tokens = max(sum(counts), 1)
    return [1 / tokens for _ in counts]


def seq_mean_token_mean(counts: Sequence[int], constant: int) -> list[float]:
    """Every sequence weighs the same: mean over sequences of the mean over their tokens (GRPO as published)."""
    sequences = _sequences(counts)
    return [1 / (sequences * max(count, 1)) for count in counts]


def seq_mean_token_sum(counts: Sequence[int], constant: int) -> list[float]:
    """Mean over sequences of the sum over their tokens: the policy gradient of REINFORCE and RLOO."""
    return [1 / _sequences(counts) for _ in counts]


def token_sum(counts: Sequence[int], constant: int) -> list[float]:
    """Sum / (constant × sequences) (Dr.GRPO, arXiv 2503.20783): the length of a completion does not enter."""
    assert constant > 0, "filled in by AlgoConfig.with_length"
    return [1 / (_sequences(counts) * constant) for _ in counts]


def pair_mean(counts: Sequence[int], constant: int) -> list[float]:
    """Every pair of rollouts weighs the same: a loss of pairs divides by the pairs of the whole step (`policy/pairs.py`), so that nothing is
    left to divide here."""
    return [1.0 for _ in counts]


def _sequences(counts: Sequence[int]) -> int:
    return max(sum(count > 0 for count in counts), 1)


AGGREGATIONS: dict[str, AggregationFunction] = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "token_sum": token_sum,
    "pair_mean": pair_mean,
}


# --- Tokens selected over the whole optimizer step. Shapes
# M loss tokens of the step, all microbatches and ranks.
#
# Such an objective is computed on the tokens of the whole step at once (`trainer/step/whole_step.py`), so that no split of the step changes
# the selection. Ties are broken by position.


def second_moment(logprob: Float[Tensor, " M"], sampled: Float[Tensor, " M"], tau: float) -> Bool[Tensor, " M"]:
    """[M] bool: all but the tokens with the largest (log ratio)² that keep its mean at τ or above (AReaL's `get_m2po_loss_mask`).

    It is not M2PO, whose authors count harmful tokens alone, and clip them (`policy/clipped.py`)."""
    moment = (logprob - sampled) ** 2
    ascending, order = torch.sort(moment, stable=True)
    mean = torch.cumsum(ascending, 0) / torch.arange(1, len(moment) + 1, device=moment.device)
    keep = torch.zeros_like(moment, dtype=torch.bool)
    keep[order] = mean < tau  # running means of ascending values ascend: what is kept is a prefix
    return keep


def covariance(
    logprob: Float[Tensor, " M"], sampled: Float[Tensor, " M"], advantage: Float[Tensor, " M"], fraction: float
) -> Bool[Tensor, " M"]:
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


def most_uncertain(entropy: Float[Tensor, " M"], share: float) -> Bool[Tensor, " M"]:
    """[M] bool: the share of the tokens with the largest entropy, at least one ("Beyond the 80/20 rule", arXiv 2506.01939, eq. 5: ρ = 0.2 of
    the batch, and a denominator of all tokens).

    Choice: the threshold is that of the optimizer step, and tokens of equal entropy are kept together."""
    if not len(entropy):
        return entropy > 0
    count = max(1, int(share * len(entropy)))
    return entropy >= entropy.sort(descending=True).values[count - 1]


# --- Weights on the policy loss
# Against the gap between sampler and trainer, and by lag. Shapes: M loss tokens.
#
# x is the log-prob whose gap to the sampler's is weighed, without gradient: `old`, or the current one if `old` is the
# sampler's itself. w = exp(clamp(x - sampled, ±20)). A token that a rule takes out counts zero in the numerator;
# `objective.py` decides whether it counts in the denominator.


def importance_weight(x: Float[Tensor, " M"], tokens: Tokens, level: Level) -> Float[Tensor, " M"]:
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


def corrected(
    x: Float[Tensor, " M"], tokens: Tokens, correction: Correction
) -> tuple[Float[Tensor, " M"], dict[str, Bool[Tensor, " M"]]]:
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


def lag_weight(lag: Float[Tensor, " M"], rule: LagWeight) -> tuple[Float[Tensor, " M"], dict[str, Bool[Tensor, " M"]]]:
    """([M] 1, decay ** lag, or 1 up to `maximum`; rule -> [M] bool: tokens that it takes out)."""
    match rule.kind:
        case "constant":
            return torch.ones_like(lag), {}
        case "exponential":
            return rule.decay**lag, {}
        case "trim":
            return torch.ones_like(lag), {"lag": lag > rule.maximum}


# --- `algo.denominator = kept`
# What a rule took out leaves the denominator of the whole step too (C9).
#
# The weights of a step are fixed before its first microbatch, and what a rule takes out is known only after a microbatch was forwarded.
# So a microbatch is weighed by what was packed, and corrected afterwards: within a sequence at once, because sequences are whole; over the
# step at its end, by one factor on the gradient that all microbatches and ranks have added to. Both are exact. (A step in which a sequence
# lies in several microbatches is computed at once, and so are these.)


COUNTS = ("tokens", "kept_tokens", "sequences", "kept_sequences")
"""The fields that add up over ranks."""


@dataclass
class KeptCounts:
    """The kept part of a step, summed over its microbatches (and ranks)."""

    aggregation: Aggregation
    tokens: int = 0
    kept_tokens: int = 0
    sequences: int = 0
    """Sequences with loss tokens."""
    kept_sequences: int = 0
    """Sequences with a token that was kept."""

    def within_sequences(self, sequence: Int[Tensor, " M"], rejected: Bool[Tensor, " M"]) -> Float[Tensor, " M"]:
        """[M] the factors on the microbatch's weights that are known at once. Counts what it keeps."""
        kept = (~rejected).to(torch.float32)
        of_all, of_kept = sequence_sum(torch.ones_like(kept), sequence), sequence_sum(kept, sequence)
        self.tokens += len(kept)
        self.kept_tokens += int(kept.sum())
        self.sequences += len(sequence.unique())
        self.kept_sequences += len(sequence[~rejected].unique())
        if self.aggregation != "seq_mean_token_mean":
            return torch.ones_like(kept)
        return of_all / torch.clamp(of_kept, min=1)

    @property
    def factor(self) -> float:
        """The factor on the gradient of the whole step."""
        if self.aggregation == "token_mean":
            return self.tokens / max(self.kept_tokens, 1)
        return self.sequences / max(self.kept_sequences, 1)


# --- Divergence from a reference model
# Divergence from a reference model, estimated on the sampled tokens (Schulman 2020, "Approximating KL divergence").
#
# k1 = lp - ref (unbiased, of any sign), k2 = ½(lp - ref)², k3 = exp(ref - lp) - (ref - lp) - 1 (unbiased, never
# negative).
#
# Only the log ratio is bounded, to ±20, and its gradient passes the bound unchanged: descent on any of them ends at 0,
# wherever it starts. A bound on the *value*, as in verl, removes the gradient of k3 from ref - lp = 2.6 on; multiplied by
# a ratio with a gradient it reverses it, and a token that is too improbable is pushed further down.


def kl_estimate(
    logprob: Float[Tensor, " M"], reference: Float[Tensor, " M"], estimator: Estimator
) -> Float[Tensor, " M"]:
    """[M] estimates of KL(policy || reference)."""
    gap = log_ratio(reference, logprob)
    match estimator:
        case "k1":
            return -gap
        case "k2":
            return gap**2 / 2
        case "k3":
            return torch.expm1(gap) - gap


def kl_loss(
    logprob: Float[Tensor, " M"],
    sampled: Float[Tensor, " M"],
    reference: Float[Tensor, " M"],
    estimator: Estimator,
    unbiased: bool,
) -> Float[Tensor, " M"]:
    """[M] to add to the loss. `unbiased` multiplies by r = π/sampler, *with* its gradient (DeepSeek-V3.2, arXiv
    2512.02556): then value and gradient are right for tokens that older weights sampled. AlgoConfig refuses k1 here.

    Without it, on policy, the expected gradient of k2 is that of KL(policy || reference), that of k3 is KL(reference ||
    policy)'s, and that of k1 is zero.
    """
    value = kl_estimate(logprob, reference, estimator)
    return ratio_of(logprob, sampled) * value if unbiased else value


# --- Distillation
# The student samples, a teacher scores. Shapes: M loss tokens, k teacher tokens a position.
#
# On-policy distillation (GKD, arXiv 2306.13649; Thinking Machines, "On-policy distillation", 2025).


TINY = 1e-12
"""Least probability of the tail, -27.6 as a logarithm: k tokens may hold all of the probability, up to rounding."""


def teacher_advantage(tokens: Tokens) -> Float[Tensor, " M"]:
    """[M] sg(teacher - logprob), zero without a teacher: the policy gradient of the reverse KL on the sampled token."""
    assert tokens.teacher is not None, "a row without a teacher has NaN, not nothing"
    gap = tokens.teacher - tokens.logprob.detach()
    return torch.where(torch.isfinite(gap), gap, 0.0)


def top_divergence(top: TopTokens, distill: Distill) -> Float[Tensor, " M"]:
    """[M] over k tokens, the teacher's most probable ones or the student's, and one bucket for all others, log(1 - Σp); zero without a teacher.

    With the bucket it is a divergence of two distributions, those of which token of k, or none of them: never negative, zero only where they agree, and never
    more than that over the whole vocabulary, of which it is a coarser view. (Of k tokens alone a reverse KL may be negative, and k renormalised ones forget
    how probable the rest is.) Likewise SDPO's authors (`add_tail`, lasgroup/SDPO) and TRL's `loss_add_tail`. Which tokens are compared has no gradient.

    forward KL(T || S), reverse KL(S || T), or jsd: β·KL(T || M) + (1 - β)·KL(S || M) with M = β·T + (1 - β)·S (GKD, eq. 1).
    No importance weight: the divergence of a position does not depend on which token was sampled there.
    """
    there = torch.isfinite(top.teacher)
    teacher, student = _with_tail(top.teacher, there), _with_tail(top.student, there)
    counted = torch.cat([there, torch.ones_like(there[:, :1])], dim=1)
    match distill.kind:
        case "forward":
            value = _kl(teacher, student, counted)
        case "reverse":
            value = _kl(student, teacher, counted)
        case _:
            value = _jsd(teacher, student, counted, distill.beta)
    return torch.where(there.any(dim=1), value, 0.0)


def _with_tail(logprob: Float[Tensor, "M k"], there: Bool[Tensor, "M k"]) -> Float[Tensor, "M k+1"]:
    """[M, k + 1]: padding is set to 0 and left out of the sums, so that no -inf is multiplied by a zero."""
    total = torch.where(there, logprob.double(), -torch.inf).exp().sum(dim=1, keepdim=True)
    tail = torch.log1p(-torch.clamp(total, max=1 - TINY))  # in float32, 1 - total has no digits left below 1e-6
    return torch.cat([torch.where(there, logprob, 0.0), tail.to(logprob.dtype)], dim=1)


def _kl(of: Float[Tensor, "M k"], to: Float[Tensor, "M k"], counted: Bool[Tensor, "M k"]) -> Float[Tensor, " M"]:
    return torch.where(counted, of.exp() * (of - to), 0.0).sum(dim=1)


def _jsd(
    teacher: Float[Tensor, "M k"], student: Float[Tensor, "M k"], counted: Bool[Tensor, "M k"], beta: float
) -> Float[Tensor, " M"]:
    share = torch.tensor(beta, dtype=student.dtype, device=student.device)
    mixture = torch.logaddexp(teacher + share.log(), student + torch.log1p(-share))  # exp of both may be 0
    return beta * _kl(teacher, mixture, counted) + (1 - beta) * _kl(student, mixture, counted)


# --- Entropy


def with_bonus(tokens: Tokens, result: TokenLoss, factor: float, only_kept: bool) -> TokenLoss:
    """Subtracts factor · H of every token, H the entropy of the policy over the whole vocabulary, with its gradient.

    Like the KL, it counts at tokens that a rule takes out, unless these leave the denominator. No importance weight: the entropy of a position
    does not depend on which token was sampled there."""
    if not factor:
        return result
    assert tokens.entropy is not None, "the trainer fills it in"
    bonus = factor * tokens.entropy
    return result._replace(loss=result.loss - (torch.where(result.rejected, 0.0, bonus) if only_kept else bonus))


@dataclass
class EntropyFactor:
    """The factor of the bonus from step to step."""

    rule: Entropy
    coef: float = field(init=False)
    mean: float = math.nan
    """The mean entropy of the last step; NaN before the first."""

    def __post_init__(self) -> None:
        self.coef = self.rule.coef

    @property
    def now(self) -> float:
        """The factor of the step to come: 0 while the last mean was above the target (Skywork-OR1, arXiv 2505.22312; with the mean of the step
        before, as in MILES, because that of the step itself would cost another forward pass)."""
        return 0.0 if self.rule.target and self.mean > self.rule.target else self.coef

    def after(self, mean: float) -> None:
        """Takes the mean entropy of a step that was made. One that is not finite, which an update that was left out may leave behind, changes nothing."""
        if self.rule.target and math.isfinite(mean):
            change = self.rule.change if mean <= self.rule.target else -self.rule.change
            self.coef, self.mean = min(max(self.coef + change, 0.0), 1.0), mean


@dataclass
class KLFactor:
    """The factor of the divergence in the loss from step to step."""

    rule: KL
    coef: float = field(init=False)
    """The factor of the step to come."""

    def __post_init__(self) -> None:
        self.coef = self.rule.coef

    def after(self, mean: float) -> None:
        """Takes the mean divergence of a token in a step that was made, by k3: β·(1 + K·clip(mean / target - 1, -0.2, 0.2)) (arXiv 1909.08593, 2.2, with
        K = 0.1; there of a whole sample). One that is not finite, which an update that was left out may leave behind, changes nothing."""
        if self.rule.target and math.isfinite(mean):
            error = min(max(mean / self.rule.target - 1, -0.2), 0.2)
            self.coef *= 1 + self.rule.change * error


# --- Demonstrations
# The loss of given answers, which nobody sampled: no ratio, and a denominator of their own tokens (`algo.demonstrations`).


def demonstrated(rule: Demonstrated, share: float) -> Objective:
    """Returns the loss of the tokens of demonstrations, which have so large a share of that of the update.

    sft: -log π. phi: -sg(π·(1 - π))·log π, which leaves out what the policy knows, and what is far from it (CHORD-φ, arXiv 2508.11408; the
    authors' `SFTPhiLossFn`, agentscope-ai/Trinity-RFT). shaped: -π/(π + γ), whose gradient at rare tokens is not as small as that of -π
    (LUFFY, arXiv 2504.14945, with an advantage of 1; the authors' `off_policy_reshape = p_div_p_0.1`, ElliottYan/LUFFY). compared: -A·π/(π + γ), A
    being the advantage of the answer among the rollouts of its question (LUFFY). Beside it, `imitation` times -sg(exp(-H))·log π, as a mean over the answers'
    tokens that no share makes smaller: the surer the policy is, the more it imitates (SRFT, arXiv 2506.19767, eq. 8).
    """

    def loss(tokens: Tokens) -> TokenLoss:
        probability = tokens.logprob.exp()
        match rule.kind:
            case "phi":
                return unclipped(-(probability * (1 - probability)).detach() * tokens.logprob)
            case "shaped":
                return unclipped(-probability / (probability + rule.gamma))
            case "compared":
                total = -tokens.advantage * probability / (probability + rule.gamma)
                if rule.imitation:
                    assert tokens.entropy is not None, "the trainer fills it in"
                    total = total - rule.imitation / share * (-tokens.entropy.detach()).exp() * tokens.logprob
                return unclipped(total)
            case _:
                return unclipped(-tokens.logprob)

    return loss


# --- objective ------------------------------------------------------------


Objective = Callable[[Tokens], TokenLoss]
"""tokens of a microbatch, or of the step -> losses per token, which the aggregation weighs and sums."""


def objective_of(algo: AlgoConfig, kl: KLFactor | None = None) -> Objective:
    """Returns the algorithm's loss. `kl`: the factor of the divergence in the loss, where it moves. Raises ConfigError if the user's loss function cannot be
    loaded."""
    recipe = algo.recipe
    return partial(_objective, recipe, recipe.loss.ready(), algo.denominator == "kept", kl or KLFactor(recipe.kl))


def reach_of(algo: AlgoConfig) -> Reach:
    """Returns the tokens that the loss of a token depends on: where they lie in several microbatches, the objective needs all of them at
    once."""
    recipe = algo.recipe
    reaches = {recipe.loss.reach, *(rule.reach for rule in recipe.correction.rules)}
    if recipe.correction.mode != "none" and recipe.correction.level != "token":
        reaches.add("sequence")
    if algo.denominator == "kept" and recipe.aggregation not in ("token_mean", "pair_mean"):
        reaches.add("sequence")
    if recipe.select.kind != "none":
        reaches.add("step")
    return "step" if "step" in reaches else "sequence" if "sequence" in reaches else "token"


def kept_by(tokens: Tokens, select: Select) -> Bool[Tensor, " M"] | None:
    """[M] bool: the tokens of the step that a selection keeps; None without one."""
    logprob = tokens.logprob.detach()
    match select.kind:
        case "none":
            return None
        case "second_moment":
            return second_moment(logprob, tokens.sampled, select.tau)
        case "entropy":
            assert tokens.entropy is not None, "the trainer fills it in"
            return most_uncertain(tokens.entropy.detach(), select.share)
        case _:
            return covariance(logprob, tokens.sampled, tokens.advantage, select.share)


def _objective(recipe: Recipe, loss: LossFunction, only_kept: bool, factor: KLFactor, tokens: Tokens) -> TokenLoss:
    tokens = _taught(tokens, recipe.distill)._replace(keep=kept_by(tokens, recipe.select))
    old = old_of(tokens, recipe.old)
    policy = loss(tokens, old)
    weight, masked = _weighed(tokens, old, recipe)
    masked |= policy.masked
    out = TokenLoss(policy.loss, policy.clipped, masked).rejected
    total = torch.where(out, 0.0, policy.loss * weight)
    if recipe.kl.coef and recipe.kl.place == "loss":
        assert tokens.reference is not None, "the trainer scores the reference where AlgoConfig.reference_in_loss"
        kl = kl_loss(tokens.logprob, tokens.sampled, tokens.reference, recipe.kl.estimator, recipe.kl.unbiased)
        total = total + factor.coef * kl
    if recipe.distill.compares and tokens.top:
        total = total + recipe.distill.coef * top_divergence(tokens.top, recipe.distill)
    if tokens.divergence is not None:
        total = total + recipe.distill.coef * tokens.divergence
    if only_kept:  # no part of the loss may count tokens that the denominator leaves out
        total = torch.where(out, 0.0, total)
    return TokenLoss(total, policy.clipped & ~out, masked)


def old_of(tokens: Tokens, old: Old) -> Float[Tensor, " M"]:
    """[M] the log-probs that ratios are taken against, without gradient.

    trainer: the trainer's own log-prob when the step began. In its first update it is the current one, at no cost, and every ratio is 1
    with its gradient; in further ones (`train.epochs`, `train.minibatches`) the ratio is that of PPO. loglinear: a proximal policy
    (decoupled PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298) one step behind the one that the step began with, on the log-linear path
    from the sampler's weights to it: sampled + α·(logprob - sampled), α = (v_prox - v_sampler)/(v_now - v_sampler) = (lag - 1)/lag
    (A-3PO, arXiv 2512.06547).
    """
    own = tokens.logprob.detach() if tokens.before is None else tokens.before
    match old:
        case "sampler":
            return tokens.sampled
        case "trainer":
            return own
        case "loglinear":
            alpha = torch.clamp(tokens.lag - 1, min=0) / torch.clamp(tokens.lag, min=1)
            return tokens.sampled + alpha * (own - tokens.sampled)


def _taught(tokens: Tokens, distill: Distill) -> Tokens:
    if distill.kind != "sampled":
        return tokens
    return tokens._replace(advantage=tokens.advantage + distill.coef * teacher_advantage(tokens))


def _weighed(
    tokens: Tokens, old: Float[Tensor, " M"], recipe: Recipe
) -> tuple[Float[Tensor, " M"], dict[str, Bool[Tensor, " M"]]]:
    x = tokens.logprob.detach() if recipe.old == "sampler" else old
    weight, masked = corrected(x, tokens, recipe.correction)
    by_lag, too_old = lag_weight(tokens.lag, recipe.lag)
    masked |= too_old
    if recipe.select.rejects:
        assert tokens.keep is not None, "filled in from kept_by"
        masked[recipe.select.kind] = ~tokens.keep
    return weight * by_lag, masked
