"""Alternatives from a turn of an episode ("pivot" resampling): a rollout that is over is played again from one of its turns.

An alternative takes the turns before the pivot from the rollout, and its environment goes on from the state that was exported there, as after
a kill. So the tokens before the pivot are the same ones. They are computed once by an engine that shares prefixes, stored once
(`Scored.branches`), and forwarded once by a trainer that packs rows as trees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean

from msgspec.structs import replace

from headrace.core.protocols import KEPT, EnvironmentKind
from headrace.core.types import Branch, Completion, Episode, Scored, Turn
from headrace.episodes.rollout import ForksConfig, seed_of


def fork_problem(config: ForksConfig, kind: EnvironmentKind, setting: str, remedy: str) -> str:
    """Returns why rollouts of this environment cannot branch, with the remedy; empty if they can."""
    if not config.alternatives or kind.resumes in KEPT:
        return ""
    return (
        f"rollout.forks.alternatives = {config.alternatives} plays rollouts again from the middle, and {setting} cannot go on from there: {remedy}, "
        "or set rollout.forks.alternatives = 0"
    )


def fork_problems(
    config: ForksConfig, *, turns: int, credit: str, kl_in_reward: bool, per_rollout: str
) -> Iterator[str]:
    """Returns a sentence for each setting that cannot follow episodes that branch. `turns`: the most of a rollout; `credit`:
    `algo.credit`; `per_rollout`: an algorithm that gives a rollout's tokens one weight by its whole reward; empty if it does not."""
    if not config.alternatives:
        return
    said = f"rollout.forks.alternatives = {config.alternatives}"
    if turns == 1:
        yield f"{said} branches at a turn, and the environment has one: set environment.function, or set it to 0"
    if credit != "rollout":
        yield f'{said} gives the turns behind a fork their own advantage, and so does algo.credit = "{credit}": keep one of them'
    if kl_in_reward:
        yield f'{said} compares rollouts that branch, whose divergences have no one sum: set algo.kl.place = "loss"'
    if per_rollout:
        yield f"{said} gives turns their own advantages, and {per_rollout} takes one for a rollout: choose another algo.name"


def pivot_of(episode: Episode, config: ForksConfig, seed: int) -> int:
    """Returns the number of the turn at which the episode branches. `seed`: of a choice at random."""
    turns = episode.turns
    match config.turn:
        case "first":
            return 0
        case "last":
            return len(turns) - 1
        case "random":
            return seed_of(seed, "pivot") % len(turns)
        case _:
            return max(range(len(turns)), key=lambda number: _surprise(turns[number].completion))


def _surprise(done: Completion) -> float:
    """The mean of -log p of the sampled tokens, an unbiased estimate of the entropy per token."""
    known = [-value for value in done.logprobs if math.isfinite(value)]
    return fmean(known) if known else 0.0


def path_to(episode: Episode, number: int) -> tuple[int, ...]:
    """Returns all tokens before the completion of a turn."""
    turn = episode.turns[number]
    path = turn.context
    while turn.parents:
        turn = episode.turns[turn.parents[0]]
        path = turn.context + turn.completion.tokens + path
    return path


def as_tree(leaves: Sequence[Scored], pivot: int) -> Scored:
    """Joins the scored rollouts that share the turns before `pivot` into one: an episode that branches, whose rewards are the means of its branches'."""
    first = leaves[0]
    if len(leaves) == 1:
        return first
    turns: list[Turn] = list(first.episode.turns[:pivot])
    given = [dict(rewards) for rewards in _of_turns(first)[:pivot]]
    teachers, references = list(first.teachers[:pivot]), list(first.references[:pivot])
    branches = []
    for one in leaves:
        own, start = one.episode.turns[pivot:], len(turns)
        turns += [moved(turn, partial(_place_of, pivot, start)) for turn in own]
        given += [dict(rewards) for rewards in _of_turns(one)[pivot:]]
        teachers += one.teachers[pivot:]
        references += one.references[pivot:]
        branches.append(Branch(start, len(turns), one.reward, one.rewards, one.episode.cut))
    cuts = [one.episode.cut for one in leaves]
    return replace(
        first,
        episode=Episode(tuple(turns), cuts[0] if all(cuts) else ""),
        reward=fmean(one.reward for one in leaves),
        rewards=_means([one.rewards for one in leaves]),
        turn_rewards=tuple(given) if any(given) else (),
        teachers=tuple(teachers),
        references=tuple(references),
        branches=tuple(branches),
    )


def _of_turns(one: Scored) -> Sequence[Mapping[str, float]]:
    return one.turn_rewards or ({},) * len(one.episode.turns)


def moved(turn: Turn, place: Callable[[int], int]) -> Turn:
    """Returns the turn with the new places of the turns that it names."""
    return replace(turn, parents=tuple(map(place, turn.parents)), rewrites=tuple(map(place, turn.rewrites)))


def _place_of(pivot: int, start: int, number: int) -> int:
    """Returns the place of turn `number` of an end whose turns from `pivot` on begin at `start`."""
    return number if number < pivot else number - pivot + start


def _means(rewards: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in rewards for name in one)
    return {name: fmean(one[name] for one in rewards if name in one) for name in names}
