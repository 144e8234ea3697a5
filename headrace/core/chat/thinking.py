"""The thinking of a model, which stands between two marks before its answer, as the models of Qwen, DeepSeek and others write it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

OPENING, CLOSING = "<think>", "</think>"
MARKS = (OPENING, CLOSING)
"""Texts of tokens that must stay in the decoded text, even where the tokenizer calls them special."""


class Thought(NamedTuple):
    reasoning: str
    answer: str


def is_known_to(template: str) -> bool:
    """Whether a chat template is one of a model that thinks: it writes the end of a thought, or looks for it."""
    return CLOSING in template


def is_open_in(text: str) -> bool:
    """Whether the thinking has begun and not ended in a text."""
    return text.rfind(OPENING) > text.rfind(CLOSING)


class ThoughtReader:
    """Splits one completion in pieces. What is read is the same however the text is cut.

    Thinking is what stands at the beginning, up to the closing mark. The new lines beside the marks belong to neither part: templates write
    them themselves."""

    def __init__(self, begun: bool) -> None:
        """`begun`: whether the prompt ends within the thinking."""
        self._inside: bool | None = True if begun else None
        """None: not known yet."""
        self.began, self.ended = begun, False
        """Whether there was thinking, and whether it has ended."""
        self._rest = ""
        """Text that is not decided yet."""
        self._bare = True
        """Whether the part that is being read has no character yet."""

    def push(self, text: str, last: bool) -> Thought:
        """Returns the text that later text cannot change. `last`: no more text follows."""
        self._rest += text
        if self._inside is None:
            self._begin(last)
        reasoning = self._reasoning(last) if self._inside else ""
        return Thought(reasoning, self._answer() if self._inside is False else "")

    def _begin(self, last: bool) -> None:
        begun = self._rest.lstrip()
        if begun.startswith(OPENING):
            self._inside, self.began, self._rest = True, True, begun.removeprefix(OPENING)
        elif last or not OPENING.startswith(begun):
            self._inside, self._bare = False, False  # an answer without a thought stays as it is

    def _reasoning(self, last: bool) -> str:
        if self._bare:
            self._rest = self._rest.lstrip("\n")
        place = self._rest.find(CLOSING)
        if place >= 0:
            said, self._rest = self._rest[:place].rstrip("\n"), self._rest[place + len(CLOSING) :]
            self._inside, self._bare, self.ended = False, True, True
            return said
        held = 0 if last else next((n for n in range(len(CLOSING) - 1, 0, -1) if self._rest.endswith(CLOSING[:n])), 0)
        end = len(self._rest[: len(self._rest) - held].rstrip("\n"))
        said, self._rest = self._rest[:end], self._rest[end:]
        self._bare = self._bare and not said
        return said

    def _answer(self) -> str:
        said, self._rest = self._rest.lstrip("\n") if self._bare else self._rest, ""
        self._bare = self._bare and not said
        return said


def end_of_thought(decode: Callable[[Sequence[int]], str], tokens: Sequence[int], spell: Callable[[int], bytes]) -> int:
    """Returns the number of tokens up to the end of the thinking, which has ended in them, with its mark. `decode`: shows the marks; `spell`:
    the bytes of a token. Most vocabularies have the mark as one token; otherwise a few prefixes are decoded."""
    mark = CLOSING.encode()
    place = next((place for place, token in enumerate(tokens, 1) if spell(token) == mark), 0)
    if place and CLOSING not in decode(tokens[: place - 1]):
        return place
    return bisect_left(range(len(tokens)), True, key=lambda end: CLOSING in decode(tokens[:end]))
