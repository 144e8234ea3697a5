"""Advantages of tokens from a value function (GAE, arXiv 1506.02438), and what the value function learns from: over all tokens of an optimizer
step at once, in float64. Imports no torch.

The chain is a trajectory: all tokens of one agent in one rollout that are in the loss, in the order of its turns, in whatever rows they lie. What
lies between them (tool results, the next question, tokens that are masked) is passed over: no discount, no value. A trajectory
ends with its last token, also where a limit cut it off: nothing is bootstrapped there, since the limit belongs to the task and the rollout has been
given its reward.

Values are those of the weights that the step is about to change, for all of its updates. There is no bound on the change of a value from its
old one (verl's `cliprange_value`): in "What Matters In On-Policy Reinforcement Learning?" (arXiv 2006.05990) it hurt whatever the bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace.algo.advantages import WHITENING_EPSILON
from headrace.algo.recipe_parts import Critic
from headrace.core.reports import CriticNumbers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


ROUNDING = 1e-6
"""The share of their absolute sum by which rewards of float32 may miss 0."""


class Discounts(NamedTuple):
    gamma: float
    """The discount by each sampled token."""
    lam: float
    """λ of the policy's advantages, unless it depends on the length."""
    critic: Critic


class StepTokens(NamedTuple):
    """The M loss tokens of an optimizer step, in any order in which those of a turn follow each other."""

    value: Floats
    """[M] V of the tokens before this one, under the weights that the step starts with."""
    reward: Floats
    """[M]"""
    trajectory: Ints
    """[M]"""
    turn: Ints
    """[M] the order within the trajectory"""


class Judged(NamedTuple):
    advantage: Floats
    """[M] whitened over the step"""
    target: Floats
    """[M] the return that V is drawn to"""
    succeeded: NDArray[np.bool_]
    """[M] the rewards of the token's trajectory sum to more than 0"""
    numbers: CriticNumbers


def above_zero(reward: Floats, starts: Ints) -> NDArray[np.bool_]:
    """[S] whether the rewards of each trajectory sum to more than 0, beyond what rounding them to float32 leaves of parts that cancel. Trajectories lie one
    behind another; `starts` [S]: the place of the first token of each."""
    above: NDArray[np.bool_] = np.add.reduceat(reward, starts) > ROUNDING * np.add.reduceat(abs(reward), starts)
    return above


def judge(tokens: StepTokens, discounts: Discounts) -> Judged:
    """Returns advantages and targets of the tokens, in their order.

    Choice: advantages are whitened over the loss tokens of the whole step, as in verl and TRL; targets are not. λ of the targets is
    `critic.lam`, else that of the advantages, as in PPO (arXiv 1707.06347); VAPO (arXiv 2504.05118) decouples them, and makes λ of the
    advantages 1 - 1/(α·l) for trajectories of l tokens.
    """
    order = np.lexsort((tokens.turn, tokens.trajectory))  # stable: the tokens of a turn keep their order
    value, reward, trajectory = tokens.value[order], tokens.reward[order], tokens.trajectory[order]
    starts = np.flatnonzero(np.diff(trajectory, prepend=-1))
    lengths = np.diff(starts, append=len(trajectory))
    lam = _lam_of(lengths, discounts)
    advantage = gae(reward, value, lengths, discounts.gamma, lam)
    of_critic = discounts.critic.lam
    target = value + (
        advantage
        if of_critic is None
        else gae(reward, value, lengths, discounts.gamma, np.full(len(lengths), of_critic))
    )
    returns = value + gae(reward, value, lengths, discounts.gamma, np.ones(len(lengths)))
    succeeded = np.repeat(above_zero(reward, starts), lengths) if len(reward) else np.zeros(0, bool)
    numbers = _numbers(value, target, returns, advantage)
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return Judged(_whitened(advantage)[back], target[back], succeeded[back], numbers)


def gae(reward: Floats, value: Floats, lengths: Ints, gamma: float, lam: Floats) -> Floats:
    """[M] Σ_l (γλ)^l δ_{t+l} with δ_t = r_t + γ·V_{t+1} - V_t, and V = 0 behind the last token. Trajectories lie one behind another, each of
    `lengths` tokens, with its λ."""
    found = np.zeros(len(value))
    longest = np.argsort(-lengths, kind="stable")
    ends, lam, left = lengths.cumsum()[longest], lam[longest], -lengths[longest]
    trace, following = np.zeros(len(lengths)), np.zeros(len(lengths))
    for back in range(int(lengths.max(initial=0))):
        count = int(np.searchsorted(left, -back))  # trajectories of more tokens than that
        places = ends[:count] - 1 - back
        delta = reward[places] + gamma * following[:count] - value[places]
        trace[:count] = delta + gamma * lam[:count] * trace[:count]
        found[places], following[:count] = trace[:count], value[places]
    return found


def _lam_of(lengths: Ints, discounts: Discounts) -> Floats:
    """[S] λ of each trajectory."""
    if not discounts.critic.length_rate:
        return np.full(len(lengths), discounts.lam)
    return np.maximum(1 - 1 / (discounts.critic.length_rate * lengths), 0.0)


def _whitened(values: Floats) -> Floats:
    if len(values) < 2:
        return values - values.mean() if len(values) else values
    whitened: Floats = (values - values.mean()) / np.sqrt(values.var(ddof=1) + WHITENING_EPSILON)
    return whitened


def _numbers(value: Floats, target: Floats, returns: Floats, advantage: Floats) -> CriticNumbers:
    if not len(value):
        return CriticNumbers(0.0, 0.0, 0.0, 0.0, 0.0)
    spread = float(returns.var())
    return CriticNumbers(
        value_loss=float(((value - target) ** 2).mean() / 2),
        value_mean=float(value.mean()),
        return_mean=float(returns.mean()),
        explained_variance=1 - float((returns - value).var()) / spread if spread > WHITENING_EPSILON else 0.0,
        advantage_std=float(advantage.std()),
    )
