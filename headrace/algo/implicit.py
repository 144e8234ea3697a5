"""Implicit process rewards (PRIME, arXiv 2502.01456): what a reward model φ learns from the rollouts of a step, and the advantages that follow from it, over all tokens of
the step at once, in float64. Imports no torch.

    q_t = log π_φ(t) - log π_ref(t)        of each token in the loss, both models without sampling filters, at temperature 1
    loss of φ                              mean over trajectories of the cross-entropy between σ(β·Σ q) and right or wrong
    process reward of a token              β·q_t; the last token of a trajectory has none

Rewards of tokens, summed over a trajectory, are its outcome: above 0, by more than rounding leaves, it is right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace.algo.advantages import WHITENING_EPSILON
from headrace.algo.critic import above_zero
from headrace.core.reports import ProcessNumbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


class StepOutcomes(NamedTuple):
    """The M loss tokens of an optimizer step, in any order in which those of a turn follow each other."""

    reward: Floats
    """[M]"""
    trajectory: Ints
    """[M]"""
    turn: Ints
    """[M] the order within the trajectory"""
    firsts: Sequence[int]
    """The first trajectory of each group."""


class Taught(NamedTuple):
    slope: Floats
    """[M] the derivative of φ's loss by its log-prob of the token."""
    loss: float
    accuracy: float
    """Share of the trajectories whose probability is on the right side of a half; one at it counts as a half."""


class _Chains(NamedTuple):
    """The tokens in the order of trajectories and turns."""

    order: Ints
    starts: Ints
    """[S] the place of the first token of each trajectory."""
    lengths: Ints
    number: Ints
    """[M] the place of the trajectory of each token."""
    outcome: Floats
    """[S]"""


def taught(q: Floats, tokens: StepOutcomes, beta: float) -> Taught:
    """Returns what φ learns from the step."""
    chains = _chains(tokens)
    score = beta * np.add.reduceat(q[chains.order], chains.starts)
    right = above_zero(tokens.reward[chains.order], chains.starts)
    count = len(score)
    probability = (1 + np.tanh(score / 2)) / 2  # σ, which overflows nowhere
    losses = np.logaddexp(0.0, np.where(right, -score, score))
    slope = np.empty(len(q))
    slope[chains.order] = (beta / count * (probability - right))[chains.number]
    agreed = np.where(score == 0, 0.5, (score > 0) == right)
    return Taught(slope, float(losses.mean()), float(agreed.mean()))


def credited(q: Floats, tokens: StepOutcomes, beta: float) -> Floats:
    """[M] advantages: what follows a token of both kinds of reward, each less its mean over the other trajectories of the group, whitened over the step.

    Choice: as in verl's `recipe/prime`, a trajectory's process reward is the mean over its tokens in that baseline, the outcome counts at the last token, and both weigh
    the same. A trajectory alone in its group has no baseline, and advantages of 0.
    """
    chains = _chains(tokens)
    process = beta * q[chains.order]
    process[chains.starts + chains.lengths - 1] = 0.0
    means = np.add.reduceat(process, chains.starts) / chains.lengths
    names = tokens.trajectory[chains.order][chains.starts]
    group = np.searchsorted(np.asarray(tokens.firsts), names, "right") - 1
    members = np.bincount(group)[group]
    others = np.maximum(members - 1, 1)
    reward = (process * (members / others)[chains.number]) - (np.bincount(group, means)[group] / others)[chains.number]
    total = np.bincount(group, chains.outcome)[group]
    outcome = chains.outcome - (total - chains.outcome) / others
    reward[chains.starts + chains.lengths - 1] += outcome
    reward[(members == 1)[chains.number]] = 0.0
    following = np.concatenate(
        [part[::-1].cumsum()[::-1] for part in np.split(reward, chains.starts[1:])]
    )  # of each trajectory by itself: a difference of sums over the step would round
    found = np.empty(len(q))
    found[chains.order] = _whitened(following)
    return found


def numbers_of(taught: Taught, q: Floats, beta: float) -> ProcessNumbers:
    """`q`: after the update of φ, of which the rewards of the step are made."""
    return ProcessNumbers(
        process_loss=taught.loss, process_accuracy=taught.accuracy, process_reward=float(beta * q.mean())
    )


def _chains(tokens: StepOutcomes) -> _Chains:
    order = np.lexsort((tokens.turn, tokens.trajectory))  # stable: the tokens of a turn keep their order
    starts = np.flatnonzero(np.diff(tokens.trajectory[order], prepend=-1))
    lengths = np.diff(starts, append=len(order))
    number = np.repeat(np.arange(len(starts)), lengths)
    return _Chains(order, starts, lengths, number, np.add.reduceat(tokens.reward[order], starts))


def _whitened(values: Floats) -> Floats:
    spread = values.var(ddof=1) if len(values) > 1 else 0.0
    whitened: Floats = (values - values.mean()) / np.sqrt(spread + WHITENING_EPSILON)
    return whitened
