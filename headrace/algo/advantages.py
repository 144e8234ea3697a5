"""Advantages: plain functions of the rewards of one group (G rollouts of one prompt) -> one number per rollout.

A group is normalised by its own members only, however many there are, never by the whole batch (slime #1414). A group
of one, or one whose rewards are all equal, has nothing to compare: its advantages are exactly zero, and the pipeline
drops it as `no_contrast`. (verl and SkyRL give a group of one its raw reward, slime NaN.)
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import fmean, pvariance
from typing import NamedTuple

from headrace.algo.policy.tokens import MAX_LOG_RATIO, RIGHT
from headrace.core.batches import RewardsBefore
from headrace.core.chat.message_images import IMAGES, PLACES
from headrace.core.errors import ConfigError
from headrace.core.rewards import Unusable, number_of, shown
from headrace.core.types import Episode, Scored, Turn
from headrace.settings.user_code import load_function, one_line

EPSILON = 1e-6
ATTEMPTS = 4
"""k of `best_of_k`, if `algo.attempts` is not given."""
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
    attempts: int = ATTEMPTS
    """k of `best_of_k`."""
    before: RewardsBefore = RewardsBefore()
    """The rewards of the same prompt in earlier groups, for `smoothed` alone."""

    def chosen(self, kind: str, keep: int, by: str = "") -> list[int]:
        """Returns the places of the rollouts that are trained, in their order; of equals the first ones.

        max_variance (PODS, arXiv 2504.13818): the `keep` rollouts whose rewards have the largest variance. They are some of the lowest and some of
        the highest, so that `keep` + 1 sets are compared; of equal ones that with the most of the highest. shortest, efficient (GFPO, arXiv
        2508.09726): those with the fewest sampled tokens, or with the most reward for a token. cleanest: see `_cleanest`.
        """
        places = range(len(self.rewards))
        if keep >= len(places):
            return list(places)
        rewards, lengths = self.rewards, self.lengths
        if kind == "max_variance":
            highest = sorted(places, key=lambda place: (-rewards[place], place))
            lowest = sorted(places, key=lambda place: (rewards[place], place))
            sets = [
                [*highest[:high], *[place for place in lowest if place not in highest[:high]][: keep - high]]
                for high in range(keep, -1, -1)
            ]
            spreads = [pvariance([rewards[place] for place in one]) for one in sets]
            most = max(spreads)
            return sorted(
                next(one for one, spread in zip(sets, spreads, strict=True) if spread >= most * (1 - ROUNDING))
            )
        if kind == "cleanest":
            return self._cleanest(keep, by)
        if kind == "shortest":
            return sorted(sorted(places, key=lambda place: (lengths[place], place))[:keep])
        return sorted(sorted(places, key=lambda place: (-rewards[place] / max(1, lengths[place]), place))[:keep])

    def _cleanest(self, keep: int, by: str) -> list[int]:
        """Resampling on correct (GRPO-RoC of rStar2-Agent, arXiv 2508.20722; microsoft/rStar, `resample_of_correct`): as many right rollouts (of a reward
        above 0) and wrong ones as their shares of the group give, at least one of either that there is. Of the right ones the cleanest: those with
        the most of the reward `by`, or with the fewest sampled tokens. Of the wrong ones any, so that what can go wrong stays diverse.

        Choice: no draw, so that a step can be replayed. The first of the wrong ones, which stand in no order; the cleanest right ones, as in the authors'
        code (the paper draws them, clean ones more often). Raises ConfigError if no reward is called `by`.
        """
        if by and by not in self.named:
            raise ConfigError(
                f"algo.subset.by = {by} is the name of no reward; there are {', '.join(self.named)}. Use one of them, or remove algo.subset.by"
            )
        right = [place for place, reward in enumerate(self.rewards) if reward > RIGHT]
        wrong = [place for place, reward in enumerate(self.rewards) if not reward > RIGHT]
        count = round(len(right) * keep / len(self.rewards))
        if right and wrong:
            count = min(max(count, 1, keep - len(wrong)), keep - 1, len(right))
        dirt = [math.inf if math.isnan(value) else -value for value in self.named[by]] if by else self.lengths
        return sorted([*sorted(right, key=lambda place: (dirt[place], place))[:count], *wrong[: keep - count]])

    def of(self, places: Sequence[int]) -> GroupRewards:
        """Returns the input for these rollouts alone."""
        return GroupRewards(
            tuple(self.rewards[place] for place in places),
            tuple(self.lengths[place] for place in places) if self.lengths else (),
            {name: tuple(values[place] for place in places) for name, values in self.named.items()},
            self.weights,
            self.attempts,
        )


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


def best_of_k(group: GroupRewards) -> list[float]:
    """Pass@k training (arXiv 2508.10751; RUCAIBox/Passk_Training, `calc_adv`): all sets of k rollouts of the group are scored by their best reward,
    these scores are z-scored, and a rollout gets the mean over the sets that it is in. With rewards of 0 and 1 this is the paper's closed form; here
    any rewards are counted, as in PKPO (arXiv 2505.15201). Once every k contain a best rollout, nothing is left to learn: zeros.

    Choice: deviation over all sets (ddof=0), +1e-6, as in the authors' code. k is at most G - 1: one set has nothing to be compared with.
    """
    rewards, count = sorted(group.rewards), len(group.rewards)
    k = min(group.attempts, count - 1)
    if k < 1 or _alike(rewards[k - 1], rewards[-1]):  # the least and the largest best reward of k
        return [0.0] * count
    # The chance that a rollout is the best of a set: the others of the set lie before it.
    chance = [math.comb(place, k - 1) / math.comb(count, k) for place in range(count)]
    mean = sum(share * reward for share, reward in zip(chance, rewards, strict=True))
    std = sum(share * (reward - mean) ** 2 for share, reward in zip(chance, rewards, strict=True)) ** 0.5
    return [(_best_beside(rewards, own, k) - mean) / (std + EPSILON) for own in group.rewards]


def _best_beside(rewards: list[float], own: float, k: int) -> float:
    """Mean of the best reward over the sets of k that contain a rollout with the reward `own`. `rewards`: those of the group, ascending."""
    if k == 1:
        return own
    others = rewards.copy()
    others.remove(own)
    sets = math.comb(len(others), k - 1)
    return sum(math.comb(place, k - 2) / sets * max(own, other) for place, other in enumerate(others))


def smoothed(group: GroupRewards) -> list[float]:
    """DCPO's smooth advantage standardisation (arXiv 2509.02333; lime-RL/DCPO, `compute_dcpo_outcome_advantage`): the rewards standardised in their own
    group (A_new), and by mean and deviation of all rewards of the prompt so far, these included (A_total). With i groups of the prompt so far, the advantage is
    ((i - 1)·A_new + A_total)/i or (A_new + (i - 1)·A_total)/i, whichever is smaller. So a group without contrast is trained if earlier ones of its prompt had
    some, and one with lopsided rewards moves less.

    Choice: deviations as in the authors' code (`RewardsBefore`), groups weighted by their rollouts; +1e-6.
    """
    rewards, all_ = group.rewards, group.before.after(group.rewards) if len(group.rewards) > 1 else None
    if all_ is None:
        return [0.0] * len(rewards)
    new, deviation, i = z_scores(rewards), math.sqrt(all_.variance), all_.groups
    flat = _alike(all_.mean, all_.mean + deviation)
    total = [0.0 if flat else (reward - all_.mean) / (deviation + EPSILON) for reward in rewards]
    return [
        min(((i - 1) * own + among) / i, (own + (i - 1) * among) / i, key=abs)
        for own, among in zip(new, total, strict=True)
    ]


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
        for i, reward in enumerate(rewards)
        for j, other in enumerate(rewards)
        if reward > other and not _alike(reward, other)
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
    """Whether `training_rows.Algorithm` turns it into a return for every token."""
    critic: bool = False
    """Whether rows have the rewards of tokens in its place, of which the trainer makes advantages by a value function (`algo/critic.py`)."""
    implicit: bool = False
    """Whether rows have the rewards of tokens in its place, of which the trainer makes advantages by a reward model that it trains (`algo/implicit.py`)."""
    remembers: bool = False
    """Whether it uses the rewards of the same prompt in earlier groups."""
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
    "best_of_k": Advantage(best_of_k),
    "group_baseline": Advantage(centred, whitened=True),  # REINFORCE++ with baseline, arXiv 2501.03262
    "smoothed": Advantage(smoothed, remembers=True),
    "raw": Advantage(raw, compares=False),
    "return_to_go": Advantage(raw, compares=False, whitened=True, spread=True),  # REINFORCE++, the same paper
    "gae": Advantage(raw, compares=False, critic=True),  # arXiv 1506.02438
    "implicit": Advantage(raw, compares=False, implicit=True),  # PRIME, arXiv 2502.01456
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
    function = load_function(spec, f"algo.advantage = {spec}", arguments=1)

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


# --- Credit within a rollout and across a batch
# Returns, advantages of tokens and turns, whitening. Plain floats, no torch.


WHITENING_EPSILON = 1e-8


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


def rewards_of_turns(rollout: Scored, penalty: float = 0.0) -> list[float]:
    """Returns each turn's reward; the last turn's includes what the rollout got at its end, less the penalty."""
    given = [sum(rewards.values()) for rewards in rollout.turn_rewards] or [0.0] * len(rollout.episode.turns)
    return [*given[:-1], given[-1] + rollout.reward - sum(given) - penalty]


def turn_returns(rewards: Sequence[Sequence[float]], gamma: float = 1.0, lam: float = 1.0) -> list[list[float]]:
    """Returns λ-returns per rollout and turn, from the rewards of its turns: g_i = r_i + γ·((1 - λ)·V_{i+1} + λ·g_{i+1}).

    V_i is the mean of the group's returns (those of λ = 1) at turn i, own return included: g_i - V_i is then GAE (arXiv 1506.02438) with that mean as
    the value. With γ = λ = 1, it is the sum of the rewards from the turn on; a reward at the end alone gives every turn the same return.
    """
    plain = [_backwards(of_turns, gamma) for of_turns in rewards]
    if lam == 1:
        return plain
    longest = max(map(len, plain), default=0)
    values = [fmean(of_turns[i] for of_turns in plain if i < len(of_turns)) for i in range(longest)]
    found = []
    for of_turns in rewards:
        returns, following = [0.0] * len(of_turns), 0.0
        for i in reversed(range(len(of_turns))):
            value = values[i + 1] if i + 1 < len(of_turns) else 0.0
            returns[i] = following = of_turns[i] + gamma * ((1 - lam) * value + lam * following)
        found.append(returns)
    return found


def _backwards(rewards: Sequence[float], gamma: float) -> list[float]:
    return return_to_go(rewards, (True,) * len(rewards), gamma)


def segment_returns(rollout: Scored, penalty: float = 0.0) -> list[float]:
    """Returns each step's return: what the process reward gives it and the steps after it (`Scored.segments`), and all other rewards,
    which the rollout got at its end. `penalty`: taken off the end."""
    returns = [value for turn in rollout.segments for _, _, value in turn]
    end = rollout.reward - returns[0] - penalty
    return [end + value for value in returns]


def agent_advantages(
    returns: Sequence[Mapping[str, float]], compare: Callable[[tuple[float, ...]], list[float]]
) -> list[dict[str, float]]:
    """Returns advantages per rollout and agent: each agent is compared with the agents of the same name in the other rollouts.

    `compare`: an advantage function of numbers. An agent that had a turn in no other rollout is compared with nothing."""
    advantages: list[dict[str, float]] = [{} for _ in returns]
    for name in dict.fromkeys(name for returned in returns for name in returned):
        there = [i for i, agents in enumerate(returns) if name in agents]
        compared = compare(tuple(returns[i][name] for i in there))
        for i, advantage in zip(there, compared, strict=True):
            advantages[i][name] = advantage
    return advantages


def agent_returns(rollout: Scored, penalties: Sequence[float]) -> dict[str, float]:
    """Returns each agent's return: the rewards of its own turns, and what the rollout got at its end, which all agents share.

    `penalties`: one per turn, taken off the return of the turn's agent."""
    given = [sum(rewards.values()) for rewards in rollout.turn_rewards] or [0.0] * len(rollout.episode.turns)
    returns = {turn.agent: rollout.reward - sum(given) for turn in rollout.episode.turns}
    for turn, value, penalty in zip(rollout.episode.turns, given, penalties, strict=True):
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
    scale = 1 / (var + WHITENING_EPSILON) ** 0.5
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


