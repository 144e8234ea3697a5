"""Losses that hold the policy near the one that sampled: by a trust region on probabilities, whose leaving takes a token's gradient, or
softly, by a gate or a penalty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic.dataclasses import dataclass

from headrace.algo.policy.loss import Cap, Delta, Loss, Penalty, Tau
from headrace.algo.policy.tokens import TokenLoss, Tokens, binary_kl, log_ratio, ratio_of, unclipped
from headrace.settings.strict import STRICT

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


# --- Losses with a trust region on probabilities
# A token that left it loses its policy gradient.


class Region(Loss):
    cuts: ClassVar[tuple[str, ...]] = ("delta",)
    needs_gap: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DPPOTV(Region):
    """-keep·A·sg(min(r, cap))·logprob (DPPO, arXiv 2602.04879): a token is masked if its *probability* moved by more than δ in the
    direction in which its advantage pushes."""

    name: ClassVar[str] = "dppo_tv"
    delta: Delta = 0.2
    """The largest change of a token's probability."""
    cap: Cap = 20.0
    """The largest importance weight."""

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        return _inside(tokens, old, _moved_too_far(tokens, old, self.delta), self.cap)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DPPOKL(Region):
    """Like `dppo_tv`, but masked if the binary KL(old ‖ current) is above δ and the probability moved as its advantage pushes
    (DPPO-Binary-KL, arXiv 2602.04879; verl's loss of this name)."""

    name: ClassVar[str] = "dppo_kl"
    delta: Delta = 0.05
    """The largest binary KL of a token, in nats."""
    cap: Cap = 20.0
    """The largest importance weight."""

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        now = tokens.logprob.detach()
        pushed = (now > old).where(tokens.advantage > 0, now < old)
        return _inside(tokens, old, pushed & (binary_kl(old, now) > self.delta), self.cap)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DPPOTVQuadratic(Region):
    """-keep·A·r + penalty·(log r)², an earlier default of prime-rl: `keep` as in `dppo_tv`; r has its gradient and no cap."""

    name: ClassVar[str] = "dppo_tv_quadratic"
    delta: Delta = 0.2
    """The largest change of a token's probability."""
    penalty: Penalty = 1e-3
    """The factor of the squared log ratio."""

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        return _masked(tokens, old, _moved_too_far(tokens, old, self.delta), self.penalty)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class IPO(Region):
    """Like `dppo_tv_quadratic`, but masked if the probability moved by more than δ in *either* direction (prime-rl).

    Choice: δ = 0.3 and no penalty, as in prime-rl today. Its cap of 1e4 on r is e^20 here.
    """

    name: ClassVar[str] = "ipo"
    delta: Delta = 0.3
    """The largest change of a token's probability."""
    penalty: Penalty = 0.0
    """The factor of the squared log ratio."""

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        left = (tokens.logprob.detach().exp() - old.exp()).abs() > self.delta
        return _masked(tokens, old, left, self.penalty)


def _moved_too_far(tokens: Tokens, old: Float[Tensor, " M"], delta: float) -> Bool[Tensor, " M"]:
    moved = tokens.logprob.detach().exp() - old.exp()
    return (moved > delta).where(tokens.advantage > 0, moved < -delta)


def _inside(tokens: Tokens, old: Float[Tensor, " M"], left: Bool[Tensor, " M"], cap: float) -> TokenLoss:
    weight = ratio_of(tokens.logprob, old).detach().clamp(max=cap)
    return TokenLoss(-weight * tokens.advantage * tokens.logprob * ~left, left)


def _masked(tokens: Tokens, old: Float[Tensor, " M"], left: Bool[Tensor, " M"], penalty: float) -> TokenLoss:
    policy = (ratio_of(tokens.logprob, old) * tokens.advantage).masked_fill(left, 0.0)
    return TokenLoss(penalty * log_ratio(tokens.logprob, old) ** 2 - policy, left)


# --- Losses without a hard bound
# A gate, or a penalty that pulls towards the policy that sampled.


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SAPO(Loss):
    """-(4/τ)·σ(τ·(r - 1))·A, a soft gate instead of a clip (SAPO, arXiv 2511.20347); τ differs for A > 0 and the rest."""

    name: ClassVar[str] = "sapo"
    tau: Tau = 1.0
    """The temperature of the gate for good tokens."""
    tau_negative: Tau = 1.05
    """The temperature of the gate for bad tokens."""

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        ratio = ratio_of(tokens.logprob, old)
        tau = ratio.new_full(ratio.shape, self.tau_negative).masked_fill(tokens.advantage > 0, self.tau)
        return unclipped(-4 / tau * (tau * (ratio - 1)).sigmoid() * tokens.advantage)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Kimi(Loss):
    """-A·logprob + (τ/2)·(logprob - old)², without an importance weight (Kimi k1.5, arXiv 2501.12599).

    Choice: the square is per token, as in ROLL and prime-rl; the paper's is per sequence.
    """

    name: ClassVar[str] = "kimi"
    weighs: ClassVar[bool] = False
    needs_gap: ClassVar[bool] = True
    tau: Tau = 0.1
    """The strength of the pull towards the sampler."""

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        pull = self.tau / 2 * log_ratio(tokens.logprob, old) ** 2
        return unclipped(pull - tokens.advantage * tokens.logprob)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class KLCov(Loss):
    """-r·A, plus penalty·|logprob - old| on the tokens that the step's selection marked (KL-Cov, arXiv 2505.22617)."""

    name: ClassVar[str] = "kl_cov"
    needs_gap: ClassVar[bool] = True
    selection: ClassVar[str] = "kl_cov"
    penalty: Penalty = 1.0
    """The factor of the absolute log ratio of the chosen tokens."""

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        assert tokens.keep is not None, "filled in from objective.kept_by"
        drift = log_ratio(tokens.logprob, old).abs()
        return unclipped(-ratio_of(tokens.logprob, old) * tokens.advantage + self.penalty * drift * ~tokens.keep)
