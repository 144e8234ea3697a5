"""The parts of a completion: the one that a reward function receives (where nothing is found it is the empty string: no answer was given), and its steps."""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.core.batches import Failure
from headrace.core.chat.reading import behind_thinking
from headrace.core.types import Completion, Episode

Extract = Literal["", "last_number", "answer_tag", "code_block"]
_MINUS = "-\u2212\u2013\ufe63\uff0d"
"""Hyphen, minus sign, en dash, and the small and the wide hyphen."""
_JOINED = r"\dA-Za-z_\u00aa\u00b2\u00b3\u00b5\u00b9\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u052f\u2070-\u2079"
"""Letters of scripts with spaces between words, and digits. Chinese and Japanese write a number right behind a word."""
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"
NUMBER = re.compile(
    rf"""
    (?P<minus> (?<! [{_JOINED})\]}}%] ) [{_MINUS}] (?: \\? [$€£¥] )? )?  # none behind an operand: 5-3, x-3, (a)-3
    (?:
        (?P<grouped> (?<! \d, ) (?! 0 ) \d{{1,3}} (?: (?: , | \{{,\}} | ,\\! ) \d{{3}} )+ (?! ,? \d ) )
        (?P<cents> \.\d+ (?! \d ) )?
      | (?P<plain> (?<! \d\. ) \d+ \.\d+ (?! \d | \.\d ) | (?<! [{_JOINED}.)\]}}] ) \.\d+ (?! \d | \.\d ) | \d+ )  # none of 1.2.3
    )
    (?:
        [eE] (?P<power> [{_MINUS}+]? \d{{1,9}} ) (?! \d )
      | \s? (?: [×·*xX] | \\times | \\cdot ) \s? 10 (?:
            \s? (?: \^ | \*\* ) \s? [{{(]? \s? (?P<typed> [{_MINUS}+]? \d{{1,9}} ) (?! \d | \.\d )
          | (?P<raised> ⁻? [{_RAISED[:-1]}]{{1,9}} )
        )
    )?
    """,
    re.VERBOSE,
)
"""A number as it is usually written; docs/scoring.md has a table."""
_ASCII = str.maketrans({**dict.fromkeys(_MINUS, "-"), **dict(zip(_RAISED, "0123456789-", strict=True))})
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_CLOSED = re.compile("</answer>", re.IGNORECASE)
_FENCED = re.compile(r"^```[^\n`]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)


def number_of(match: re.Match[str]) -> str:
    """Returns what `NUMBER` has found as `float` reads it: with a hyphen for a minus sign, the digits 0 to 9, and `e` before a power of ten."""
    digits = match["plain"] or re.sub(r"\D", "", match["grouped"]) + (match["cents"] or "")
    power = match["power"] or match["typed"] or match["raised"]
    text = f"{'-' if match['minus'] else ''}{digits}" + (f"e{power}" if power else "")
    plain = text.translate(_ASCII)
    return plain if plain.isascii() else "".join(str(unicodedata.decimal(digit, digit)) for digit in plain)


def last_number(text: str) -> str:
    """Returns the last number, without thousands separators (`so 1,234.` -> `1234`); empty if there is none. A hyphen behind an operand is no
    sign: `5-3` -> `3`."""
    found = deque(NUMBER.finditer(text), maxlen=1)
    return number_of(found[0]) if found else ""


def answer_tag(text: str) -> str:
    """Returns the text in the last `<answer>...</answer>`."""
    end = max((closed.end() for closed in _CLOSED.finditer(text)), default=0)
    found = _TAG.findall(text, 0, end)  # behind the last end each beginning would look at all of the rest
    return found[-1].strip() if found else ""


def code_block(text: str) -> str:
    """Returns the last block between lines of three backticks, also one that has no end."""
    found = _FENCED.findall(text)
    return found[-1] if found else ""


def written(answer: str, kinds: Collection[str]) -> str:
    """Returns an answer as a completion in which each of these kinds finds it."""
    if "answer_tag" in kinds:
        answer = f"<answer>{answer}</answer>"
    return f"```python\n{answer}\n```" if "code_block" in kinds and not code_block(answer) else answer


_EXTRACTORS: dict[str, Callable[[str], str]] = {
    "last_number": last_number,
    "answer_tag": answer_tag,
    "code_block": code_block,
}


@dataclass(frozen=True)
class Extractor:
    """Looks behind the thinking of a model: what it has considered there is no answer."""

    kind: str = ""
    """`last_number`, `answer_tag` or `code_block`; empty for the whole text."""
    of_truncated: bool = False
    """Whether to look for an answer in completions that were cut off: the last number of an unfinished sentence is not its answer."""

    def __call__(self, completion: Completion, begun: bool = False) -> str:
        """`begun`: whether the completion begins within the model's thinking, which its template has opened."""
        if not self.kind:
            return completion.text
        cut = completion.stop == "length" and not self.of_truncated
        return "" if cut else _EXTRACTORS[self.kind](behind_thinking(completion.text, begun))


# --- The steps of a completion, in characters for what scores them and in tokens for training
# A step ends with a separator of the text. Tokens are not made anew (C5): the tokens of a step are those whose first character lies in it, found
# by decoding the first n tokens of the completion.


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
