"""The input and output of every loss. Shapes: M loss tokens of a microbatch, S sequences, k teacher tokens per
position.

The settings name the losses, and settings are read without torch, so torch is imported only inside the functions that
call it by name.
"""

from __future__ import annotations

import operator
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""A ratio beyond exp(±20) is a sign of an error; the clamp keeps it finite."""
RIGHT = 1e-9
"""A rollout is right if its reward is above this. Parts that cancel, such as 0.1 + 0.2 - 0.3, leave less."""
MIN_REST = 1e-6
"""Log-probs are at most minus this, so that a binary divergence can divide by the probability of "any other token"."""


class TopTokens(NamedTuple):
    """The teacher's k most probable tokens of each position, for top-k distillation."""

    student: Float[Tensor, "M k"]
    """[M, k] their log-probs under the weights being trained, with gradient."""
    teacher: Float[Tensor, "M k"]
    """[M, k] the teacher's. -inf is padding, and a row of nothing else has no teacher."""


class Tokens(NamedTuple):
    """The loss tokens of a microbatch; or those of the whole optimizer step, in float64, where the loss of a token depends on tokens of
    other microbatches. Sequences are whole.

    A sequence is a trajectory: all tokens that one agent sampled in one rollout, in whatever rows they lie."""

    logprob: Float[Tensor, " M"]
    """[M] log π of the weights being trained, with gradient."""
    sampled: Float[Tensor, " M"]
    """[M] the sampler's, finite: tokens with others left numerator and denominator when the step was packed."""
    advantage: Float[Tensor, " M"]
    """[M]"""
    sequence: Int[Tensor, " M"]
    """[M] int64: 0..S-1. The tokens of a sequence that has several rows may lie anywhere among those of others."""
    lag: Float[Tensor, " M"]
    """[M] float32: optimizer steps between the sampler's weights and those being trained."""
    reference: Float[Tensor, " M"] | None = None
    """[M] the reference model's log-prob."""
    teacher: Float[Tensor, " M"] | None = None
    """[M] the teacher's log-prob of the sampled token; NaN where there is none."""
    top: TopTokens | None = None
    """None if no teacher scored any of these tokens."""
    divergence: Float[Tensor, " M"] | None = None
    """[M] divergence of the policy from the teacher that the trainer holds, with gradient; None without one."""
    entropy: Float[Tensor, " M"] | None = None
    """[M] entropy of the policy over the whole vocabulary, in nats, with gradient."""
    before: Float[Tensor, " M"] | None = None
    """[M] log π of the weights that the step began with; None where these are the weights being trained, or the algorithm asks for none."""
    keep: Bool[Tensor, " M"] | None = None
    """[M] bool: the tokens that the step's selection keeps (`objective.kept_by`)."""
    pairs: tuple[Int[Tensor, " K"], Int[Tensor, " K"]] | None = None
    """[K] chosen and [K] rejected sequences, int64; None unless the loss is one of pairs."""


class TokenLoss(NamedTuple):
    """The result of a loss: its values [M], one per token of a `Tokens`, and which tokens it clipped or took out."""

    loss: Float[Tensor, " M"]
    """[M]"""
    clipped: Bool[Tensor, " M"]
    """[M] bool: tokens whose ratio the loss clipped."""
    masked: dict[str, Bool[Tensor, " M"]] = {}
    """Name of a rule -> [M] bool: tokens whose policy loss it took out."""

    @property
    def rejected(self) -> Bool[Tensor, " M"]:
        """[M] bool: tokens that any rule takes out."""
        return reduce(operator.or_, self.masked.values(), self.clipped.new_zeros(self.clipped.shape))


def unclipped(loss: Float[Tensor, " M"]) -> TokenLoss:
    """Makes the result of a loss that has no bound."""
    return TokenLoss(loss, loss.new_zeros(loss.shape).bool())


def ratio_of(logprob: Float[Tensor, " M"], old: Float[Tensor, " M"]) -> Float[Tensor, " M"]:
    """[M] r = exp(clamp(logprob - old, ±20))."""
    return (logprob - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def log_ratio(logprob: Float[Tensor, " M"], old: Float[Tensor, " M"]) -> Float[Tensor, " M"]:
    """[M] logprob - old: its value is bounded to ±20, its gradient is that of the difference everywhere.

    It is meant for penalties that pull two policies together: a token beyond the bound needs the pull most. (`ratio_of`
    has no gradient there.)
    """
    from headrace.algo.policy.bounded import Bounded

    return Bounded.apply(logprob - old, MAX_LOG_RATIO)


def binary_kl(of: Float[Tensor, " M"], to: Float[Tensor, " M"]) -> Float[Tensor, " M"]:
    """[M] KL of "this token" against "any other", from two log-probs of it. Probabilities of 1 are lowered slightly
    (`MIN_REST`)."""
    of, to = _inside(of), _inside(to)
    rest_of, rest_to = (-of.expm1()).log(), (-to.expm1()).log()
    return of.exp() * (of - to) + rest_of.exp() * (rest_of - rest_to)


def _inside(logprob: Float[Tensor, " M"]) -> Float[Tensor, " M"]:
    return logprob.clamp(max=-MIN_REST)


def k3(logprob: Float[Tensor, " M"], old: Float[Tensor, " M"]) -> Float[Tensor, " M"]:
    """[M] unbiased, non-negative estimate of KL(old || current) on tokens of `old` (Schulman 2020): r - log r - 1."""
    log_ratio = (logprob - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


def sequence_sum(values: Float[Tensor, " M"], sequence: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
    """[M] at every token, the sum over its sequence. Carries gradients."""
    from headrace.algo.policy.bounded import SequenceSum

    return SequenceSum.apply(values, sequence) if len(values) else values


def sequence_mean(values: Float[Tensor, " M"], sequence: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
    """[M] at every token, the mean over the loss tokens of its sequence. Carries gradients."""
    return sequence_sum(values, sequence) / sequence_sum(values.new_ones(values.shape), sequence)
