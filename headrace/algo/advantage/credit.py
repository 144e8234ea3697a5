"""Credit within a rollout and across a batch: returns, advantages of tokens and turns, whitening. Plain floats, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from headrace.algo.policy.tokens import MAX_LOG_RATIO
from headrace.core.types import Scored

EPSILON = 1e-8


def return_to_go(rewards: Sequence[float], mask: Sequence[bool], gamma: float = 1.0) -> list[float]:
    """[T] Σ of the rewards from a token on, discounted per *sampled* token (REINFORCE++, arXiv 2501.03262).

    Tokens that were not sampled (tool results) pass the running return on to the tokens before them, because an action
    before a tool call caused its consequences. SkyRL resets there, as verl did until August 2026.
    """
    returns, running = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        running = rewards[t] + (gamma * running if mask[t] else running)
        returns[t] = running
    return returns


def gae(
    rewards: Sequence[float], values: Sequence[float], mask: Sequence[bool], gamma: float = 1.0, lam: float = 0.95
) -> list[float]:
    """[T] Σ_l (γλ)^l δ_{t+l}, δ_t = r_t + γ·V_{t+1} - V_t (GAE, arXiv 1506.02438); zero for tokens that were not
    sampled.

    Tokens that were not sampled are skipped: the next value and the trace are carried across them. Needs a critic's
    values.
    """
    advantages, trace, following, pending = [0.0] * len(rewards), 0.0, 0.0, 0.0
    for t in reversed(range(len(rewards))):
        if not mask[t]:
            pending += rewards[t]  # belongs to the last action before it
            continue
        delta = rewards[t] + pending + gamma * following - values[t]
        trace = delta + gamma * lam * trace
        advantages[t], following, pending = trace, values[t], 0.0
    return advantages


def turn_advantages(
    returns: Sequence[Sequence[float]], compare: Callable[[tuple[float, ...]], list[float]]
) -> list[list[float]]:
    """Returns advantages per rollout and turn: each turn is compared with the turns of the same index in the other rollouts.

    `compare`: an advantage function of numbers. Rollouts may have different numbers of turns: a turn that no other rollout reached is
    compared with nothing.
    """
    advantages: list[list[float]] = [[] for _ in returns]
    for index in range(max(map(len, returns), default=0)):
        there = [i for i, turns in enumerate(returns) if index < len(turns)]
        compared = compare(tuple(returns[i][index] for i in there))
        for i, advantage in zip(there, compared, strict=True):
            advantages[i].append(advantage)
    return advantages


def turn_returns(one: Scored, penalty: float = 0.0) -> list[float]:
    """Returns each turn's return, undiscounted: its rewards, those of later turns, and what the rollout got at its end.

    `penalty`: taken off the end. A reward at the end alone gives every turn the same return, which is that of the rollout."""
    given = [sum(rewards.values()) for rewards in one.turn_rewards] or [0.0] * len(one.episode.turns)
    end = one.reward - sum(given) - penalty
    return [end + sum(given[number:]) for number in range(len(given))]


def segment_returns(one: Scored, penalty: float = 0.0) -> list[float]:
    """Returns each step's return: what the process reward gives it and the steps after it (`Scored.segments`), and all other rewards,
    which the rollout got at its end. `penalty`: taken off the end."""
    returns = [value for turn in one.segments for _, _, value in turn]
    end = one.reward - returns[0] - penalty
    return [end + value for value in returns]


def agent_advantages(
    returns: Sequence[Mapping[str, float]], compare: Callable[[tuple[float, ...]], list[float]]
) -> list[dict[str, float]]:
    """Returns advantages per rollout and agent: each agent is compared with the agents of the same name in the other rollouts.

    `compare`: an advantage function of numbers. An agent that had a turn in no other rollout is compared with nothing."""
    advantages: list[dict[str, float]] = [{} for _ in returns]
    for name in dict.fromkeys(name for one in returns for name in one):
        there = [i for i, agents in enumerate(returns) if name in agents]
        compared = compare(tuple(returns[i][name] for i in there))
        for i, advantage in zip(there, compared, strict=True):
            advantages[i][name] = advantage
    return advantages


def agent_returns(one: Scored, penalties: Sequence[float]) -> dict[str, float]:
    """Returns each agent's return: the rewards of its own turns, and what the rollout got at its end, which all agents share.

    `penalties`: one per turn, taken off the return of the turn's agent."""
    given = [sum(rewards.values()) for rewards in one.turn_rewards] or [0.0] * len(one.episode.turns)
    returns = {turn.agent: one.reward - sum(given) for turn in one.episode.turns}
    for turn, value, penalty in zip(one.episode.turns, given, penalties, strict=True):
        returns[turn.agent] += value - penalty
    return returns


def rae(rewards: Sequence[float], baseline: float = 0.0, decay: float = 0.95) -> tuple[list[float], float]:
    """(advantages, baseline after them) of one agent in self-play, in the order of its games (SPIRAL, arXiv
    2506.24119).

    A = R - b first, *then* b <- decay·b + (1 - decay)·R: a baseline that already contains R would cancel a part of it.
    """
    advantages = []
    for reward in rewards:
        advantages.append(reward - baseline)
        baseline = decay * baseline + (1 - decay) * reward
    return advantages, baseline


def whiten(rows: Sequence[Sequence[float]], valid: Sequence[Sequence[bool]]) -> list[list[float]]:
    """(x - mean) / sqrt(var + 1e-8) over the valid tokens of all rows; variance unbiased; other tokens get zero."""
    kept = [x for row, ok in zip(rows, valid, strict=True) for x, v in zip(row, ok, strict=True) if v]
    mean = sum(kept) / max(len(kept), 1)
    var = sum((x - mean) ** 2 for x in kept) / max(len(kept) - 1, 1)
    scale = 1 / (var + EPSILON) ** 0.5
    return [
        [(x - mean) * scale if v else 0.0 for x, v in zip(row, ok, strict=True)]
        for row, ok in zip(rows, valid, strict=True)
    ]


def kl_penalty(sampled: float, reference: float) -> float:
    """KL(sampler || reference) on one sampled token, for the reward: k1, the log ratio, within ±20. 0 if not finite.

    There is no other estimator, because a reward passes on its value and not its gradient: the values of k2 and k3 push
    the policy away from the reference (descent on them ends with one token of probability 1, wherever it starts).
    """
    if not (math.isfinite(sampled) and math.isfinite(reference)):
        return 0.0
    return min(max(sampled - reference, -MAX_LOG_RATIO), MAX_LOG_RATIO)
