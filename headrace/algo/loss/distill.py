"""Distillation: the student samples, a teacher scores. Shapes: M loss tokens, k teacher tokens a position.

On-policy distillation (GKD, arXiv 2306.13649; Thinking Machines, "On-policy distillation", 2025).
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.algo.policy.tokens import Tokens, TopTokens
from headrace.algo.recipe_parts import Distill

TINY = 1e-12
"""Least probability of the tail, -27.6 as a logarithm: k tokens may hold all of the probability, up to rounding."""


def teacher_advantage(tokens: Tokens) -> Tensor:
    """[M] sg(teacher - logprob), zero without a teacher: the policy gradient of the reverse KL on the sampled token."""
    assert tokens.teacher is not None, "a row without a teacher has NaN, not nothing"
    gap = tokens.teacher - tokens.logprob.detach()
    return torch.where(torch.isfinite(gap), gap, 0.0)


def top_divergence(top: TopTokens, distill: Distill) -> Tensor:
    """[M] over the teacher's k tokens and one bucket for all others, log(1 - Σp); zero without a teacher.

    forward KL(T || S), reverse KL(S || T), or jsd: β·KL(T || M) + (1 - β)·KL(S || M) with M = β·T + (1 - β)·S (GKD, eq. 1).
    No importance weight: the divergence of a position does not depend on which token was sampled there.
    """
    there = torch.isfinite(top.teacher)
    teacher, student = _with_tail(top.teacher, there), _with_tail(top.student, there)
    counted = torch.cat([there, torch.ones_like(there[:, :1])], dim=1)
    match distill.kind:
        case "forward":
            value = _kl(teacher, student, counted)
        case "reverse":
            value = _kl(student, teacher, counted)
        case _:
            value = _jsd(teacher, student, counted, distill.beta)
    return torch.where(there.any(dim=1), value, 0.0)


def _with_tail(logprob: Tensor, there: Tensor) -> Tensor:
    """[M, k + 1]: padding is set to 0 and left out of the sums, so that no -inf is multiplied by a zero."""
    total = torch.where(there, logprob.double(), -torch.inf).exp().sum(dim=1, keepdim=True)
    tail = torch.log1p(-torch.clamp(total, max=1 - TINY))  # in float32, 1 - total has no digits left below 1e-6
    return torch.cat([torch.where(there, logprob, 0.0), tail.to(logprob.dtype)], dim=1)


def _kl(of: Tensor, to: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, of.exp() * (of - to), 0.0).sum(dim=1)


def _jsd(teacher: Tensor, student: Tensor, counted: Tensor, beta: float) -> Tensor:
    mixture = torch.log(beta * teacher.exp() + (1 - beta) * student.exp())
    return beta * _kl(teacher, mixture, counted) + (1 - beta) * _kl(student, mixture, counted)
