"""Losses with bounds on the ratio: a token that its advantage pushes beyond a bound loses its gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from headrace.algo.policy.loss import Cap, ClipHigh, ClipLow, Loss, Reach, Tau
from headrace.algo.policy.tokens import MAX_LOG_RATIO, TokenLoss, Tokens, log_ratio, ratio_of, sequence_mean
from headrace.settings.strict import STRICT

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


DualClip = Annotated[float, Field(ge=0)]

BEYOND = 1e-12
"""Taken off the square of M2PO's bound, as in the authors' code, so that the token that gives the bound lies beyond it and loses its gradient."""
STEP = 0.05
"""The step in which BAPO raises its upper bound, as in the paper."""


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


def _clipped(ratio: Float[Tensor, " M"], advantage: Float[Tensor, " M"], low: Any, high: Any) -> TokenLoss:
    """`low` and `high`: numbers, or [M] one for each token."""
    loss = -(ratio * advantage).minimum(ratio.clamp(low, high) * advantage)
    return TokenLoss(loss, (ratio > high).where(advantage > 0, (advantage < 0) & (ratio < low)))


def _dual(found: TokenLoss, ratio: Float[Tensor, " M"], advantage: Float[Tensor, " M"], most: float) -> TokenLoss:
    """The loss of a bad token is at most its advantage times `most` (dual clip, arXiv 1912.09729)."""
    bad = advantage < 0
    loss = found.loss.minimum(-advantage * most).where(bad, found.loss)
    return TokenLoss(loss, found.clipped | (bad & (ratio > most)))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PPOClip(Clipped):
    """-min(r·A, clip(r, 1 - low, 1 + high)·A) (PPO, arXiv 1707.06347; two bounds as in DAPO, arXiv 2503.14476).

    Choice: no dual clip (arXiv 1912.09729) unless it is set.
    """

    name: ClassVar[str] = "ppo_clip"
    dual_clip: DualClip = 0.0
    """The loss of a bad token is at most its advantage times this (3 is usual); 0: off."""

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        ratio, advantage = ratio_of(tokens.logprob, old), tokens.advantage
        found = self.clipped(ratio, advantage)
        return _dual(found, ratio, advantage, self.dual_clip) if self.dual_clip else found

    def problems(self) -> Iterator[str]:
        if 0 < self.dual_clip <= 1:
            yield f"algo.dual_clip = {self.dual_clip} would clip ratios of 1; use more than 1 (3 is usual), or 0 for none"

    def words(self) -> Iterator[str]:
        yield from super().words()
        if self.dual_clip:
            yield f"dual_clip = {self.dual_clip:.6g}"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SRFT(PPOClip):
    """-w·min(r·A, clip(r, 1 - low, 1 + high)·A), where w = good_weight·sg(exp(H)) for a good token and 1 for any other, with H the entropy of the policy at
    the token: what is sampled anyway counts less the surer the policy has become (SRFT, arXiv 2506.19767, eq. 12).

    Choice: a weight for each token, and GRPO's advantages with PPO's clip instead of the paper's rewards of 1 and -1.
    """

    name: ClassVar[str] = "srft"
    good_weight: Annotated[float, Field(gt=0)] = 0.1
    """The factor of exp(H) in the weight of a good token."""

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        assert tokens.entropy is not None, "the trainer fills it in"
        found = super().__call__(tokens, old)
        weight = (self.good_weight * tokens.entropy.detach().exp()).where(
            tokens.advantage > 0, tokens.entropy.new_ones(())
        )
        return found._replace(loss=found.loss * weight)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CEGPPO(Clipped):
    """-r·A inside PPO's bounds; -β·sg(bound / r)·r·A for a token that its advantage pushes beyond one: its gradient at the bound,
    times β (CE-GPPO, arXiv 2509.20712).

    Choice: no dual clip, which the authors' code has at 3.
    """

    name: ClassVar[str] = "ce_gppo"
    cuts: ClassVar[tuple[str, ...]] = ()
    beyond_low: Annotated[float, Field(ge=0)] = 0.75
    """The part of the bound's gradient that bad tokens below 1 - clip_low keep; more lowers the entropy."""
    beyond_high: Annotated[float, Field(ge=0)] = 1.0
    """The part of the bound's gradient that good tokens above 1 + clip_high keep; more raises the entropy."""

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
    """-min(r·A, clip(r, e^-b, e^b)·A) with one b for the whole step, the largest |log r| of a harmful token at which the mean of
    min((log r)², b²) over the harmful tokens stays below τ (M2PO, arXiv 2510.01161). Harmful: the advantage pushes it further from
    the sampler, A > 0 and r > 1, or A < 0 and r < 1.

    Choice: clip as in the authors' code, whose bounds are never tighter than [1 - low, 1 + high], but over the optimizer step
    instead of a minibatch; the paper's Algorithm 1 masks, with the same gradient but for the least bounds.
    """

    name: ClassVar[str] = "m2po"
    reach: ClassVar[Reach] = "step"
    tau: Tau = 0.04
    """The second moment of harmful tokens' log ratios that the bound keeps to."""
    clip_low: ClipLow = 0.3
    """The lower bound is 1 - clip_low or lower."""
    clip_high: ClipHigh = 0.5
    """The upper bound is 1 + clip_high or higher."""

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
class ASPO(Clipped):
    """-keep·sg(w)·A·logprob, w = min(1/r, c) for a good token and min(r, c) for a bad one, `keep` 0 for the tokens that PPO's clip
    stops (ASPO, arXiv 2510.06062). Beyond c, the dual clip, a token keeps its gradient at this weight.

    Choice: one pair of bounds; the authors' code has another for the tokens of largest entropy.
    """

    name: ClassVar[str] = "aspo"
    weighs: ClassVar[bool] = False  # an inverted ratio corrects for nothing
    dual_clip: DualClip = 3.0
    """The largest weight of a token, good or bad."""

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        ratio, advantage = ratio_of(tokens.logprob, old).detach(), tokens.advantage
        stopped = self.clipped(ratio, advantage).clipped
        weight = (1 / ratio).where(advantage > 0, ratio).clamp(max=self.dual_clip)
        return TokenLoss(-weight * advantage * tokens.logprob * ~stopped, stopped)

    def problems(self) -> Iterator[str]:
        if self.dual_clip <= 1:
            yield f"algo.dual_clip = {self.dual_clip} is the largest weight of algo.loss = aspo; use more than 1 (3 is usual)"

    def words(self) -> Iterator[str]:
        yield from super().words()
        yield f"weight at most {self.dual_clip:.6g}, inverted for good tokens"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BAPO(Clipped):
    """-min(r·A, clip(r, low, high)·A) with one pair of bounds for the whole step (BAPO, arXiv 2510.18927): 1 - clip_low and 1 +
    clip_high where good tokens make up a share ρ of Σ|min(r·A, clip(r, low, high)·A)|; where less, `low` is 1 - clip_low_least,
    and `high` rises in steps of 0.05 until they do, or to 1 + clip_high_most.

    Choice: order and sums are those of the authors' code, whose steps of `low` always end at the last value, because a bad token
    beyond `low` counts as much as `low` itself. (The paper raises `high` first, and weighs each token by its probability.)
    Constants are the paper's, the code's ρ is 0.5; no dual clip, which the code has at 3.
    """

    name: ClassVar[str] = "bapo"
    reach: ClassVar[Reach] = "step"
    clip_low: ClipLow = 0.4
    """The lower bound is 1 - clip_low, where good tokens have their share."""
    clip_high: ClipHigh = 0.2
    """The upper bound is 1 + clip_high, where good tokens have their share."""
    clip_low_least: ClipLow = 0.1
    """The lower bound is 1 - clip_low_least where good tokens fall short of their share."""
    clip_high_most: ClipHigh = 2.0
    """The upper bound rises to 1 + clip_high_most at most."""
    good_share: Annotated[float, Field(gt=0, lt=1)] = 0.4
    """ρ: the share of good tokens that is aimed at; the larger, the more is learned from what is right."""

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        ratio = ratio_of(tokens.logprob, old)
        return _clipped(ratio, tokens.advantage, *self._bounds(ratio.detach(), tokens.advantage))

    def _bounds(self, ratio: Float[Tensor, " M"], advantage: Float[Tensor, " M"]) -> tuple[float, float]:
        good, bad = advantage > 0, advantage < 0
        gains, losses = advantage[good], -advantage[bad]

        def short(low: float, high: float) -> bool:
            gained, lost = (ratio[good].clamp(max=high) * gains).sum(), (ratio[bad].clamp(min=low) * losses).sum()
            return bool(gained < self.good_share * (gained + lost))

        low, high = 1 - self.clip_low, 1 + self.clip_high
        if short(low, high):
            low = 1 - self.clip_low_least
        while high < 1 + self.clip_high_most and short(low, high):
            high = min(high + STEP, 1 + self.clip_high_most)
        return low, high

    def problems(self) -> Iterator[str]:
        if self.clip_low_least > self.clip_low or self.clip_high_most < self.clip_high:
            yield (
                f"algo.loss = bapo moves the bounds from clip_low = {self.clip_low:g} to clip_low_least = {self.clip_low_least:g}, and from clip_high = "
                f"{self.clip_high:g} to clip_high_most = {self.clip_high_most:g}; set the first no smaller than the second, and the third no larger than "
                "the fourth"
            )

    def log_bounds(self) -> tuple[float, float]:
        return math.log(1 - self.clip_low_least) if self.clip_low_least < 1 else -math.inf, math.log1p(self.clip_high)

    def words(self) -> Iterator[str]:
        low, high = (1 - self.clip_low, 1 - self.clip_low_least), (1 + self.clip_high, 1 + self.clip_high_most)
        yield f"lower bound of the ratio {low[0]:.6g} or {low[1]:.6g}, upper in [{high[0]:.6g}, {high[1]:.6g}]"
        yield f"good_share = {self.good_share:.6g}"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DCPO(Clipped):
    """-min(r·A, clip(r, low, high)·A) with bounds from a token's old probability q = exp(old), low = ½ + ½√max(1 - 4·clip_low/q, 0)
    and high = ½ + ½√(1 + 4·clip_high/q), and dual clip (DCPO, arXiv 2509.02333): rare tokens may grow far more than by PPO's bounds.

    The paper's other half is `algo.advantage = "smoothed"`.
    """

    name: ClassVar[str] = "dcpo"
    clip_low: ClipLow = 0.16
    """ε of the lower bound."""
    clip_high: ClipHigh = 0.2
    """ε of the upper bound."""
    cap: Cap = 10.0
    """The largest upper bound, and the dual clip."""

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        ratio, advantage = ratio_of(tokens.logprob, old), tokens.advantage
        rarity = (-old).clamp(max=MAX_LOG_RATIO).exp()
        low = 0.5 + 0.5 * (1 - 4 * self.clip_low * rarity).clamp(min=0).sqrt()
        high = (0.5 + 0.5 * (1 + 4 * self.clip_high * rarity).sqrt()).clamp(max=self.cap)
        return _dual(_clipped(ratio, advantage, low, high), ratio, advantage, self.cap)

    def problems(self) -> Iterator[str]:
        if self.cap <= 1:
            yield f"algo.cap = {self.cap} would clip ratios of 1 under algo.loss = dcpo; use more than 1 (10 is usual)"

    def log_bounds(self) -> tuple[float, float]:
        """Returns the bounds of a token of probability 1, the narrowest."""
        high = min(0.5 + 0.5 * math.sqrt(1 + 4 * self.clip_high), self.cap)
        return math.log(0.5 + 0.5 * math.sqrt(max(1 - 4 * self.clip_low, 0))), math.log(high)

    def words(self) -> Iterator[str]:
        low, high = (math.exp(bound) for bound in self.log_bounds())
        yield f"ratio within [{low:.6g}, {high:.6g}] for a token of probability 1, wider for rarer ones, up to {self.cap:.6g}"


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
