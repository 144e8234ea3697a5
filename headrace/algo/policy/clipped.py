"""Losses with bounds on the ratio: a token that its advantage pushes beyond a bound loses its gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from headrace.algo.policy.loss import ClipHigh, ClipLow, Loss, Reach, Tau
from headrace.algo.policy.tokens import MAX_LOG_RATIO, TokenLoss, Tokens, log_ratio, ratio_of, sequence_mean
from headrace.settings.strict import STRICT

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


BEYOND = 1e-12
"""Taken off the square of M2PO's bound, as in the authors' code, so that the token that gives the bound lies beyond it and loses its gradient."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Clipped(Loss):
    """-min(r·A, clip(r, 1 - low, 1 + high)·A) for the ratio r of a subclass."""

    cuts: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")
    clip_low: ClipLow = 0.2
    """A ratio below 1 - clip_low no longer pushes a bad token down."""
    clip_high: ClipHigh = 0.2
    """A ratio above 1 + clip_high no longer pushes a good token up (DAPO: 0.28)."""

    def clipped(self, ratio: Float[Tensor, " M"], advantage: Float[Tensor, " M"]) -> TokenLoss:
        return _clipped(ratio, advantage, 1 - self.clip_low, 1 + self.clip_high)

    def log_bounds(self) -> tuple[float, float] | None:
        return math.log(1 - self.clip_low) if self.clip_low < 1 else -math.inf, math.log1p(self.clip_high)

    def words(self) -> Iterator[str]:
        yield f"ratio within [{1 - self.clip_low:.6g}, {1 + self.clip_high:.6g}]"


def _clipped(ratio: Float[Tensor, " M"], advantage: Float[Tensor, " M"], low: float, high: float) -> TokenLoss:
    loss = -(ratio * advantage).minimum(ratio.clamp(low, high) * advantage)
    return TokenLoss(loss, (ratio > high).where(advantage > 0, (advantage < 0) & (ratio < low)))


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
class CEGPPO(Clipped):
    """-r·A inside the bounds of PPO; -β·sg(bound / r)·r·A for a token that its advantage pushes beyond one, which keeps the gradient that it has at the
    bound, times β (CE-GPPO, arXiv 2509.20712; the authors' `compute_gppo_loss_general_beta`, Kwai-Klear/CE-GPPO). β = 0 for both would be PPO's clip.

    Choice: no dual clip, which the authors' code has at 3.
    """

    name: ClassVar[str] = "ce_gppo"
    cuts: ClassVar[tuple[str, ...]] = ()
    beyond_low: Annotated[float, Field(ge=0)] = 0.75
    """The part of the bound's gradient that a bad token below 1 - clip_low keeps: more of it lowers the entropy."""
    beyond_high: Annotated[float, Field(ge=0)] = 1.0
    """The part of the bound's gradient that a good token above 1 + clip_high keeps: more of it raises the entropy."""

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        ratio, advantage = ratio_of(tokens.logprob, old), tokens.advantage
        beyond = self.clipped(ratio, advantage).clipped
        low, high = self.beyond_low * (1 - self.clip_low), self.beyond_high * (1 + self.clip_high)
        kept = ratio.new_tensor(high).where(advantage > 0, ratio.new_tensor(low)) / ratio.detach()
        return TokenLoss(-kept.where(beyond, kept.new_ones(())) * ratio * advantage, beyond)

    def log_bounds(self) -> None:
        return None

    def words(self) -> Iterator[str]:
        yield from super().words()
        yield f"beyond it {self.beyond_low:.6g} and {self.beyond_high:.6g} of the gradient at the bound"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class M2PO(Clipped):
    """-min(r·A, clip(r, e^-b, e^b)·A) with one b for the whole step, the largest |log r| of a harmful token at which the mean of min((log r)², b²)
    over the harmful tokens stays below τ (M2PO, arXiv 2510.01161; the authors' `compute_m2po_policy_loss`, Infini-AI-Lab/M2PO). A token is
    harmful if its advantage pushes it further from the sampler: A > 0 and r > 1, or A < 0 and r < 1.

    Choice: clip as in the authors' code, where the paper's Algorithm 1 masks; the gradient is the same but for the code's
    bounds, which are never tighter than [1 - low, 1 + high]. Authors: per minibatch; here: over the optimizer step.
    """

    name: ClassVar[str] = "m2po"
    reach: ClassVar[Reach] = "step"
    tau: Tau = 0.04
    """The second moment of the log ratio, over harmful tokens, that the bound keeps to."""
    clip_low: ClipLow = 0.3
    """The lower bound of the ratio is 1 - clip_low or lower."""
    clip_high: ClipHigh = 0.5
    """The upper bound of the ratio is 1 + clip_high or higher."""

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        bound = self._bound((tokens.logprob - old).detach(), tokens.advantage)
        low, high = min(math.exp(-bound), 1 - self.clip_low), max(math.exp(bound), 1 + self.clip_high)
        return _clipped(ratio_of(tokens.logprob, old), tokens.advantage, low, high)

    def _bound(self, gap: Float[Tensor, " M"], advantage: Float[Tensor, " M"]) -> float:
        """b; far above any log ratio if nothing has to be bounded."""
        harmful = ((advantage > 0) & (gap > 0)) | ((advantage < 0) & (gap < 0))
        squares = (gap[harmful] ** 2).sort().values
        if not len(squares) or float(squares.mean()) <= self.tau:
            return 2 * MAX_LOG_RATIO
        larger = len(squares) - 1 - squares.new_ones(squares.shape).cumsum(0) + 1
        capped = (squares.cumsum(0) + larger * squares) / len(squares)  # the mean if all were bounded by this one
        first = int((capped < self.tau).sum())  # it ascends
        return max(float(squares[first - 1]) - BEYOND, 0.0) ** 0.5 if first else 0.0

    def words(self) -> Iterator[str]:
        yield f"tau = {self.tau:.6g}"
        yield f"ratio bounds no tighter than [{1 - self.clip_low:.6g}, {1 + self.clip_high:.6g}]"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GSPO(Clipped):
    """PPO's clip on the sequence's s = exp(mean_t(logprob - old)), gradient through the mean (GSPO, arXiv 2507.18071, eq. 5).

    Choice: the paper's form; verl and SkyRL compute `gspo_token`. Bounds: docs/algorithms.md, Bounds and rounding.
    """

    name: ClassVar[str] = "gspo"
    of_sequence: ClassVar[bool] = True
    reach: ClassVar[Reach] = "sequence"
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
    reach: ClassVar[Reach] = "sequence"
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
    reach: ClassVar[Reach] = "sequence"
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
