"""Makes training rows from a scored group, and a batch from groups. Runs in the controller, without torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from msgspec.structs import replace

from headrace.algo.advantage.credit import (
    agent_advantages,
    agent_returns,
    kl_penalty,
    return_to_go,
    segment_returns,
    turn_advantages,
    turn_returns,
    whiten,
)
from headrace.algo.advantage.training_rows import advantages_of_segments, reference_of, rows_of
from headrace.algo.advantages import Advantage, GroupRewards, Pair, advantage_of, penalised
from headrace.algo.config import AlgoConfig
from headrace.core.batches import Group, Row
from headrace.core.types import Prompt, Scored


def algorithm_of(algo: AlgoConfig, longest: int, weights: Mapping[str, float] | None = None) -> Algorithm:
    """Makes the algorithm. `longest`: the most tokens that can be sampled for a rollout; `weights`: weights of the named
    rewards, 1 if missing.

    Raises ConfigError if the user's advantage function cannot be loaded.
    """
    return Algorithm(algo, advantage_of(algo.recipe.advantage), longest, weights or {})


class Algorithm:
    """The part of the algorithm that the pipeline uses: advantages and rows."""

    def __init__(self, algo: AlgoConfig, advantage: Advantage, longest: int, weights: Mapping[str, float]) -> None:
        self._algo, self._recipe = algo, algo.recipe
        self._advantage, self._longest, self._weights = advantage, longest, weights
        self._weighs = self._recipe.loss.weighs_rollouts
        self._spreads = advantage.spread
        self._kl_in_reward = (
            algo.reference_in_reward
        )  # read for every rollout, and a property that is computed at each access
        self._needs_contrast = algo.compares or self._weighs
        self._needs_teacher = self._recipe.advantage == "zero"
        self.min_rollouts = algo.min_rollouts

    def rows(self, prompt: Prompt, scored: Sequence[Scored]) -> tuple[Row, ...]:
        """Makes one row per root-to-leaf path of every episode; no sampled token counts twice."""
        if self._algo.credit == "segment":
            return tuple(self._rows_of_segments(prompt, scored))
        if self._algo.credit != "rollout" or any(one.branches for one in scored):
            return self._rows_of_turns(prompt, scored)
        if self._advantage.pairs:
            return tuple(self._rows_of_pairs(prompt, scored))
        advantages = self._advantage.function(self._group(scored))
        idle = any(advantages) if self._weighs else False
        rows: list[Row] = []
        for one, advantage in zip(scored, advantages, strict=True):
            for path, row in rows_of(prompt, one, advantage, self._algo.overlong):
                if idle and not advantage:
                    row = replace(row, mask=(False,) * len(row.mask))  # cross-entropy: its own denominator
                rows.append(self._spread(row, one, path, advantage) if self._spreads else row)
        return tuple(rows)

    def pairs(self, scored: Sequence[Scored]) -> tuple[Pair, ...]:
        """The pairs of rollouts, chosen and rejected, as places in `scored`; none unless the loss compares pairs. A rollout that was cut off
        is in none if such rollouts are not trained."""
        if not self._advantage.pairs:
            return ()
        kept = [place for place, one in enumerate(scored) if self._whole(one)]
        found = self._advantage.pairs(self._group([scored[place] for place in kept]))
        return tuple((kept[chosen], kept[rejected]) for chosen, rejected in found)

    def _whole(self, one: Scored) -> bool:
        cut = one.episode.cut or any(turn.completion.stop == "length" for turn in one.episode.turns)
        return self._algo.overlong == "train" or not cut

    def _rows_of_pairs(self, prompt: Prompt, scored: Sequence[Scored]) -> Iterator[Row]:
        """Yields rows whose advantage is the balance of the rollout's pairs; rollouts in no pair are in no loss."""
        pairs = self.pairs(scored)
        balance = Counter(chosen for chosen, _ in pairs)
        balance.subtract(rejected for _, rejected in pairs)
        for place, one in enumerate(scored):
            for _, row in rows_of(prompt, one, float(balance[place]), self._algo.overlong):
                yield replace(row, mask=(False,) * len(row.mask)) if pairs and place not in balance else row

    def _rows_of_turns(self, prompt: Prompt, scored: Sequence[Scored]) -> tuple[Row, ...]:
        return tuple(
            row
            for one, of_turns in zip(scored, self._turn_advantages(scored), strict=True)
            for _, row in rows_of(prompt, one, of_turns, self._algo.overlong)
        )

    def _rows_of_segments(self, prompt: Prompt, scored: Sequence[Scored]) -> Iterator[Row]:
        returns = [segment_returns(one, self._kl(one)) for one in scored]
        compared = turn_advantages(returns, lambda column: self._advantage.function(GroupRewards(column)))
        for one, of_segments in zip(scored, compared, strict=True):
            for path, row in rows_of(prompt, one, 0.0, self._algo.overlong):
                yield replace(row, advantages=advantages_of_segments(one, path, of_segments))

    def _turn_advantages(self, scored: Sequence[Scored]) -> list[list[float]]:
        """An advantage for every turn of every rollout."""
        if self._algo.credit == "rollout":
            return self._branch_advantages(scored)
        compare = lambda column: self._advantage.function(GroupRewards(column))  # noqa: E731
        if self._algo.credit == "turn":
            return turn_advantages([turn_returns(one, self._kl(one)) for one in scored], compare)
        of_agents = agent_advantages([agent_returns(one, self._kl_of_turns(one)) for one in scored], compare)
        return [
            [advantages[turn.agent] for turn in one.episode.turns]
            for one, advantages in zip(scored, of_agents, strict=True)
        ]

    def _branch_advantages(self, scored: Sequence[Scored]) -> list[list[float]]:
        """Compares rollouts by the mean rewards of their branches, which goes to the turns before the fork, and the branches of each rollout with
        one another, which goes to the turns of each."""
        found = []
        mean = fmean(one.reward for one in scored) if scored else 0.0
        for one, advantage in zip(scored, self._advantage.function(self._group(scored)), strict=True):
            of_turns = [advantage] * len(one.episode.turns)
            for branch, value in zip(one.branches, self._of_branches(one, mean), strict=True):
                of_turns[branch.first : branch.end] = [value] * (branch.end - branch.first)
            found.append(of_turns)
        return found

    def _of_branches(self, one: Scored, mean: float) -> list[float]:
        """`mean`: the mean reward of the group."""
        if not one.branches:
            return []
        rewards, lengths = tuple(branch.reward for branch in one.branches), _branch_lengths(one)
        if self._algo.length_penalty:
            rewards = penalised(rewards, lengths, self._algo.length_penalty, self._longest, mean=mean)
        named = _by_name([branch.rewards for branch in one.branches])
        return self._advantage.function(GroupRewards(rewards, lengths, named, self._weights))

    def barren(self, rows: Sequence[Row]) -> str:
        """Returns the reason why nothing can be learned from these rows of a group, which is then dropped; empty if
        something can."""
        if not any(any(row.mask) for row in rows):
            return "overlong"
        if self._needs_contrast and not any(any(row.advantages) for row in rows):
            return "no_contrast"
        if self._needs_teacher and not any(map(_taught, rows)):
            return "no_teacher"
        return ""

    def assemble(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        """Does the work that needs the whole batch: whitening over its valid tokens, for advantages that ask for it."""
        if not self._advantage.whitened:
            return groups
        rows = [row for group in groups for row in group.rows]
        valid = [[m and math.isfinite(p) for m, p in zip(row.mask, row.logprobs, strict=True)] for row in rows]
        white = iter(whiten([row.advantages for row in rows], valid))
        return tuple(
            replace(group, rows=tuple(replace(row, advantages=tuple(next(white))) for row in group.rows))
            for group in groups
        )

    def _group(self, scored: Sequence[Scored]) -> GroupRewards:
        rewards = tuple(one.reward - self._kl(one) for one in scored)
        lengths = tuple(one.episode.sampled for one in scored)
        if self._algo.length_penalty and rewards:
            # The reward of a rollout that branches is the mean of its branches, and so is its length.
            paths = [fmean(_branch_lengths(one)) if one.branches else one.episode.sampled for one in scored]
            rewards = penalised(rewards, paths, self._algo.length_penalty, self._longest)
        return GroupRewards(rewards, lengths, _by_name([one.rewards for one in scored]), self._weights)

    def _kl(self, one: Scored) -> float:
        """coef · Σ_t of the rollout's divergence from the reference."""
        return sum(self._kl_of_turns(one))

    def _kl_of_turns(self, one: Scored) -> list[float]:
        """The same for each turn; zeros if the divergence is not part of the reward, or is spread over tokens instead."""
        if not self._kl_in_reward or self._spreads:
            return [0.0] * len(one.episode.turns)
        _needs_references(one)
        turns = zip(one.episode.turns, one.references, strict=True)
        return [sum(self._penalties(turn.completion.logprobs, reference)) for turn, reference in turns]

    def _penalties(self, sampled: Sequence[float], reference: Sequence[float]) -> list[float]:
        coef = self._recipe.kl.coef
        return [coef * kl_penalty(s, r) for s, r in zip(sampled, reference, strict=True)]

    def _spread(self, row: Row, one: Scored, path: Sequence[int], reward: float) -> Row:
        """Gives every token its return: the reward counts at the row's last token in the loss, the divergence at each
        token."""
        last = max((t for t, sampled in enumerate(row.mask) if sampled), default=None)
        if last is None:
            return row
        rewards = [0.0] * len(row.tokens)
        if self._kl_in_reward:
            _needs_references(one)
            penalties = self._penalties(row.logprobs, reference_of(one, path))
            rewards = [-penalty if sampled else 0.0 for penalty, sampled in zip(penalties, row.mask, strict=True)]
        rewards[last] += reward
        return replace(row, advantages=tuple(return_to_go(rewards, row.mask)))


def _branch_lengths(one: Scored) -> tuple[int, ...]:
    """Returns the sampled tokens of each path from the first turn to the end of a branch."""
    counts = [len(turn.completion.tokens) for turn in one.episode.turns]
    shared = sum(counts[: one.branches[0].first])
    return tuple(shared + sum(counts[branch.first : branch.end]) for branch in one.branches)


def _by_name(rewards: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, ...]]:
    names = dict.fromkeys(name for one in rewards for name in one)
    return {name: tuple(one.get(name, math.nan) for one in rewards) for name in names}


def _taught(row: Row) -> bool:
    return row.teacher is not None and any(map(math.isfinite, row.teacher.logprobs))


def _needs_references(one: Scored) -> None:
    assert one.references, "algo.kl.place = reward: the scoring stage fills Scored.references"
