"""Training rows of scored groups, and the batch that they become: it runs in the controller,
without torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from statistics import fmean
from typing import Literal, NamedTuple

import numpy as np
from msgspec.structs import replace

from headrace.algo.advantages import (
    ATTEMPTS,
    STATE_WEIGHT,
    Advantage,
    GroupRewards,
    Pair,
    advantage_of,
    agent_advantages,
    agent_returns,
    kl_penalty,
    penalised,
    return_to_go,
    rewards_of_turns,
    segment_returns,
    state_advantages,
    states_of,
    turn_advantages,
    turn_returns,
    whiten,
)
from headrace.algo.config import AlgoConfig
from headrace.core.batches import Demonstration, Group, RewardsBefore, Row
from headrace.core.sampling_masks import joined_masks
from headrace.core.types import Completion, Episode, Prompt, RoutingTrace, Scored, TeacherTrace, TopLogprobs

# --- A root-to-leaf path of an episode as a training row
# The columns of its turns, concatenated. No torch.


Overlong = Literal["train", "mask"]


def rows_of(
    prompt: Prompt, rollout: Scored, advantage: float | Sequence[float], overlong: Overlong = "train"
) -> Iterator[tuple[tuple[int, ...], Row]]:
    """Yields the root-to-leaf paths of an episode with their rows, every token with the rollout's advantage, or with that of its turn if
    there is one for each.

    A completion on several paths is trained in the first of them and is context in the others, so that no sampled token
    counts twice.
    """
    trained: set[int] = set()
    for path in paths_of(rollout.episode):
        yield path, row_of(prompt, rollout, path=path, trained=trained, advantage=advantage, overlong=overlong)
        trained.update(path)


def paths_of(episode: Episode) -> Iterator[tuple[int, ...]]:
    """Yields root-to-leaf paths as turn numbers, in the order of their leaves."""
    inner = {parent for turn in episode.turns for parent in turn.parents}
    for leaf in range(len(episode.turns)):
        if leaf not in inner:
            yield from _paths_to(episode, leaf)


def _paths_to(episode: Episode, turn: int) -> Iterator[tuple[int, ...]]:
    parents = episode.turns[turn].parents
    if not parents:
        yield (turn,)
    for parent in parents:
        for path in _paths_to(episode, parent):
            yield (*path, turn)


class _Piece(NamedTuple):
    """Consecutive tokens of a row: a completion, or the context before one (tool results, the next question)."""

    tokens: tuple[int, ...]
    turn: int
    """The turn whose completion it is, or comes before."""
    sampled: bool


def _pieces(episode: Episode, path: Sequence[int]) -> Iterator[_Piece]:
    for place, number in enumerate(path):
        turn = episode.turns[number]
        if place:  # the first turn's context is the prompt
            yield _Piece(turn.context, number, False)
        yield _Piece(turn.completion.tokens, number, True)


def row_of(
    prompt: Prompt,
    rollout: Scored,
    *,
    path: Sequence[int],
    trained: set[int],
    advantage: float | Sequence[float],
    overlong: Overlong,
) -> Row:
    """Makes the row of one path. Completions of turns in `trained` are context in it."""
    turns, pieces = rollout.episode.turns, list(_pieces(rollout.episode, path))
    opening = turns[path[0]].context or prompt.tokens
    masked = _masked_from(rollout, path[-1]) if overlong == "mask" else len(turns)
    tokens: list[int] = []
    logprobs: list[float] = []
    mask: list[bool] = []
    advantages: list[float] = []
    versions: list[int] = []
    kv_versions: list[int] = []
    for piece in pieces:
        done, count = turns[piece.turn].completion, len(piece.tokens)
        spans, kv = done.versions(), done.kv_versions()
        tokens += piece.tokens
        advantages += [float(advantage if isinstance(advantage, (int, float)) else advantage[piece.turn])] * count
        logprobs += done.logprobs if piece.sampled else [0.0] * count
        kept = turns[piece.turn].trained and piece.turn not in trained
        trains = kept and piece.turn < masked and _trains(done, overlong)
        mask += [piece.sampled and trains] * count
        versions += spans if piece.sampled else [_version_beside(versions, spans)] * count
        kv_versions += kv if piece.sampled else versions[len(kv_versions) :]
    return Row(
        prompt=opening,
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        advantages=tuple(advantages),
        mask=tuple(mask),
        versions=tuple(versions),
        sampling_mask=joined_masks(
            [(turns[piece.turn].completion.mask if piece.sampled else None, len(piece.tokens)) for piece in pieces]
        ),
        routing=_routing(rollout.episode, len(opening), pieces),
        teacher=_teacher(rollout, pieces),
        kv_versions=tuple(kv_versions) if kv_versions != versions else (),
    )


def _masked_from(rollout: Scored, leaf: int) -> int:
    """Returns the first turn that is out of the loss because the path to `leaf` was cut off; beyond the last one if it was not."""
    if rollout.episode.cut:
        return 0
    cut = [branch.first for branch in rollout.branches if branch.cut and branch.first <= leaf < branch.end]
    return cut[0] if cut else len(rollout.episode.turns)


def reference_of(rollout: Scored, path: Sequence[int]) -> list[float]:
    """[T] the reference's log-probs over the row of a path; NaN for context."""
    return [
        value
        for piece in _pieces(rollout.episode, path)
        for value in (rollout.references[piece.turn] if piece.sampled else (math.nan,) * len(piece.tokens))
    ]


