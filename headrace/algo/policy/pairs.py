"""Losses of preferences: functions of two rollouts of one prompt, of which the first is preferred, or of single rollouts that are right or wrong
(`KTO`). Imports no torch at the top.

A pair's loss depends on the log-likelihoods of both of its rollouts, and they may lie in different microbatches. So it is a loss of the whole
step (`trainer/step/whole_step.py`). All agents of a rollout make one sequence here.

h is the margin, in nats: (lc - rc) - (lr - rr), with l the log-likelihood of the chosen (c) or rejected (r) rollout under the weights being
trained, and r the reference's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from headrace.algo.policy.loss import Loss, Reach
from headrace.algo.policy.tokens import MIN_REST, RIGHT, TokenLoss, Tokens, sequence_sum, unclipped
from headrace.settings.strict import STRICT

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

PairBeta = Annotated[float, Field(gt=0)]
PairMargin = Annotated[float, Field(ge=0)]
PairNLL = Annotated[float, Field(ge=0)]
RolloutWeight = Annotated[float, Field(gt=0)]
Flips = Annotated[float, Field(ge=0, lt=0.5)]


class Side(NamedTuple):
    """The chosen, or the rejected, rollouts of K pairs."""

    logprob: Float[Tensor, " K"]
    """[K] Σ log π over the sampled tokens."""
    reference: Float[Tensor, " K"] | None
    """[K] the same under the reference; None for a loss without one."""
    tokens: Float[Tensor, " K"]
    """[K] how many they are; 1 or more."""

    @property
    def gain(self) -> Float[Tensor, " K"]:
        """[K] log π - log π_ref"""
        assert self.reference is not None, "the trainer scores the reference where AlgoConfig.reference_in_loss"
        return self.logprob - self.reference

    @property
    def mean(self) -> Float[Tensor, " K"]:
        """[K] log π, a mean over the tokens."""
        return self.logprob / self.tokens


PairFunction = Callable[[Side, Side], "Tensor"]
"""(chosen, rejected) -> [K] the loss of each pair"""


class Compared(NamedTuple):
    """The K pairs of a step, of S rollouts."""

    chosen: Int[Tensor, " K"]
    rejected: Int[Tensor, " K"]
    """[K] their numbers, int64"""
    counts: Float[Tensor, " S"]
    """[S] tokens of every rollout"""
    better: Side
    worse: Side


class PairLoss(Loss):
    """A loss of preferred and rejected rollouts. It needs no importance weight: which rollout is better does not depend on who sampled it."""

    pairs: ClassVar[bool] = True
    whole: ClassVar[bool] = True
    reach: ClassVar[Reach] = "step"
    anchored: ClassVar[bool] = False
    weighs: ClassVar[bool] = False

    def of_pairs(self, chosen: Side, rejected: Side) -> Float[Tensor, " K"]:
        """[K] the loss of each pair, float64."""
        raise NotImplementedError

    def margin(self, chosen: Side, rejected: Side) -> Float[Tensor, " K"]:
        """[K] what the loss widens: positive where the policy agrees with the preference."""
        return chosen.gain - rejected.gain

    def compared(self, tokens: Tokens) -> Compared:
        """The pairs of the step of which both rollouts have tokens: a sampler's log-prob that is not finite takes a token out."""
        assert tokens.pairs is not None, "filled in for a loss of pairs"
        count = 1 + max((int(numbers.max()) for numbers in (*tokens.pairs, tokens.sequence) if len(numbers)), default=0)

        def sums(values: Float[Tensor, " M"]) -> Float[Tensor, " S"]:
            return values.new_zeros(count).index_put((tokens.sequence,), values, accumulate=True)

        counts, likelihood = sums(tokens.lag * 0 + 1), sums(tokens.logprob)
        reference = sums(tokens.reference) if tokens.reference is not None and self.needs_reference else None
        there = (counts[tokens.pairs[0]] > 0) & (counts[tokens.pairs[1]] > 0)
        chosen, rejected = (numbers[there] for numbers in tokens.pairs)
        sides = (
            Side(likelihood[tensor], None if reference is None else reference[tensor], counts[tensor])
            for tensor in (chosen, rejected)
        )
        return Compared(chosen, rejected, counts, *sides)

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        return self.spread(tokens, self.of_pairs)

    def spread(self, tokens: Tokens, of_pairs: PairFunction) -> TokenLoss:
        """Spreads half of the loss of each pair over the tokens of either rollout: the sum over the step is the mean over pairs."""
        found = self.compared(tokens)
        half = of_pairs(found.better, found.worse) / (2 * max(len(found.chosen), 1))
        of_rollouts = half.new_zeros(len(found.counts))
        for numbers in (found.chosen, found.rejected):
            of_rollouts = of_rollouts.index_put((numbers,), half, accumulate=True)
        return unclipped((of_rollouts / found.counts.clamp(min=1))[tokens.sequence])


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DPO(PairLoss):
    """-log σ(β·h): the preferred rollout gains more on the reference than the rejected one (DPO, arXiv 2305.18290, eq. 7).

    For a share of preferences that are wrong, conservative DPO takes the mean of both losses, (1 - ε)·L(h) + ε·L(-h) (Mitchell 2023), and robust DPO the
    unbiased ((1 - ε)·L(h) - ε·L(-h)) / (1 - 2ε) (arXiv 2403.00409). α·(-mean lc) beside it is RPO (arXiv 2404.19733, eq. 1; α = 1 there).
    """

    name: ClassVar[str] = "dpo"
    needs_reference: ClassVar[bool] = True
    pair_beta: PairBeta = 0.1
    """β: the larger, the nearer the policy stays to the reference."""
    pair_smoothing: Flips = 0.0
    """ε of conservative DPO: the share of preferences that may be wrong; the margin has a target."""
    pair_flips: Flips = 0.0
    """ε of robust DPO: the share of preferences that are known to be wrong."""
    pair_nll: PairNLL = 0.0
    """α: the weight of the preferred rollout's mean negative log-likelihood (RPO: 1)."""

    def of_pairs(self, chosen: Side, rejected: Side) -> Float[Tensor, " K"]:
        won = self.pair_beta * self.margin(chosen, rejected)
        lean = self.pair_smoothing - self.pair_flips / (1 - 2 * self.pair_flips)  # L(-h) is L(h) + β·h
        return _softplus(-won) + lean * won - self.pair_nll * chosen.mean

    def problems(self) -> Iterator[str]:
        if self.pair_smoothing and self.pair_flips:
            yield "algo.pair_smoothing and algo.pair_flips are two answers to wrong preferences; remove one of them"

    def words(self) -> Iterator[str]:
        yield from (f"{name} = {value:.6g}" for name, value in self.constants().items() if value)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class IdentityPreference(PairLoss):
    """(h - 1/(2β))²: the margin has a target, so that a preference that is certain does not drive it for ever (IPO, arXiv 2310.12036, eq. 17).

    Choice: h is a sum over tokens, as in the paper; TRL's `loss_type = "ipo"` takes means over tokens, which it says the authors confirm.
    """

    name: ClassVar[str] = "ipo_pairs"
    needs_reference: ClassVar[bool] = True
    pair_beta: PairBeta = 0.1
    """β (the paper's τ): the target of the margin is 1/(2β) nats."""

    def of_pairs(self, chosen: Side, rejected: Side) -> Float[Tensor, " K"]:
        return (self.margin(chosen, rejected) - 1 / (2 * self.pair_beta)) ** 2

    def words(self) -> Iterator[str]:
        yield f"margin of {1 / (2 * self.pair_beta):.6g} nats"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SimPO(PairLoss):
    """-log σ(β·(mean lc - mean lr) - γ), with log-likelihoods per token and without a reference (SimPO, arXiv 2405.14734, eq. 6)."""

    name: ClassVar[str] = "simpo"
    holds: ClassVar[bool] = False
    pair_beta: PairBeta = 2.0
    """β: 2 to 10 is usual, since it multiplies a mean over tokens."""
    pair_margin: PairMargin = 1.0
    """γ: the margin asked for; a third to a half of β is usual."""

    def of_pairs(self, chosen: Side, rejected: Side) -> Float[Tensor, " K"]:
        return _softplus(self.pair_margin - self.pair_beta * self.margin(chosen, rejected))

    def margin(self, chosen: Side, rejected: Side) -> Float[Tensor, " K"]:
        return chosen.mean - rejected.mean


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CPO(PairLoss):
    """-log σ(β·(lc - lr)) - α·mean lc: DPO without a reference, held by the likelihood of the preferred rollout (CPO, arXiv
    2401.08417, eq. 5).

    Choice: that likelihood is a mean over tokens, as in the authors' code (fe1ixxu/ALMA) and TRL.
    """

    name: ClassVar[str] = "cpo"
    holds: ClassVar[bool] = False
    pair_beta: PairBeta = 0.1
    """β: how soon a margin is enough."""
    pair_nll: PairNLL = 1.0
    """α: the weight of the preferred rollout's mean negative log-likelihood (RPO: 1)."""

    def of_pairs(self, chosen: Side, rejected: Side) -> Float[Tensor, " K"]:
        return _softplus(-self.pair_beta * self.margin(chosen, rejected)) - self.pair_nll * chosen.mean

    def margin(self, chosen: Side, rejected: Side) -> Float[Tensor, " K"]:
        return chosen.logprob - rejected.logprob


