"""The steps of a completion, in characters for what scores them and in tokens for training.

A step ends with a separator of the text. Tokens are not made anew (C5): the tokens of a step are those whose first character lies in it, found
by decoding the first n tokens of the completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from headrace.core.batches import Failure
from headrace.core.types import Completion, Episode

Decode = Callable[[Sequence[int]], str]
Form = Literal["sum", "min"]


def split(text: str, separator: str) -> list[str]:
    """Returns the steps, whose texts are together the whole text. Separators belong to the step that they end, also
    several in a row, and those at the beginning to the first one. A text without one is one step, even if it is empty."""
    parts, before = text.split(separator), ""
    steps: list[str] = []
    for place, part in enumerate(parts):
        piece = part + (separator if place < len(parts) - 1 else "")
        if part:
            steps.append(before + piece)
            before = ""
        elif steps:
            steps[-1] += piece
        else:
            before += piece
    return steps or [text]


def token_ends(completion: Completion, steps: Sequence[str], decode: Decode) -> tuple[int, ...] | None:
    """Returns the number of tokens up to the end of each step; the last one has all that are left, the end of the turn among them. None if
    the tokens do not decode to the text, so that no token can be said to belong to a step."""
    tokens, text = completion.tokens, completion.text
    if len(steps) > 1 and decode(tokens) != text:
        return None
    ends: list[int] = []
    boundary = 0
    for step in steps[:-1]:
        boundary += len(step)
        ends.append(_tokens_before(boundary, tokens, text, decode, ends[-1] if ends else 0))
    return (*ends, len(tokens))


def _tokens_before(boundary: int, tokens: Sequence[int], text: str, decode: Decode, least: int) -> int:
    """Returns the number of tokens whose first character is before `boundary`: the fewest that decode to all characters before it. Half of a
    character decodes to another one, so that a token in the middle of a character begins with that character."""
    most = len(tokens)
    while least < most:
        middle = (least + most) // 2
        if decode(tokens[:middle])[:boundary] == text[:boundary]:
            most = middle
        else:
            least = middle + 1
    return least


def segmented(episode: Episode, separator: str) -> list[list[str]]:
    """Returns the steps of each turn."""
    return [split(turn.completion.text, separator) for turn in episode.turns]


def graded(
    episode: Episode, separator: str, scores: Sequence[float], *, returns: Sequence[float], decode: Decode
) -> tuple[tuple[tuple[int, float, float], ...], ...] | Failure:
    """Joins scores and returns of all steps of an episode with their tokens, as `Scored.segments`."""
    rest, turns = iter(zip(scores, returns, strict=True)), []
    for turn, steps in zip(episode.turns, segmented(episode, separator), strict=True):
        ends = token_ends(turn.completion, steps, decode)
        if ends is None:
            why = "the text of a turn is not that of its tokens, so that no token can be said to belong to a step"
            return Failure("segments_unaligned", why)
        turns.append(tuple((end, *next(rest)) for end in ends))
    return tuple(turns)


def returns_of(scores: Sequence[float], form: Form) -> list[float]:
    """[steps] the sum of each step's score and of those after it, undiscounted; or the smallest of them, the value of a step in PURE's
    min-form (arXiv 2504.15275): a good step cannot make up for a bad one after it."""
    returns: list[float] = []
    for score in reversed(scores):
        if returns:
            score = min(score, returns[-1]) if form == "min" else score + returns[-1]
        returns.append(score)
    return returns[::-1]
