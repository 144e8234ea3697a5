"""Losses without a hard bound: a gate, or a penalty that pulls towards the policy that sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic.dataclasses import dataclass

from headrace.algo.policy.constants import Penalty, Tau
from headrace.algo.policy.loss import Loss
from headrace.algo.policy.tokens import TokenLoss, Tokens, log_ratio, ratio_of, unclipped
from headrace.settings.strict import STRICT

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SAPO(Loss):
    """-(4/τ)·σ(τ·(r - 1))·A, a soft gate instead of a clip (SAPO, arXiv 2511.20347); τ differs for A > 0 and the rest."""

    name: ClassVar[str] = "sapo"
    tau: Tau = 1.0
    """The temperature of the gate for good tokens."""
    tau_negative: Tau = 1.05
    """The temperature of the gate for bad tokens."""

    def __call__(self, tokens: Tokens, old: Tensor) -> TokenLoss:
        ratio = ratio_of(tokens.logprob, old)
        tau = ratio.new_full(ratio.shape, self.tau_negative).masked_fill(tokens.advantage > 0, self.tau)
        return unclipped(-4 / tau * (tau * (ratio - 1)).sigmoid() * tokens.advantage)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Kimi(Loss):
    """-A·logprob + (τ/2)·(logprob - old)² (Kimi k1.5, arXiv 2501.12599): mirror descent without an importance weight.

    Choice: the square is per token, as in ROLL and prime-rl; the paper's is per sequence.
    """

    name: ClassVar[str] = "kimi"
    needs_gap: ClassVar[bool] = True
    tau: Tau = 0.1
    """The strength of the pull towards the sampler."""

    def __call__(self, tokens: Tokens, old: Tensor) -> TokenLoss:
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

    def __call__(self, tokens: Tokens, old: Tensor) -> TokenLoss:
        assert tokens.keep is not None, "filled in from selection_of"
        drift = log_ratio(tokens.logprob, old).abs()
        return unclipped(-ratio_of(tokens.logprob, old) * tokens.advantage + self.penalty * drift * ~tokens.keep)
