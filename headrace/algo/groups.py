"""From a scored group to training rows. Runs in the controller: no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from headrace.algo.advantages import ADVANTAGES, AdvantageFunction
from headrace.algo.config import AlgoConfig
from headrace.types import Completion, Episode, Prompt, Row, Scored

Overlong = Literal["train", "mask"]


def advantages_of(algo: AlgoConfig) -> AdvantageFunction:
    """The algorithm's advantage function: the rewards of one group -> one advantage per rollout."""
    return ADVANTAGES[algo.recipe.advantage]


def rows_of(
    prompt: Prompt, scored: Sequence[Scored], advantages: Sequence[float], overlong: Overlong = "train"
) -> tuple[Row, ...]:
    """One row per root-to-leaf path of every episode; all its sampled tokens get the rollout's advantage.

    A completion that lies on several paths is trained in the first of them and is context in the others, so that no
    sampled token counts twice.
    """
    rows: list[Row] = []
    for one, advantage in zip(scored, advantages, strict=True):
        trained: set[int] = set()
        for path in _paths(one.episode):
            rows.append(_row(prompt, one.episode, path, trained, advantage, overlong))
            trained.update(path)
    return tuple(rows)


def _paths(episode: Episode) -> Iterator[tuple[int, ...]]:
    """Root-to-leaf paths as turn numbers, in the order of their leaves."""
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


def _row(
    prompt: Prompt, episode: Episode, path: Sequence[int], trained: set[int], advantage: float, overlong: Overlong
) -> Row:
    turns = [episode.turns[i] for i in path]
    tokens: list[int] = []
    logprobs: list[float] = []
    mask: list[bool] = []
    versions: list[int] = []
    for number, turn in zip(path, turns, strict=True):
        done, spans = turn.completion, turn.completion.versions()
        if number != path[0]:  # what lies between two completions: tool results, the next question
            tokens += turn.context
            logprobs += [0.0] * len(turn.context)
            mask += [False] * len(turn.context)
            versions += [_version_beside(versions, spans)] * len(turn.context)
        tokens += done.tokens
        logprobs += done.logprobs
        mask += [_trains(done, overlong) and number not in trained] * len(done.tokens)
        versions += spans
    return Row(
        prompt=turns[0].context or prompt.tokens,
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        advantages=(float(advantage),) * len(tokens),
        mask=tuple(mask),
        versions=tuple(versions),
    )


def _trains(completion: Completion, overlong: Overlong) -> bool:
    return overlong == "train" or completion.stop != "length"


def _version_beside(before: Sequence[int], after: Sequence[int]) -> int:
    """Context was sampled by nobody: it takes the version of the completion after it, or of the one before."""
    return after[0] if after else before[-1] if before else 0
