"""Losses in which the ratio, if there is one, is a weight: a bound limits the weight, and every token keeps its
gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from pydantic.dataclasses import dataclass

from headrace.algo.policy.loss import Cap, ClipHigh, ClipLow, Loss, Penalty, Reach
from headrace.algo.policy.tokens import MAX_LOG_RATIO, TokenLoss, Tokens, ratio_of, sequence_sum, unclipped
from headrace.settings.strict import STRICT

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Importance(Loss):
    """-r·A: importance sampling without a bound, for a selection that bounds it elsewhere."""

    name: ClassVar[str] = "importance"
    holds: ClassVar[bool] = False

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        return unclipped(-ratio_of(tokens.logprob, old) * tokens.advantage)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Reinforce(Loss):
    """-sg(min(r, cap))·A·logprob: on policy plain REINFORCE (Williams 1992), off policy truncated importance sampling.

    Choice: cap 2, as in OAT, slime, open-instruct, Tunix and verl.
    """

    name: ClassVar[str] = "reinforce"
    cap: Cap = 2.0
    """The largest importance weight."""

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        ratio = ratio_of(tokens.logprob, old).detach()
        return TokenLoss(-ratio.clamp(max=self.cap) * tokens.advantage * tokens.logprob, ratio > self.cap)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CISPO(Loss):
    """-sg(clip(r, 1 - low, 1 + high))·A·logprob (MiniMax-M1, arXiv 2506.13585): no token loses its gradient.

    Choice: the upper bound is 1 + high as written in the paper; TRL clamps at `high` itself. low = 1 is no lower bound.
    """

    name: ClassVar[str] = "cispo"
    clip_low: ClipLow = 1.0
    """The smallest weight is 1 - clip_low."""
    clip_high: ClipHigh = 4.0
    """The largest weight is 1 + clip_high."""

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        ratio = ratio_of(tokens.logprob, old).detach()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return TokenLoss(-weight * tokens.advantage * tokens.logprob, weight != ratio)

    def words(self) -> Iterator[str]:
        yield f"weight within [{1 - self.clip_low:.6g}, {1 + self.clip_high:.6g}]"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TOPR(Loss):
    """-A·logprob for good rollouts, -sg(clip(ratio, 0, 1))·A·logprob for the rest (TOPR, arXiv 2503.14286).

    Choice: the ratio is the trajectory's, exp(Σ_t(logprob - old)), as in the paper; it vanishes quickly where that is long. ROLL's
    is `topr_token`.
    """

    name: ClassVar[str] = "topr"
    weighs: ClassVar[bool] = False
    reach: ClassVar[Reach] = "sequence"

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        return _tapered(tokens, sequence_sum(tokens.logprob.detach() - old, tokens.sequence))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TOPRToken(Loss):
    """TOPR (`topr`) with the ratio of each token (ROLL)."""

    name: ClassVar[str] = "topr_token"
    weighs: ClassVar[bool] = False

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        return _tapered(tokens, tokens.logprob.detach() - old)


def _tapered(tokens: Tokens, gap: Float[Tensor, " M"]) -> TokenLoss:
    ratio = ratio_of(gap, gap.new_zeros(gap.shape))
    good = tokens.advantage > 0
    weight = ratio.clamp(max=1.0).masked_fill(good, 1.0)
    return TokenLoss(-weight * tokens.advantage * tokens.logprob, ~good & (ratio > 1))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class VESPO(Loss):
    """-sg(φ)·A·logprob with φ = w^k·exp(λ·(1 - w)), w = exp(Σ_t(logprob - old)) the ratio of the whole trajectory (VESPO, arXiv
    2602.10693; TRL's `get_gamma_weights`): 1 on policy, and smoothly to 0 for large and for small w."""

    name: ClassVar[str] = "vespo"
    reach: ClassVar[Reach] = "sequence"
    kernel_power: Penalty = 2.0
    """k for advantages ≥ 0: how fast the weight falls as the trajectory becomes less probable."""
    kernel_rate: Penalty = 3.0
    """λ for advantages ≥ 0: how fast it falls as the trajectory becomes more probable."""
    kernel_power_negative: Penalty = 3.0
    """k for negative advantages."""
    kernel_rate_negative: Penalty = 2.0
    """λ for negative advantages."""

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        gap = sequence_sum(tokens.logprob.detach() - old, tokens.sequence).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        good = self._kernel(gap, self.kernel_power, self.kernel_rate)
        bad = self._kernel(gap, self.kernel_power_negative, self.kernel_rate_negative)
        return unclipped(-good.where(tokens.advantage >= 0, bad) * tokens.advantage * tokens.logprob)

    @staticmethod
    def _kernel(gap: Float[Tensor, " M"], power: float, rate: float) -> Float[Tensor, " M"]:
        return (power * gap - rate * gap.expm1()).exp()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CrossEntropy(Loss):
    """-weight·logprob with the advantage as the weight: cross-entropy on the sampled tokens, without a ratio.

    It has its own denominator: rollouts of weight zero leave the mask, so that they do not count.
    """

    name: ClassVar[str] = "ce"
    weighs: ClassVar[bool] = False
    holds: ClassVar[bool] = False
    weighs_rollouts: ClassVar[bool] = True

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        return unclipped(-tokens.advantage * tokens.logprob)
