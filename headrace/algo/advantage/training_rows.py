"""A root-to-leaf path of an episode as a training row: the columns of its turns, concatenated. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from msgspec.structs import replace

from headrace.core.batches import Row
from headrace.core.sampling_masks import joined_masks
from headrace.core.types import Completion, Episode, Prompt, RoutingTrace, Scored, TeacherTrace, TopLogprobs

Overlong = Literal["train", "mask"]


def rows_of(
    prompt: Prompt, one: Scored, advantage: float | Sequence[float], overlong: Overlong = "train"
) -> Iterator[tuple[tuple[int, ...], Row]]:
    """Yields the root-to-leaf paths of an episode with their rows, every token with the rollout's advantage, or with that of its turn if
    there is one for each.

    A completion on several paths is trained in the first of them and is context in the others, so that no sampled token
    counts twice.
    """
    trained: set[int] = set()
    for path in paths_of(one.episode):
        yield path, row_of(prompt, one, path=path, trained=trained, advantage=advantage, overlong=overlong)
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
    one: Scored,
    *,
    path: Sequence[int],
    trained: set[int],
    advantage: float | Sequence[float],
    overlong: Overlong,
) -> Row:
    """Makes the row of one path. Completions of turns in `trained` are context in it."""
    turns, pieces = one.episode.turns, list(_pieces(one.episode, path))
    opening = turns[path[0]].context or prompt.tokens
    masked = _masked_from(one, path[-1]) if overlong == "mask" else len(turns)
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
        routing=_routing(one.episode, len(opening), pieces),
        teacher=_teacher(one, pieces),
        kv_versions=tuple(kv_versions) if kv_versions != versions else (),
    )


def _masked_from(one: Scored, leaf: int) -> int:
    """Returns the first turn that is out of the loss because the path to `leaf` was cut off; beyond the last one if it was not."""
    if one.episode.cut:
        return 0
    cut = [branch.first for branch in one.branches if branch.cut and branch.first <= leaf < branch.end]
    return cut[0] if cut else len(one.episode.turns)


def reference_of(one: Scored, path: Sequence[int]) -> list[float]:
    """[T] the reference's log-probs over the row of a path; NaN for context."""
    return [
        value
        for piece in _pieces(one.episode, path)
        for value in (one.references[piece.turn] if piece.sampled else (math.nan,) * len(piece.tokens))
    ]


def advantages_of_segments(one: Scored, path: Sequence[int], of_segments: Sequence[float]) -> tuple[float, ...]:
    """[T] over the row of a path: every sampled token has the advantage of its step, in `of_segments` over the steps of all turns; context
    has none."""
    first = [sum(map(len, one.segments[:number])) for number in range(len(one.segments))]
    advantages: list[float] = []
    for piece in _pieces(one.episode, path):
        if not piece.sampled:
            advantages += [0.0] * len(piece.tokens)
            continue
        before = 0
        for place, (end, _, _) in enumerate(one.segments[piece.turn], first[piece.turn]):
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


def _teacher(one: Scored, pieces: Sequence[_Piece]) -> TeacherTrace | None:
    """Concatenates the traces of the turns; context has NaN and no most probable tokens."""
    if not one.teachers:
        return None
    versions: list[int] = []
    logprobs: list[float] = []
    for piece in pieces:
        trace = one.teachers[piece.turn]
        versions += trace.versions if piece.sampled else [0] * len(piece.tokens)
        logprobs += trace.logprobs if piece.sampled else [math.nan] * len(piece.tokens)
    name = one.teachers[pieces[0].turn].name
    return TeacherTrace(name, tuple(versions), tuple(logprobs), _teacher_top(one, pieces))


def _teacher_top(one: Scored, pieces: Sequence[_Piece]) -> TopLogprobs | None:
    k = max((trace.top.k for trace in one.teachers if trace.top), default=0)
    if not k:
        return None
    count = sum(len(piece.tokens) for piece in pieces)
    ids, logprobs = np.zeros((count, k), np.int32), np.full((count, k), -np.inf, np.float32)
    start = 0
    for piece in pieces:
        end, top = start + len(piece.tokens), one.teachers[piece.turn].top
        if piece.sampled and top:
            ids[start:end, : top.k] = np.frombuffer(top.tokens, np.int32).reshape(-1, top.k)
            logprobs[start:end, : top.k] = np.frombuffer(top.logprobs, np.float32).reshape(-1, top.k)
        start = end
    return TopLogprobs(k, ids.tobytes(), logprobs.tobytes())
