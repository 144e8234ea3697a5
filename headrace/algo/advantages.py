"""Advantages: plain functions of the rewards of one group (G rollouts of one prompt) -> one number per rollout.

A group is normalised by its own members only, however many of them there are: never by the whole batch (slime #1414).
A group of one, or one whose rewards are all equal, teaches nothing relative: its advantages are zero, exactly, and the
pipeline names it `no_contrast`. (verl and SkyRL give such a group its raw reward, slime NaN.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

AdvantageFunction = Callable[[Sequence[float]], list[float]]

EPSILON = 1e-6


def has_contrast(rewards: Sequence[float]) -> bool:
    """Whether the rollouts of a group can be told apart by reward."""
    return len(rewards) > 1 and max(rewards) > min(rewards)


def group_norm(rewards: Sequence[float]) -> list[float]:
    """GRPO (DeepSeekMath, arXiv 2402.03300): (R - mean) / (std + 1e-6).

    Choice: std with ddof=1, as TRL and verl have it (TRL's asynchronous trainer: ddof=0 and 1e-8).
    """
    if not has_contrast(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    std = (sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)) ** 0.5
    return [(reward - mean) / (std + EPSILON) for reward in rewards]


def centred(rewards: Sequence[float]) -> list[float]:
    """Dr.GRPO (arXiv 2503.20783): R - mean; dividing by the std would weigh too easy and too hard prompts up."""
    if not has_contrast(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """RLOO (arXiv 2402.14740): R - mean of the others, an unbiased baseline."""
    if not has_contrast(rewards):
        return [0.0] * len(rewards)
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


def raw(rewards: Sequence[float]) -> list[float]:
    """REINFORCE (Williams 1992): the reward itself, without a baseline.

    Choice: no group mean, which would make it RLOO up to a factor; so groups of one can be trained, and the reward has to
    be centred by whoever writes it.
    """
    return list(rewards)


ADVANTAGES: dict[str, AdvantageFunction] = {
    "group_norm": group_norm,
    "centred": centred,
    "leave_one_out": leave_one_out,
    "raw": raw,
}