@dataclass(frozen=True, kw_only=True, config=STRICT)
class KTO(Loss):
    """λ_D·(1 - σ(β·(g - z))) for a desirable rollout, of positive advantage, and λ_U·(1 - σ(β·(z - g))) for any other, with g = l -
    l_ref and z the mean of g over the rollouts of the step, at least 0, without its gradient (KTO, arXiv 2402.01306, eq. 8).

    Choice: z is over the step's own rollouts, which the policy sampled, as an estimate of KL(policy ‖ reference); the authors and
    TRL take given completions of other prompts. A rollout's loss lies in equal parts on its tokens.
    """

    name: ClassVar[str] = "kto"
    reach: ClassVar[Reach] = "step"
    anchored: ClassVar[bool] = False
    weighs: ClassVar[bool] = False
    whole: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = True
    pair_beta: PairBeta = 0.1
    """β: how soon a gain on the reference is enough."""
    desirable_weight: RolloutWeight = 1.0
    """λ_D: the weight of desirable rollouts; with n_D and n_U of each kind, λ_D·n_D / (λ_U·n_U) of 1 to 4/3 is
    advised."""
    undesirable_weight: RolloutWeight = 1.0
    """λ_U: the weight of the others."""

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        assert tokens.reference is not None, "the trainer scores the reference where AlgoConfig.reference_in_loss"
        count = sequence_sum(tokens.logprob.detach() * 0 + 1, tokens.sequence)
        gain = sequence_sum(tokens.logprob - tokens.reference, tokens.sequence)
        share = 1 / count  # of a rollout, on each of its tokens
        divergence = ((share * gain.detach()).sum() / share.sum()).clamp(min=0)
        desired = self.desirable_weight * (self.pair_beta * (divergence - gain)).sigmoid()
        other = self.undesirable_weight * (self.pair_beta * (gain - divergence)).sigmoid()
        return unclipped(share * desired.where(tokens.advantage > RIGHT, other))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ORPO(PairLoss):
    """-mean lc - λ·log σ(log odds(c) - log odds(r)), with odds = p/(1 - p) and p = exp of the mean over tokens: supervised learning
    of the preferred rollout, and a penalty where the other is as likely (ORPO, arXiv 2403.07691, eq. 6 and 7)."""

    name: ClassVar[str] = "orpo"
    holds: ClassVar[bool] = False
    pair_beta: PairBeta = 0.1
    """λ: the weight of the odds."""

    def of_pairs(self, chosen: Side, rejected: Side) -> Float[Tensor, " K"]:
        return self.pair_beta * _softplus(-self.margin(chosen, rejected)) - chosen.mean

    def margin(self, chosen: Side, rejected: Side) -> Float[Tensor, " K"]:
        return _log_odds(chosen.mean) - _log_odds(rejected.mean)


# Held-out pairs are measured by the controller, which has no torch, as arrays of numpy.


def _softplus(values: Float[Tensor, " K"]) -> Float[Tensor, " K"]:
    import numpy as np

    if isinstance(values, np.ndarray):
        return np.logaddexp(0.0, values)
    from torch.nn.functional import softplus

    return softplus(values)


def _log_odds(mean: Float[Tensor, " K"]) -> Float[Tensor, " K"]:
    import numpy as np

    inside = mean.clip(max=-MIN_REST)
    if isinstance(inside, np.ndarray):
        return inside - np.log(-np.expm1(inside))
    return inside - (-inside.expm1()).log()