def advantages_of_segments(rollout: Scored, path: Sequence[int], of_segments: Sequence[float]) -> tuple[float, ...]:
    """[T] over the row of a path: every sampled token has the advantage of its step, in `of_segments` over the steps of all turns; context
    has none."""
    first = [sum(map(len, rollout.segments[:number])) for number in range(len(rollout.segments))]
    advantages: list[float] = []
    for piece in _pieces(rollout.episode, path):
        if not piece.sampled:
            advantages += [0.0] * len(piece.tokens)
            continue
        before = 0
        for place, (end, _, _) in enumerate(rollout.segments[piece.turn], first[piece.turn]):
            advantages += [of_segments[place]] * (end - before)
            before = end
    return tuple(advantages)


def _trains(completion: Completion, overlong: Overlong) -> bool:
    return overlong == "train" or completion.stop != "length"


def _version_beside(before: Sequence[int], after: Sequence[int]) -> int:
    """Returns a version for context, which no weights sampled: that of the completion after it, or of the one before."""
    return after[0] if after else before[-1] if before else 0


def _routing(episode: Episode, prompt: int, pieces: Sequence[_Piece]) -> RoutingTrace | None:
    """Joins the traces of the turns: each position has the experts of the first request that forwarded it, under whose weights the token behind
    it was sampled. A later request may have computed it again under newer ones. A request forwards all before its last sampled token."""
    joined, end = b"", prompt
    shape: RoutingTrace | None = None
    for piece in pieces:
        end += len(piece.tokens)
        trace = episode.turns[piece.turn].completion.routing if piece.sampled else None
        if trace and trace.experts:
            size = trace.layers * trace.k * trace.width
            first = trace.start * size
            joined, shape = joined + trace.experts[len(joined) - first : (end - 1) * size - first], trace
    return shape and replace(shape, experts=joined, start=0)


def _teacher(rollout: Scored, pieces: Sequence[_Piece]) -> TeacherTrace | None:
    """Concatenates the traces of the turns; context has NaN and no most probable tokens."""
    if not rollout.teachers:
        return None
    versions: list[int] = []
    logprobs: list[float] = []
    for piece in pieces:
        trace = rollout.teachers[piece.turn]
        versions += trace.versions if piece.sampled else [0] * len(piece.tokens)
        logprobs += trace.logprobs if piece.sampled else [math.nan] * len(piece.tokens)
    name = rollout.teachers[pieces[0].turn].name
    return TeacherTrace(name, tuple(versions), tuple(logprobs), _teacher_top(rollout, pieces))


