"""Losses of preferences: functions of two rollouts of one prompt, of which the first is preferred. Imports no torch at the top.

A pair's loss depends on the log-likelihoods of both of its rollouts, and they may lie in different microbatches. So the trainer first has the
log-likelihoods of the whole step, takes the derivative of the step's loss by each of them, and gives it to the tokens of that rollout
(`trainer/step/gradient.py`): the gradient of the microbatches is then exactly that of the pairs, however the step is split.

h is the margin, in nats: (lc - rc) - (lr - rr), with l the log-likelihood of the chosen (c) or rejected (r) rollout under the weights being
trained, and r the reference's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from headrace.algo.policy.loss import Loss
from headrace.algo.policy.tokens import TokenLoss, Tokens, unclipped
from headrace.settings.strict import STRICT

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

PairBeta = Annotated[float, Field(gt=0)]
PairMargin = Annotated[float, Field(ge=0)]


class Side(NamedTuple):
    """The chosen, or the rejected, rollouts of K pairs."""

    logprob: Float[Tensor, " K"]
    """[K] Σ log π over the sampled tokens."""
    reference: Float[Tensor, " K"] | None
    """[K] the same under the reference; None for a loss without one."""
    tokens: Float[Tensor, " K"]
    """[K] how many they are."""

    @property
    def gain(self) -> Float[Tensor, " K"]:
        """[K] log π - log π_ref"""
        assert self.reference is not None, "the trainer scores the reference where AlgoConfig.reference_in_loss"
        return self.logprob - self.reference


class PairLoss(Loss):
    """A loss of preferred and rejected rollouts. It needs no importance weight: which rollout is better does not depend on who sampled it."""

    pairs: ClassVar[bool] = True
    anchored: ClassVar[bool] = False

    def of_pairs(self, chosen: Side, rejected: Side) -> Float[Tensor, " K"]:
        """[K] the loss of each pair, float64."""
        raise NotImplementedError

    def margin(self, chosen: Side, rejected: Side) -> Float[Tensor, " K"]:
        """[K] what the loss widens: positive where the policy agrees with the preference."""
        return chosen.gain - rejected.gain

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        """Gives each token its share of the pairs' loss, and the derivative of that loss: -advantage (`gradient.py`)."""
        assert tokens.share is not None, "filled in for a loss of pairs"
        return unclipped(tokens.share - tokens.advantage * (tokens.logprob - tokens.logprob.detach()))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DPO(PairLoss):
    """-log σ(β·h): the preferred rollout gains more on the reference than the rejected one (DPO, arXiv 2305.18290, eq. 7)."""

    name: ClassVar[str] = "dpo"
    needs_reference: ClassVar[bool] = True
    pair_beta: PairBeta = 0.1
    """β: how soon a margin is enough, and so how near the policy stays to the reference."""

    def of_pairs(self, chosen: Side, rejected: Side) -> Float[Tensor, " K"]:
        from torch.nn.functional import softplus

        return softplus(-self.pair_beta * self.margin(chosen, rejected))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class IdentityPreference(PairLoss):
    """(h - 1/(2β))²: the margin has a target, so that a preference that is certain does not drive it for ever (IPO, arXiv 2310.12036, eq. 17).

    Choice: h is a sum over tokens, as in the paper; TRL's `loss_type = "ipo"` takes means over tokens.
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
    """β: how soon a margin is enough. 2 to 10 is usual, since it multiplies a mean over tokens."""
    pair_margin: PairMargin = 1.0
    """γ: the margin that is asked for; a third to a half of β is usual."""

    def of_pairs(self, chosen: Side, rejected: Side) -> Float[Tensor, " K"]:
        from torch.nn.functional import softplus

        return softplus(self.pair_margin - self.pair_beta * self.margin(chosen, rejected))

    def margin(self, chosen: Side, rejected: Side) -> Float[Tensor, " K"]:
        return chosen.logprob / chosen.tokens - rejected.logprob / rejected.tokens