STATE_WEIGHT = 1.0
"""The weight of advantages among turns in one state, if `algo.state_weight` is not given."""


def state_advantages(
    returns: Sequence[Sequence[float]],
    states: Sequence[Sequence[Hashable]],
    compare: Callable[[tuple[float, ...]], list[float]],
) -> list[list[float]]:
    """Returns advantages per rollout and turn: each turn is compared with all turns of the group that began in the same state, of its own rollout too (GiGPO,
    arXiv 2505.10978, eq. 6 and 7).

    `compare`: an advantage function of numbers. A turn in a state in which no other began is compared with nothing."""
    places: defaultdict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for rollout, of_turns in enumerate(states):
        for turn, state in enumerate(of_turns):
            places[state].append((rollout, turn))
    advantages = [[0.0] * len(of_turns) for of_turns in returns]
    for there in places.values():
        compared = compare(tuple(returns[rollout][turn] for rollout, turn in there))
        for (rollout, turn), advantage in zip(there, compared, strict=True):
            advantages[rollout][turn] = advantage
    return advantages


def states_of(episode: Episode) -> list[Hashable]:
    """Returns the state of the environment in which each turn began, as something to be compared within a group: the name that the environment gave it, or
    else what the agent was told before the turn, behind the conversation so far."""
    return [(turn.agent, turn.state or _observation(turn)) for turn in episode.turns]


def _observation(turn: Turn) -> Hashable:
    """The texts of its new messages, without ids of tool calls, which differ where nothing else does. The tokens before a turn that is no chat."""
    if not turn.messages:
        return turn.context
    keys = ("role", "name", "content", PLACES, IMAGES)
    texts = [[str(message.get(key, "")) for key in keys] for message in turn.messages]
    return tuple(map(tuple, texts))


def met_again(episodes: Sequence[Episode]) -> tuple[int, int]:
    """Returns the number of turns of a group behind the first of their rollout, and of those of them that began in a state in which another turn began."""
    states = [states_of(episode) for episode in episodes]
    counts = Counter(state for of_turns in states for state in of_turns)
    later = [state for of_turns in states for state in of_turns[1:]]
    return len(later), sum(counts[state] > 1 for state in later)