def _teacher_top(rollout: Scored, pieces: Sequence[_Piece]) -> TopLogprobs | None:
    k = max((trace.top.k for trace in rollout.teachers if trace.top), default=0)
    if not k:
        return None
    count = sum(len(piece.tokens) for piece in pieces)
    ids, logprobs = np.zeros((count, k), np.int32), np.full((count, k), -np.inf, np.float32)
    start = 0
    for piece in pieces:
        end, top = start + len(piece.tokens), rollout.teachers[piece.turn].top
        if piece.sampled and top:
            ids[start:end, : top.k] = np.frombuffer(top.tokens, np.int32).reshape(-1, top.k)
            logprobs[start:end, : top.k] = np.frombuffer(top.logprobs, np.float32).reshape(-1, top.k)
        start = end
    return TopLogprobs(k, ids.tobytes(), logprobs.tobytes())


# --- Trajectories
# The unit that ratios of sequences and denominators are taken over: all tokens that one agent sampled in one rollout, in all of its rows. A
# rollout has several rows where it forks, where a template rewrites its history, and where it has several agents.


def with_trajectories(rows: Sequence[Row], scored: Sequence[Scored], *, whole: bool) -> Iterator[Row]:
    """Yields the rows of a group, in the order of its rollouts and their paths, with the numbers of their trajectories.

    `whole`: all agents of a rollout make one trajectory, whose number is the rollout's place in `scored`, as losses of whole rollouts need it."""
    numbers: dict[tuple[int, str], int] = {}
    paths = [(place, path) for place, rollout in enumerate(scored) for path in paths_of(rollout.episode)]
    for (place, path), row in zip(paths, rows, strict=True):
        episode = scored[place].episode
        agents = {number: "" if whole else episode.turns[number].agent for number in path}
        of_turns = {turn: numbers.setdefault((place, agent), len(numbers)) for turn, agent in agents.items()}
        if len(set(of_turns.values())) == 1:
            yield replace(row, trajectories=(of_turns[path[0]],))
        else:
            pieces = _pieces(episode, path)
            yield replace(row, trajectories=tuple(of_turns[piece.turn] for piece in pieces for _ in piece.tokens))


def trajectories_of(groups: Sequence[Group]) -> list[tuple[int, ...]]:
    """Returns `Row.trajectories` of every row, as numbers within the step: those of a group begin at the place of its first rollout in the
    step, or later."""
    found: list[tuple[int, ...]] = []
    for group, first in zip(groups, firsts_of(groups), strict=True):
        found += [tuple(first + number for number in numbers) for numbers in _numbers_of(group)]
    return found


def firsts_of(groups: Sequence[Group]) -> list[int]:
    """Returns the number within the step of the first trajectory of each group."""
    counts = [max((max(numbers) + 1 for numbers in _numbers_of(group)), default=0) for group in groups]
    return list(accumulate(counts, initial=0))[:-1]


def _numbers_of(group: Group) -> list[tuple[int, ...]]:
    if group.pairs and not all(
        row.trajectories for row in group.all_rows
    ):  # of earlier versions, in which only losses of pairs joined rows
        return [(place,) for place, rollout in enumerate(group.scored) for _ in paths_of(rollout.episode)]
    return [row.trajectories or (number,) for number, row in enumerate(group.all_rows)]


# --- Makes training rows from a scored group, and a batch from groups
# Runs in the controller, without torch.


def algorithm_of(
    algo: AlgoConfig,
    longest: int,
    weights: Mapping[str, float] | None = None,
    answers: Sequence[Demonstration] = (),
) -> Algorithm:
    """Makes the algorithm. `longest`: the most tokens that can be sampled for a rollout; `weights`: weights of the named
    rewards, 1 if missing; `answers`: the given answers, which are read only where they are compared with rollouts.

    Raises ConfigError if the user's advantage function cannot be loaded.
    """
    found: dict[tuple[int, ...], dict[Demonstration, None]] = {}
    if algo.given_answers == "compared":
        for answer in answers:
            found.setdefault(answer.prompt, {})[replace(answer, advantage=1.0)] = (
                None  # an answer that is given twice counts once
            )
    return Algorithm(algo, advantage_of(algo.recipe.advantage), longest, weights or {}, found)


