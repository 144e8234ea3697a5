"""Advantages: plain functions of the rewards of one group (G rollouts of one prompt) -> one number per rollout.

A group is normalised by its own members only, however many there are, never by the whole batch (slime #1414). A group
of one, or one whose rewards are all equal, has nothing to compare: its advantages are exactly zero, and the pipeline
drops it as `no_contrast`. (verl and SkyRL give such a group its raw reward, slime NaN.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from headrace.algo.user_functions import load_function
from headrace.core.errors import ConfigError
from headrace.core.rewards import Unusable, number_of, shown
from headrace.settings.user_code import one_line

EPSILON = 1e-6
ROUNDING = 1e-9
"""Rewards that differ by less than this share are equal: sums of floats in another order differ as much."""


class GroupRewards(NamedTuple):
    """The input of an advantage function."""

    rewards: tuple[float, ...]
    """[G]"""
    lengths: tuple[int, ...] = ()
    """[G] sampled tokens."""
    named: Mapping[str, tuple[float, ...]] = {}
    """Each reward by the name of its function, [G], unweighted. NaN where the function does not apply."""
    weights: Mapping[str, float] = {}
    """Weights of the named rewards; 1 if missing."""


Pair = tuple[int, int]
"""The places of two rollouts in their group: the chosen and the rejected one."""
AdvantageFunction = Callable[[GroupRewards], list[float]]


def has_contrast(rewards: Sequence[float]) -> bool:
    """Whether rewards of a group differ by more than rounding: 0.1 + 0.2 and 0.3 are one reward."""
    return len(rewards) > 1 and not _alike(min(rewards), max(rewards))


def _alike(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=ROUNDING, abs_tol=ROUNDING * 1e-3)


def z_scores(rewards: Sequence[float]) -> list[float]:
    """(R - mean) / (std + 1e-6); zeros without contrast.

    Choice: std with ddof=1, as TRL and verl have it (TRL's asynchronous trainer: ddof=0 and 1e-8).
    """
    if not has_contrast(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    std = (sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)) ** 0.5
    return [(reward - mean) / (std + EPSILON) for reward in rewards]


def group_norm(group: GroupRewards) -> list[float]:
    """GRPO (DeepSeekMath, arXiv 2402.03300): `z_scores` of the rewards."""
    return z_scores(group.rewards)


def centred(group: GroupRewards) -> list[float]:
    """Dr.GRPO (arXiv 2503.20783): R - mean. Dividing by the std would give more weight to prompts that are too easy or
    too hard."""
    return _minus(group.rewards, fmean(group.rewards)) if has_contrast(group.rewards) else [0.0] * len(group.rewards)


def _minus(rewards: Sequence[float], baseline: float) -> list[float]:
    return [reward - baseline for reward in rewards]


def leave_one_out(group: GroupRewards) -> list[float]:
    """RLOO (arXiv 2402.14740): R - mean of the others, an unbiased baseline."""
    rewards = group.rewards
    if not has_contrast(rewards):
        return [0.0] * len(rewards)
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


def maxrl(group: GroupRewards) -> list[float]:
    """MaxRL (arXiv 2602.02710): (R - mean) / mean, zeros where the mean is not positive: rare successes weigh most.

    Choice: no advantage is larger than G - 1, that of one success among G, which rewards without a sign cannot exceed. With rewards
    of both signs the mean comes near zero while the rewards do not, and would divide by nothing.
    """
    rewards = group.rewards
    if not has_contrast(rewards) or (mean := fmean(rewards)) <= ROUNDING * max(map(abs, rewards)):
        return [0.0] * len(rewards)
    largest = max(abs(reward - mean) for reward in rewards)
    return [(reward - mean) / max(mean, largest / (len(rewards) - 1)) for reward in rewards]


def opo(group: GroupRewards) -> list[float]:
    """OPO (arXiv 2505.23585): R - Σ(length·R)/Σlength, the baseline of least variance where long completions vary more."""
    rewards, total = group.rewards, sum(group.lengths)
    if not has_contrast(rewards) or not total:
        return [0.0] * len(rewards)
    return _minus(rewards, sum(n * r for n, r in zip(group.lengths, rewards, strict=True)) / total)


def gdpo(group: GroupRewards) -> list[float]:
    """GDPO (arXiv 2601.05242): each reward z-scored in its group, then their weighted sum; whitened over the batch
    later.

    If the rewards were summed first, one of small spread would be lost beside one of large spread.
    """
    named = group.named or {"": group.rewards}
    columns = [[group.weights.get(name, 1.0) * z for z in _where_known(rewards)] for name, rewards in named.items()]
    return [sum(values) for values in zip(*columns, strict=True)]


def _where_known(rewards: Sequence[float]) -> list[float]:
    """Z-scores among the rollouts that have this reward; 0 for the others."""
    known = iter(z_scores([reward for reward in rewards if not math.isnan(reward)]))
    return [0.0 if math.isnan(reward) else next(known) for reward in rewards]


def pass_at_k(group: GroupRewards) -> list[float]:
    """Best of k (arXiv 2503.19595): max of all - max of the others, so that only the best rollout gets r_max -
    r_second."""
    rewards = group.rewards
    if not has_contrast(rewards):
        return [0.0] * len(rewards)
    second, best = sorted(rewards)[-2:]
    first = rewards.index(best)
    gain = 0.0 if _alike(best, second) else best - second
    return [gain if i == first else 0.0 for i in range(len(rewards))]


def raw(group: GroupRewards) -> list[float]:
    """REINFORCE (Williams 1992): the reward itself, without a baseline.

    Choice: no group mean, which would make it RLOO up to a factor. So groups of one can be trained, and the author of
    the reward has to centre it.
    """
    return list(group.rewards)


def zero(group: GroupRewards) -> list[float]:
    """No advantage from rewards: the policy learns from a teacher alone."""
    return [0.0] * len(group.rewards)


def every_pair(group: GroupRewards) -> list[float]:
    """The number of other rollouts that a rollout is preferred to, less the number of those that are preferred to it: each of the two has
    the higher reward. What is trained are these pairs (`preferences`)."""
    return _balance(len(group.rewards), preferences(group))


def best_against_worst(group: GroupRewards) -> list[float]:
    """1 for the rollout with the highest reward of the group, -1 for that with the lowest (the first of equal ones), 0 for the others. What is
    trained is this pair (`extremes`)."""
    return _balance(len(group.rewards), extremes(group))


def preferences(group: GroupRewards) -> list[Pair]:
    """Returns every pair of rollouts whose rewards differ, the preferred one first."""
    rewards = group.rewards
    return [
        (i, j)
        for i, one in enumerate(rewards)
        for j, other in enumerate(rewards)
        if one > other and not _alike(one, other)
    ]


def extremes(group: GroupRewards) -> list[Pair]:
    """Returns the pair of the best and the worst rollout; nothing without contrast."""
    rewards = group.rewards
    if not has_contrast(rewards):
        return []
    return [(rewards.index(max(rewards)), rewards.index(min(rewards)))]


def _balance(count: int, pairs: Sequence[Pair]) -> list[float]:
    balance = [0.0] * count
    for chosen, rejected in pairs:
        balance[chosen] += 1
        balance[rejected] -= 1
    return balance


class Advantage(NamedTuple):
    """An advantage function, and the properties of it that other stages use."""

    function: AdvantageFunction
    compares: bool = True
    """Whether it compares the rollouts of a group, so that a group without contrast gives zeros."""
    reads_sum: bool = True
    """Whether it uses the sum of the rewards, so that a penalty on the sum has an effect."""
    whitened: bool = False
    """Whether it is whitened over the valid tokens of the whole batch."""
    spread: bool = False
    """Whether `groups.Algorithm` turns it into a return for every token."""
    pairs: Callable[[GroupRewards], list[Pair]] | None = None
    """The pairs of rollouts, chosen and rejected, that a loss of preferences compares; None for numbers alone."""


ADVANTAGES: dict[str, Advantage] = {
    "group_norm": Advantage(group_norm),
    "centred": Advantage(centred),
    "leave_one_out": Advantage(leave_one_out),
    "maxrl": Advantage(maxrl),
    "opo": Advantage(opo),
    "gdpo": Advantage(gdpo, reads_sum=False, whitened=True),
    "pass@k": Advantage(pass_at_k),
    "group_baseline": Advantage(centred, whitened=True),  # REINFORCE++ with baseline, arXiv 2501.03262
    "raw": Advantage(raw, compares=False),
    "return_to_go": Advantage(raw, compares=False, whitened=True, spread=True),  # REINFORCE++, the same paper
    "every_pair": Advantage(every_pair, pairs=preferences),
    "best_against_worst": Advantage(best_against_worst, pairs=extremes),
    "zero": Advantage(zero, compares=False, reads_sum=False),
}


PER_TURN = ("group_norm", "centred", "leave_one_out", "maxrl", "group_baseline", "raw")
"""Advantages that compare numbers alone, so that returns of turns serve as well as rewards of rollouts."""


def advantage_of(name: str) -> Advantage:
    """Returns a row of the table, or the user's function of the form `file.py:name`. Raises ConfigError if that cannot
    be loaded."""
    return ADVANTAGES[name] if name in ADVANTAGES else Advantage(user_advantage(name), compares=False)


def penalised(
    rewards: Sequence[float],
    lengths: Sequence[float],
    weight: float,
    max_length: int,
    *,
    mean: float | None = None,
) -> tuple[float, ...]:
    """Subtracts max(mean(R), 0)·weight·length/max_length from every reward, before the advantage is centred. `mean`: that of the whole
    group, where the rewards are those of branches of one rollout.

    Through the mean the penalty acts on prompts that are mostly solved, and does not push towards short wrong answers
    on the others. Choice: a negative mean counts as 0, since it would reward length.
    """
    assert max_length > 0, "rollout.max_tokens"
    mean = max(fmean(rewards) if mean is None else mean, 0.0)
    return tuple(r - mean * weight * n / max_length for r, n in zip(rewards, lengths, strict=True))


def user_advantage(spec: str) -> AdvantageFunction:
    """Loads the user's function GroupRewards -> [G] numbers. Raises ConfigError if it cannot be loaded, raises, or
    returns a wrong result."""
    function = load_function(spec, "advantage")

    def advantage(group: GroupRewards) -> list[float]:
        try:
            result = function(group)
        except Exception as error:
            raise ConfigError(
                f"algo.advantage = {spec} raised {one_line(error)} for the rewards {shown(group.rewards, 200)}"
            ) from error
        return _checked(spec, result, len(group.rewards))

    return advantage


def _checked(spec: str, result: object, count: int) -> list[float]:
    try:
        numbers = [number_of(value) for value in result]  # type: ignore[attr-defined]
    except TypeError:
        numbers = []
    values = [value for value in numbers if isinstance(value, float)]
    if len(values) != count or len(numbers) != count:
        bad = next((f": one {number.said}" for number in numbers if isinstance(number, Unusable)), "")
        raise ConfigError(
            f"algo.advantage = {spec} returned {shown(result, 200)} for a group of {count}{bad}; return one finite number per rollout, "
            "in the order of group.rewards"
        )
    return values
