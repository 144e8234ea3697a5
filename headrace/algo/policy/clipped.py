"""Losses with bounds on the ratio: a token that its advantage pushes beyond a bound loses its gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from headrace.algo.policy.loss import ClipHigh, ClipLow, Loss
from headrace.algo.policy.tokens import TokenLoss, Tokens, log_ratio, ratio_of, sequence_mean
from headrace.settings.strict import STRICT

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Clipped(Loss):
    """-min(r·A, clip(r, 1 - low, 1 + high)·A) for the ratio r of a subclass."""

    cuts: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")
    clip_low: ClipLow = 0.2
    """A ratio below 1 - clip_low no longer pushes a bad token down."""
    clip_high: ClipHigh = 0.2
    """A ratio above 1 + clip_high no longer pushes a good token up (DAPO: 0.28)."""

    def clipped(self, ratio: Float[Tensor, " M"], advantage: Float[Tensor, " M"]) -> TokenLoss:
        bounded = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -(ratio * advantage).minimum(bounded * advantage)
        above, below = ratio > 1 + self.clip_high, ratio < 1 - self.clip_low
        return TokenLoss(loss, above.where(advantage > 0, (advantage < 0) & below))

    def log_bounds(self) -> tuple[float, float]:
        return math.log(1 - self.clip_low) if self.clip_low < 1 else -math.inf, math.log1p(self.clip_high)

    def words(self) -> Iterator[str]:
        yield f"ratio within [{1 - self.clip_low:.6g}, {1 + self.clip_high:.6g}]"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PPOClip(Clipped):
    """-min(r·A, clip(r, 1 - low, 1 + high)·A) (PPO, arXiv 1707.06347; two bounds as in DAPO, arXiv 2503.14476).

    Choice: no dual clip (arXiv 1912.09729) unless it is set.
    """

    name: ClassVar[str] = "ppo_clip"
    dual_clip: Annotated[float, Field(ge=0)] = 0.0
    """The loss of a bad token is at most its advantage times this, however large the ratio (3 is usual); 0 is off."""

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        ratio, advantage = ratio_of(tokens.logprob, old), tokens.advantage
        loss, clipped, _ = self.clipped(ratio, advantage)
        if self.dual_clip:
            bad = advantage < 0
            loss = loss.minimum(-advantage * self.dual_clip).where(bad, loss)
            clipped = clipped | (bad & (ratio > self.dual_clip))
        return TokenLoss(loss, clipped)

    def problems(self) -> Iterator[str]:
        if 0 < self.dual_clip <= 1:
            yield f"algo.dual_clip = {self.dual_clip} would clip ratios of 1; use more than 1 (3 is usual), or 0 for none"

    def words(self) -> Iterator[str]:
        yield from super().words()
        if self.dual_clip:
            yield f"dual_clip = {self.dual_clip:.6g}"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GSPO(Clipped):
    """PPO's clip on the sequence's s = exp(mean_t(logprob - old)), gradient through the mean (GSPO, arXiv 2507.18071, eq. 5).

    Choice: the paper's form; verl and SkyRL compute `gspo_token`. Bounds: docs/algorithms.md, Bounds and rounding.
    """

    name: ClassVar[str] = "gspo"
    of_sequence: ClassVar[bool] = True
    clip_low: ClipLow = 0.05  # five times what rounding makes of the mean of a sequence
    clip_high: ClipHigh = 0.05

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        mean = sequence_mean(tokens.logprob - old, tokens.sequence)
        return self.clipped(ratio_of(mean, mean.new_zeros(mean.shape)), tokens.advantage)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GSPOToken(Clipped):
    """Has the value of `gspo`, but every token's gradient flows through its own log-prob (GSPO, arXiv 2507.18071, eq. 13)."""

    name: ClassVar[str] = "gspo_token"
    of_sequence: ClassVar[bool] = True
    clip_low: ClipLow = 0.05  # as for `gspo`
    clip_high: ClipHigh = 0.05

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        mean = sequence_mean(tokens.logprob.detach() - old, tokens.sequence)
        ratio = ratio_of(mean + tokens.logprob - tokens.logprob.detach(), mean.new_zeros(mean.shape))
        return self.clipped(ratio, tokens.advantage)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GMPO(Loss):
    """-A·exp(mean_t of the clipped log ratios): the geometric mean over a sequence (GMPO, arXiv 2507.20673).

    Bounds are in log space, exp(-low) to exp(high), and clip in the direction of the token's advantage, as PPO's do.
    """

    name: ClassVar[str] = "gmpo"
    cuts: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")
    clip_low: ClipLow = 0.4
    """A log ratio below -clip_low no longer pushes a bad token down."""
    clip_high: ClipHigh = 0.4
    """A log ratio above clip_high no longer pushes a good token up."""

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        gap, good = log_ratio(tokens.logprob, old), tokens.advantage > 0
        bounded = gap.clamp(max=self.clip_high).where(good, gap.clamp(min=-self.clip_low))
        clipped = (gap > self.clip_high).where(good, gap < -self.clip_low)
        return TokenLoss(-sequence_mean(bounded, tokens.sequence).exp() * tokens.advantage, clipped)

    def log_bounds(self) -> tuple[float, float]:
        return -self.clip_low, self.clip_high

    def words(self) -> Iterator[str]:
        yield f"log ratio within [{-self.clip_low:.6g}, {self.clip_high:.6g}]"
