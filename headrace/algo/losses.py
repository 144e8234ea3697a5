"""Policy losses: per-token numbers in, per-token numbers out. Shapes: M loss tokens of a microbatch.

`logprob` is log π of the weights being trained (with gradient), `old` the sampler's recorded log-prob.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.algo.config import AlgoConfig

MAX_LOG_RATIO = 20.0
"""A ratio beyond exp(±20) only says that something is broken; the clamp keeps it finite."""

TRUNCATION = 2.0
"""Truncated importance sampling: the cap that OAT, slime, open-instruct, Tunix and verl use."""


class TokenLoss(NamedTuple):
    loss: Tensor
    """[M]"""
    clipped: Tensor
    """[M] bool: the ratio was outside what the loss lets through."""


LossFunction = Callable[[Tensor, Tensor, Tensor], TokenLoss]
"""(logprob [M], old [M], advantage [M]) -> TokenLoss"""


def ratio_of(logprob: Tensor, old: Tensor) -> Tensor:
    """[M] r = exp(clamp(logprob - old, ±20))."""
    return torch.exp(torch.clamp(logprob - old, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def ppo_clip(logprob: Tensor, old: Tensor, advantage: Tensor, low: float, high: float) -> TokenLoss:
    """-min(r·A, clip(r, 1 - low, 1 + high)·A) (PPO, arXiv 1707.06347; two bounds as in DAPO). No dual clip."""
    ratio = ratio_of(logprob, old)
    loss = -torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)
    clipped = torch.where(advantage > 0, ratio > 1 + high, (advantage < 0) & (ratio < 1 - low))
    return TokenLoss(loss, clipped)


def reinforce(logprob: Tensor, old: Tensor, advantage: Tensor, low: float, high: float) -> TokenLoss:
    """-sg(min(r, 2))·A·logprob: on policy the plain -A·logprob, off policy truncated importance sampling."""
    ratio = ratio_of(logprob, old).detach()
    return TokenLoss(-torch.clamp(ratio, max=TRUNCATION) * advantage * logprob, ratio > TRUNCATION)


LOSSES: dict[str, Callable[..., TokenLoss]] = {
    "ppo_clip": ppo_clip,
    "reinforce": reinforce,
}


def loss_of(algo: AlgoConfig) -> LossFunction:
    """The recipe's loss with its clip range filled in."""
    recipe = algo.recipe
    return partial(LOSSES[recipe.loss], low=recipe.clip_low, high=recipe.clip_high)


def k3(logprob: Tensor, old: Tensor) -> Tensor:
    """[M] unbiased, non-negative estimate of KL(sampler || trainer) on the sampler's tokens (Schulman 2020): r - log r - 1."""
    log_ratio = torch.clamp(logprob - old, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio
