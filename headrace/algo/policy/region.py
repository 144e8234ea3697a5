"""Losses with a trust region on probabilities: a token that left it loses its policy gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic.dataclasses import dataclass

from headrace.algo.policy.constants import Cap, Delta, Penalty
from headrace.algo.policy.loss import Loss
from headrace.algo.policy.tokens import TokenLoss, Tokens, binary_kl, log_ratio, ratio_of
from headrace.settings.strict import STRICT

if TYPE_CHECKING:
    from torch import Tensor


class Region(Loss):
    cuts: ClassVar[tuple[str, ...]] = ("delta",)
    needs_gap: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DPPOTV(Region):
    """-keep·A·sg(min(r, cap))·logprob (DPPO, arXiv 2602.04879): a token is masked if its *probability* moved by more
    than δ in the direction in which its advantage pushes. A bound on the ratio would mask rare tokens for negligible
    moves."""

    name: ClassVar[str] = "dppo_tv"
    delta: Delta = 0.2
    """The largest change of a token's probability."""
    cap: Cap = 20.0
    """The largest importance weight."""

    def __call__(self, tokens: Tokens, old: Tensor) -> TokenLoss:
        return _inside(tokens, old, _moved_too_far(tokens, old, self.delta), self.cap)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DPPOKL(Region):
    """Like `dppo_tv`, but a token is masked if the binary KL(old ‖ current) is above δ and its probability moved in the
    direction in which its advantage pushes (DPPO-Binary-KL, arXiv 2602.04879; verl's loss of this name)."""

    name: ClassVar[str] = "dppo_kl"
    delta: Delta = 0.05
    """The largest binary KL of a token, in nats."""
    cap: Cap = 20.0
    """The largest importance weight."""

    def __call__(self, tokens: Tokens, old: Tensor) -> TokenLoss:
        now = tokens.logprob.detach()
        pushed = (now > old).where(tokens.advantage > 0, now < old)
        return _inside(tokens, old, pushed & (binary_kl(old, now) > self.delta), self.cap)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DPPOTVQuadratic(Region):
    """-keep·A·r + penalty·(log r)², an earlier default of prime-rl: `keep` as in `dppo_tv`; r has its gradient and no cap.

    Runs of headrace before 2026-11-22 call it dppo_kl (`algo/earlier.py`), which is another algorithm in the paper.
    """

    name: ClassVar[str] = "dppo_tv_quadratic"
    delta: Delta = 0.2
    """The largest change of a token's probability."""
    penalty: Penalty = 1e-3
    """The factor of the squared log ratio."""

    def __call__(self, tokens: Tokens, old: Tensor) -> TokenLoss:
        return _masked(tokens, old, _moved_too_far(tokens, old, self.delta), self.penalty)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class IPO(Region):
    """Like `dppo_tv_quadratic`, but a token is masked if its probability moved by more than δ in *either* direction
    (prime-rl).

    Choice: δ = 0.3 and no penalty, as in prime-rl today; its first values were 0.1 and 1e-3. Its cap of 1e4 on r is
    e^20 here.
    """

    name: ClassVar[str] = "ipo"
    delta: Delta = 0.3
    """The largest change of a token's probability."""
    penalty: Penalty = 0.0
    """The factor of the squared log ratio."""

    def __call__(self, tokens: Tokens, old: Tensor) -> TokenLoss:
        left = (tokens.logprob.detach().exp() - old.exp()).abs() > self.delta
        return _masked(tokens, old, left, self.penalty)


def _moved_too_far(tokens: Tokens, old: Tensor, delta: float) -> Tensor:
    moved = tokens.logprob.detach().exp() - old.exp()
    return (moved > delta).where(tokens.advantage > 0, moved < -delta)


def _inside(tokens: Tokens, old: Tensor, left: Tensor, cap: float) -> TokenLoss:
    weight = ratio_of(tokens.logprob, old).detach().clamp(max=cap)
    return TokenLoss(-weight * tokens.advantage * tokens.logprob * ~left, left)


def _masked(tokens: Tokens, old: Tensor, left: Tensor, penalty: float) -> TokenLoss:
    policy = (ratio_of(tokens.logprob, old) * tokens.advantage).masked_fill(left, 0.0)
    return TokenLoss(penalty * log_ratio(tokens.logprob, old) ** 2 - policy, left)