class Algorithm:
    """The part of the algorithm that the pipeline uses: advantages and rows."""

    def __init__(
        self,
        algo: AlgoConfig,
        advantage: Advantage,
        longest: int,
        weights: Mapping[str, float],
        answers: Mapping[tuple[int, ...], Collection[Demonstration]],
    ) -> None:
        """`answers`: by the tokens of their question, where they are compared with rollouts."""
        self._algo, self._recipe = algo, algo.recipe
        self._advantage, self._longest, self._weights = advantage, longest, weights
        self._answers = answers
        self._attempts = algo.attempts or ATTEMPTS
        self._weighs = self._recipe.loss.weighs_rollouts
        self._spreads, self._judged = advantage.spread, advantage.critic or advantage.implicit
        self._kl_in_reward = (
            algo.reference_in_reward
        )  # read for every rollout, and a property that is computed at each access
        self._needs_contrast = algo.compares or self._weighs
        self._needs_teacher = self._recipe.advantage == "zero" and not self._recipe.distill.model
        self.min_rollouts = algo.min_rollouts

    def filled(self, group: Group, temperature: float = 0.0) -> Group:
        """Returns a group of scored rollouts with its rows and pairs; without any if the rollouts are too few to be compared. Good rollouts of earlier groups
        are members of it as its own are, with the log-probs and versions that they were sampled with. `temperature`: that of all of them."""
        if len(group.scored) < self.min_rollouts:
            return group
        made = self.rows(group.prompt, (*group.scored, *group.experience), group.before)
        rows = [replace(row, temperature=temperature) for row in made]
        own = sum(1 for rollout in group.scored for _ in paths_of(rollout.episode))
        again = tuple(replace(row, again=True) for row in rows[own:])
        return replace(group, rows=tuple(rows[:own]), again=again, pairs=self.pairs(group.scored))

    def rows(self, prompt: Prompt, scored: Sequence[Scored], before: RewardsBefore | None = None) -> tuple[Row, ...]:
        """Makes one row per root-to-leaf path of every episode; no sampled token counts twice. Rows name their trajectories. `before`: the rewards of the
        prompt in earlier groups, for an advantage that asks for them."""
        rows = self._rows(prompt, scored, before or RewardsBefore())
        if self._needs_teacher:  # what no teacher scored has no loss, and would only be counted in the denominator
            rows = tuple(row if _taught(row) else replace(row, mask=(False,) * len(row.mask)) for row in rows)
        return tuple(with_trajectories(rows, scored, whole=self._recipe.loss.whole))

    def _rows(self, prompt: Prompt, scored: Sequence[Scored], before: RewardsBefore) -> tuple[Row, ...]:
        if self._recipe.credit == "segment":
            return tuple(self._rows_of_segments(prompt, scored))
        if self._recipe.credit != "rollout" or any(rollout.branches for rollout in scored):
            return self._rows_of_turns(prompt, scored)
        if self._advantage.pairs:
            return tuple(self._rows_of_pairs(prompt, scored))
        advantages, trained = self._compared(self._group(scored)._replace(before=before))
        if prompt.tokens in self._answers:
            advantages = self._beside_answers(prompt, scored)[: len(scored)]
        idle = any(advantages) if self._weighs else False
        rows: list[Row] = []
        for place, (rollout, advantage) in enumerate(zip(scored, advantages, strict=True)):
            own = list(rows_of(prompt, rollout, advantage, self._algo.overlong))
            if place not in trained:
                rows += [replace(row, mask=(False,) * len(row.mask)) for _, row in own]
            elif self._spreads:
                rows += self._spread(own, rollout, advantage)
            elif self._judged:
                rows += self._rewarded(own, rollout, advantage)
            elif idle and not advantage:  # cross-entropy: its own denominator
                rows += [replace(row, mask=(False,) * len(row.mask)) for _, row in own]
            else:
                rows += [row for _, row in own]
        return tuple(rows)

    def _compared(self, group: GroupRewards) -> tuple[list[float], Collection[int]]:
        """Returns the advantages of a group, 0 for rollouts that are not trained, and the places of those that are."""
        subset, count = self._recipe.subset, len(group.rewards)
        if subset.size(count) == count:
            return self._advantage.function(group), range(count)
        places = group.chosen(subset.kind, subset.size(count), subset.by)
        advantages = [0.0] * count
        for place, advantage in zip(places, self._advantage.function(group.of(places)), strict=True):
            advantages[place] = advantage
        return advantages, places

    def _beside_answers(self, prompt: Prompt, scored: Sequence[Scored]) -> list[float]:
        """Returns the advantages of the rollouts of a question, and then those of its given answers: they are one group (LUFFY, arXiv 2504.14945)."""
        given = (self._recipe.demonstrations.reward,) * len(self._answers.get(prompt.tokens, ()))
        return self._advantage.function(GroupRewards(self._group(scored).rewards + given))

    def answers(self, groups: Sequence[Group]) -> tuple[Demonstration, ...]:
        """Returns the given answers to the questions of groups, each with its advantage; none unless they are compared with rollouts."""
        return tuple(
            replace(one, advantage=advantage)
            for group in groups
            if (own := self._answers.get(group.prompt.tokens))
            for one, advantage in zip(
                own, self._beside_answers(group.prompt, group.scored)[len(group.scored) :], strict=True
            )
        )

    def pairs(self, scored: Sequence[Scored]) -> tuple[Pair, ...]:
        """The pairs of rollouts, chosen and rejected, as places in `scored`; none unless the loss compares pairs. A rollout that was cut off
        is in none if such rollouts are not trained."""
        if not self._advantage.pairs:
            return ()
        kept = [place for place, rollout in enumerate(scored) if self._whole(rollout)]
        found = self._advantage.pairs(self._group([scored[place] for place in kept]))
        return tuple((kept[chosen], kept[rejected]) for chosen, rejected in found)

    def _whole(self, rollout: Scored) -> bool:
        cut = rollout.episode.cut or any(turn.completion.stop == "length" for turn in rollout.episode.turns)
        return self._algo.overlong == "train" or not cut

    def _rows_of_pairs(self, prompt: Prompt, scored: Sequence[Scored]) -> Iterator[Row]:
        """Yields rows whose advantage is the balance of the rollout's pairs; rollouts in no pair are in no loss."""
        pairs = self.pairs(scored)
        balance = Counter(chosen for chosen, _ in pairs)
        balance.subtract(rejected for _, rejected in pairs)
        for place, rollout in enumerate(scored):
            for _, row in rows_of(prompt, rollout, float(balance[place]), self._algo.overlong):
                yield replace(row, mask=(False,) * len(row.mask)) if pairs and place not in balance else row

    def _rows_of_turns(self, prompt: Prompt, scored: Sequence[Scored]) -> tuple[Row, ...]:
        return tuple(
            row
            for rollout, of_turns in zip(scored, self._turn_advantages(scored), strict=True)
            for _, row in rows_of(prompt, rollout, of_turns, self._algo.overlong)
        )

    def _rows_of_segments(self, prompt: Prompt, scored: Sequence[Scored]) -> Iterator[Row]:
        returns = [segment_returns(rollout, self._kl(rollout)) for rollout in scored]
        compared = turn_advantages(returns, lambda column: self._advantage.function(GroupRewards(column)))
        for rollout, of_segments in zip(scored, compared, strict=True):
            for path, row in rows_of(prompt, rollout, 0.0, self._algo.overlong):
                yield replace(row, advantages=advantages_of_segments(rollout, path, of_segments))

    def _turn_advantages(self, scored: Sequence[Scored]) -> list[list[float]]:
        """An advantage for every turn of every rollout."""
        if self._recipe.credit == "rollout":
            return self._branch_advantages(scored)
        compare = lambda column: self._advantage.function(GroupRewards(column))  # noqa: E731
        if self._recipe.credit == "turn":
            return turn_advantages(self._turn_returns(scored), compare)
        if self._recipe.credit == "state":
            return self._state_advantages(scored, compare)
        of_agents = agent_advantages(
            [agent_returns(rollout, self._kl_of_turns(rollout)) for rollout in scored], compare
        )
        return [
            [advantages[turn.agent] for turn in rollout.episode.turns]
            for rollout, advantages in zip(scored, of_agents, strict=True)
        ]

    def _turn_returns(self, scored: Sequence[Scored]) -> list[list[float]]:
        rewards = [rewards_of_turns(rollout, self._kl(rollout)) for rollout in scored]
        return turn_returns(rewards, self._recipe.gamma, self._algo.lam)

    def _state_advantages(
        self, scored: Sequence[Scored], compare: Callable[[tuple[float, ...]], list[float]]
    ) -> list[list[float]]:
        """Adds to each rollout's advantage, for each of its turns, that among the turns that began in the same state (GiGPO, arXiv 2505.10978, eq. 8)."""
        weight = self._algo.state_weight or STATE_WEIGHT
        states = [states_of(rollout.episode) for rollout in scored]
        of_turns = state_advantages(self._turn_returns(scored), states, compare)
        of_rollouts = self._advantage.function(self._group(scored))
        return [
            [whole + weight * advantage for advantage in advantages]
            for whole, advantages in zip(of_rollouts, of_turns, strict=True)
        ]

    def _branch_advantages(self, scored: Sequence[Scored]) -> list[list[float]]:
        """Compares rollouts by the mean rewards of their branches, which goes to the turns before the fork, and the branches of each rollout with
        one another, which goes to the turns of each."""
        found = []
        mean = fmean(rollout.reward for rollout in scored) if scored else 0.0
        for rollout, advantage in zip(scored, self._advantage.function(self._group(scored)), strict=True):
            of_turns = [advantage] * len(rollout.episode.turns)
            for branch, value in zip(rollout.branches, self._of_branches(rollout, mean), strict=True):
                of_turns[branch.first : branch.end] = [value] * (branch.end - branch.first)
            found.append(of_turns)
        return found

    def _of_branches(self, rollout: Scored, mean: float) -> list[float]:
        """`mean`: the mean reward of the group."""
        if not rollout.branches:
            return []
        rewards, lengths = tuple(branch.reward for branch in rollout.branches), _branch_lengths(rollout)
        if self._algo.length_penalty:
            rewards = penalised(rewards, lengths, self._algo.length_penalty, self._longest, mean=mean)
        named = _by_name([branch.rewards for branch in rollout.branches])
        return self._advantage.function(GroupRewards(rewards, lengths, named, self._weights, self._attempts))

    def barren(self, rows: Sequence[Row], again: Sequence[Row] = ()) -> str:
        """Returns the reason why nothing can be learned from these rows of a group, which is then dropped; empty if
        something can. `again`: rows of good earlier rollouts, with which its own are compared."""
        if self._needs_teacher and not any(map(_taught, rows)):
            return "no_teacher"
        if not any(any(row.mask) for row in rows):
            return "overlong"
        if self._needs_contrast and not any(any(row.advantages) for row in (*rows, *again)):
            return "no_contrast"
        return ""

    def assemble(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        """Does the work that needs the whole batch: whitening over its valid tokens, for advantages that ask for it."""
        if not self._advantage.whitened:
            return groups
        rows = [row for group in groups for row in group.all_rows]
        valid = [[m and math.isfinite(p) for m, p in zip(row.mask, row.logprobs, strict=True)] for row in rows]
        white = iter(whiten([row.advantages for row in rows], valid))
        found = []
        for group in groups:
            own, again = (
                tuple(replace(row, advantages=tuple(next(white))) for row in part) for part in (group.rows, group.again)
            )
            found.append(replace(group, rows=own, again=again))
        return tuple(found)

    def _group(self, scored: Sequence[Scored]) -> GroupRewards:
        rewards = tuple(rollout.reward - self._kl(rollout) for rollout in scored)
        lengths = tuple(rollout.episode.sampled for rollout in scored)
        if self._algo.length_penalty and rewards:
            # The reward of a rollout that branches is the mean of its branches, and so is its length.
            paths = [
                fmean(_branch_lengths(rollout)) if rollout.branches else rollout.episode.sampled for rollout in scored
            ]
            rewards = penalised(rewards, paths, self._algo.length_penalty, self._longest)
        named = _by_name([rollout.rewards for rollout in scored])
        return GroupRewards(rewards, lengths, named, self._weights, self._attempts)

    def _kl(self, rollout: Scored) -> float:
        """coef · Σ_t of the rollout's divergence from the reference."""
        return sum(self._kl_of_turns(rollout))

    def _kl_of_turns(self, rollout: Scored) -> list[float]:
        """coef · Σ_t of each turn's divergence; zeros if it is not part of the reward, or is spread over tokens instead."""
        if not self._kl_in_reward or self._spreads or self._judged:
            return [0.0] * len(rollout.episode.turns)
        _needs_references(rollout)
        turns = zip(rollout.episode.turns, rollout.references, strict=True)
        return [sum(self._penalties(turn.completion.logprobs, reference)) for turn, reference in turns]

    def _penalties(self, sampled: Sequence[float], reference: Sequence[float]) -> list[float]:
        coef = self._recipe.kl.coef
        return [coef * kl_penalty(s, r) for s, r in zip(sampled, reference, strict=True)]

    def _spread(self, rows: Sequence[tuple[tuple[int, ...], Row]], rollout: Scored, reward: float) -> Iterator[Row]:
        """Gives every token of a rollout its return. Turns follow each other in the order in which they were sampled, whatever rows they lie in:
        a turn's reward counts at its last token, what is left of `reward` at the end, and the divergence at each token in the loss."""
        turns = rollout.episode.turns
        given = [sum(rewards.values()) for rewards in rollout.turn_rewards] or [0.0] * len(turns)
        given[-1] += reward - sum(given)
        trained = {turn for path, row in rows for turn in _in_loss(rollout.episode, path, row)}
        rewards: list[float] = []
        mask: list[bool] = []
        for number, turn in enumerate(turns):
            own = [0.0] * len(turn.completion.tokens)
            if self._kl_in_reward and number in trained:
                _needs_references(rollout)
                own = [-penalty for penalty in self._penalties(turn.completion.logprobs, rollout.references[number])]
            own[-1:] = [sum(own[-1:]) + given[number]]
            rewards += own
            mask += [number in trained] * len(own)
        returns = iter(return_to_go(rewards, mask, self._recipe.gamma))
        of_turns = [list(islice(returns, max(len(turn.completion.tokens), 1))) for turn in turns]
        for path, row in rows:
            pieces = _pieces(rollout.episode, path)
            values = [of_turns[p.turn][: len(p.tokens)] if p.sampled else [0.0] * len(p.tokens) for p in pieces]
            yield replace(row, advantages=tuple(value for of_piece in values for value in of_piece))

    def _rewarded(self, rows: Sequence[tuple[tuple[int, ...], Row]], rollout: Scored, reward: float) -> Iterator[Row]:
        """Puts the rewards of a rollout at the tokens where they were given (`_token_rewards`), in the place of advantages, and names the turns. What
        falls on a token that is not in the loss belongs to the last one before it of the same agent: its consequence."""
        episode = rollout.episode
        in_loss = _tokens_in_loss(episode, rows)
        placed = [[0.0] * len(turn.completion.tokens) for turn in episode.turns]
        last: dict[str, tuple[int, int]] = {}
        for number, of_turn in enumerate(self._token_rewards(rollout, reward)):
            agent = episode.turns[number].agent
            penalties = self._token_penalties(rollout, number) if in_loss[number] else []
            for place, value in enumerate(of_turn):
                if place in in_loss[number]:
                    last[agent] = number, place
                    placed[number][place] -= penalties[place]
                if value and agent in last:
                    turn, token = last[agent]
                    placed[turn][token] += value
        for path, row in rows:
            pieces = list(_pieces(episode, path))
            values = [placed[p.turn] if p.sampled else [0.0] * len(p.tokens) for p in pieces]
            turns = (path[0],) if len(path) == 1 else tuple(p.turn for p in pieces for _ in p.tokens)
            yield replace(row, advantages=tuple(value for of_piece in values for value in of_piece), turns=turns)

    def _token_rewards(self, rollout: Scored, reward: float) -> list[list[float]]:
        """Returns, for each turn, the rewards of its tokens (of one that has none: a single number). A turn's reward counts at its last token, that of a
        step of a process reward at the step's last one, and the rest of `reward`, which the rollout got at its end, at the last token of every agent."""
        turns = rollout.episode.turns
        found = [[0.0] * max(len(turn.completion.tokens), 1) for turn in turns]
        steps = [(number, end, value) for number, of_turn in enumerate(rollout.segments) for end, _, value in of_turn]
        given = steps[0][2] if steps else 0.0
        for step, (number, end, value) in enumerate(steps):
            following = steps[step + 1][2] if step + 1 < len(steps) else 0.0
            found[number][max(end, 1) - 1] += value - following
        for of_turn, rewards in zip(found, rollout.turn_rewards, strict=False):
            of_turn[-1] += sum(rewards.values())
            given += sum(rewards.values())
        for number in {turn.agent: number for number, turn in enumerate(turns)}.values():
            found[number][-1] += reward - given
        return found

    def _token_penalties(self, rollout: Scored, number: int) -> list[float]:
        """[T] the divergence of each token of a turn, where it is part of the reward."""
        sampled = rollout.episode.turns[number].completion.logprobs
        if not self._kl_in_reward:
            return [0.0] * len(sampled)
        _needs_references(rollout)
        return self._penalties(sampled, rollout.references[number])


def _tokens_in_loss(episode: Episode, rows: Sequence[tuple[tuple[int, ...], Row]]) -> list[set[int]]:
    """Returns the places of each turn's tokens in the loss: with a finite log-prob of the sampler, in the row that trains the turn."""
    found: list[set[int]] = [set() for _ in episode.turns]
    for path, row in rows:
        start = 0
        for piece in _pieces(episode, path):
            if piece.sampled:
                found[piece.turn] |= {
                    place
                    for place in range(len(piece.tokens))
                    if row.mask[start + place] and math.isfinite(row.logprobs[start + place])
                }
            start += len(piece.tokens)
    return found


def _in_loss(episode: Episode, path: Sequence[int], row: Row) -> Iterator[int]:
    """Yields the turns of a path that its row trains."""
    start = 0
    for piece in _pieces(episode, path):
        end = start + len(piece.tokens)
        if piece.sampled and any(row.mask[start:end]):
            yield piece.turn
        start = end


def _branch_lengths(rollout: Scored) -> tuple[int, ...]:
    """Returns the sampled tokens of each path from the first turn to the end of a branch."""
    counts = [len(turn.completion.tokens) for turn in rollout.episode.turns]
    shared = sum(counts[: rollout.branches[0].first])
    return tuple(shared + sum(counts[branch.first : branch.end]) for branch in rollout.branches)


def _by_name(rewards: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, ...]]:
    names = dict.fromkeys(name for reward in rewards for name in reward)
    return {name: tuple(reward.get(name, math.nan) for reward in rewards) for name in names}


def _taught(row: Row) -> bool:
    return row.teacher is not None and any(map(math.isfinite, row.teacher.logprobs))


def _needs_references(rollout: Scored) -> None:
    assert rollout.references, "algo.kl.place = reward: the scoring stage fills Scored.references"
