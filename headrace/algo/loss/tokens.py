"""What every loss sees and gives. Shapes: M loss tokens of a microbatch, S sequences, k teacher tokens a position."""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.algo.recipes import MAX_LOG_RATIO, MIN_REST


class TopTokens(NamedTuple):
    """For top-k distillation: the teacher's k most probable tokens of each position."""

    student: Tensor
    """[M, k] their log-probs under the weights being trained, with gradient."""
    teacher: Tensor
    """[M, k] the teacher's; -inf pads, and a row of nothing else has no teacher."""


class Tokens(NamedTuple):
    """The loss tokens of a microbatch. Those of one sequence follow each other, and sequences are whole."""

    logprob: Tensor
    """[M] log π of the weights being trained, with gradient."""
    sampled: Tensor
    """[M] the sampler's, finite: what is not was taken out of numerator and denominator when the step was packed."""
    advantage: Tensor
    """[M]"""
    sequence: Tensor
    """[M] int64: 0..S-1, ascending."""
    lag: Tensor
    """[M] float32: optimizer steps between the sampler's weights and those being trained."""
    reference: Tensor | None = None
    """[M] the reference model's log-prob."""
    teacher: Tensor | None = None
    """[M] the teacher's log-prob of the sampled token; NaN where there is none."""
    top: TopTokens | None = None
    """Nothing where no teacher has seen any of these tokens."""
    keep: Tensor | None = None
    """[M] bool: what the step's selection chose (`objective.selection_of`)."""


class TokenLoss(NamedTuple):
    loss: Tensor
    """[M]"""
    clipped: Tensor
    """[M] bool: the ratio was outside what the loss lets through."""
    masked: dict[str, Tensor] = {}
    """Name of a rule -> [M] bool: tokens whose policy loss it took out."""

    @property
    def rejected(self) -> Tensor:
        """[M] bool: taken out by any rule."""
        return reduce(torch.logical_or, self.masked.values(), torch.zeros_like(self.clipped))


def ratio_of(logprob: Tensor, old: Tensor) -> Tensor:
    """[M] r = exp(clamp(logprob - old, ±20))."""
    return torch.exp(torch.clamp(logprob - old, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def log_ratio(logprob: Tensor, old: Tensor) -> Tensor:
    """[M] logprob - old, its value within ±20, its gradient that of the difference everywhere.

    For what pulls two policies together: a token beyond the bound needs the pull most. (`ratio_of` has no gradient there.)
    """
    return _Bounded.apply(logprob - old)


class _Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gap: Tensor) -> Tensor:
        return torch.clamp(gap, -MAX_LOG_RATIO, MAX_LOG_RATIO)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def binary_kl(of: Tensor, to: Tensor) -> Tensor:
    """[M] KL of "this token" against "any other", from two log-probs of it. Probabilities of 1 are kept a hair below it."""
    of, to = _inside(of), _inside(to)
    rest_of, rest_to = torch.log(-torch.expm1(of)), torch.log(-torch.expm1(to))
    return of.exp() * (of - to) + rest_of.exp() * (rest_of - rest_to)


def _inside(logprob: Tensor) -> Tensor:
    return torch.clamp(logprob, max=-MIN_REST)


def k3(logprob: Tensor, old: Tensor) -> Tensor:
    """[M] unbiased, non-negative estimate of KL(old || current) on tokens of `old` (Schulman 2020): r - log r - 1."""
    log_ratio = torch.clamp(logprob - old, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def sequence_sum(values: Tensor, sequence: Tensor) -> Tensor:
    """[M] at every token, the sum over its sequence. Carries gradients.

    Not `index_add`, whose sum on CUDA differs from call to call: a step has to be replayed bit for bit (C8).
    """
    lengths = torch.bincount(sequence)
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)[sequence] if len(values) else values


def sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """[M] at every token, the mean over the loss tokens of its sequence. Carries gradients."""
    return sequence_sum(values, sequence) / sequence_sum(torch.ones_like(values), sequence)
