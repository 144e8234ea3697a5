"""The thinking of a completion, told apart from its answer however the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.chat.reading import Thought, ThoughtReader, end_of_thought, is_open_in

CASES = [
    (False, "<think>\nso\n\nit is\n</think>\n\n12", Thought("so\n\nit is", "12")),
    (False, " \n<think>a</think>b", Thought("a", "b")),
    (False, "<think>\n\n</think>\n\nb\n", Thought("", "b\n")),
    (False, "<think>\nnever ends\n", Thought("never ends", "")),
    (False, "<think>a</thin", Thought("a</thin", "")),
    (False, "<think>a </think >\n</think>b</think>c", Thought("a </think >", "b</think>c")),
    (False, "\nno <think>thought</think>", Thought("", "\nno <think>thought</think>")),
    (False, "<thin", Thought("", "<thin")),
    (False, "", Thought("", "")),
    (True, "a\n</think>\n\nb", Thought("a", "b")),
    (True, "\n", Thought("", "")),
    (True, "<think>a</think>b", Thought("<think>a", "b")),
]


@pytest.mark.parametrize(("begun", "text", "expected"), CASES)
def test_the_thinking_is_told_from_the_answer(begun: bool, text: str, expected: Thought) -> None:
    assert ThoughtReader(begun).push(text, last=True) == expected


@given(st.sampled_from(CASES), st.lists(st.integers(0, 40), max_size=8))
def test_it_does_not_matter_how_the_text_is_cut(case: tuple[bool, str, Thought], cuts: list[int]) -> None:
    begun, text, expected = case
    reader, places = ThoughtReader(begun), sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[start:end] for start, end in pairwise(places)] or [""]
    said = [reader.push(part, last=place == len(parts) - 1) for place, part in enumerate(parts)]
    assert Thought("".join(one.reasoning for one in said), "".join(one.answer for one in said)) == expected
    thinking = [place for place, one in enumerate(said) if one.reasoning]
    assert not any(one.answer for one in said[: max(thinking, default=0)]), "thinking comes first"


@pytest.mark.parametrize("one", [False, True], ids=["characters", "one token"])
def test_the_tokens_up_to_the_end_of_the_thinking_are_counted(one: bool) -> None:
    words = ["<think>", "a", "b", *(["</think>"] if one else "</think>"), "c", "</think>"]
    tokens = list(range(len(words)))
    count = end_of_thought(
        lambda some: "".join(words[token] for token in some), tokens, lambda token: words[token].encode()
    )
    assert "".join(words[:count]) == "<think>ab</think>"


def test_a_prompt_that_ends_within_the_thinking() -> None:
    assert is_open_in("assistant\n<think>\n") and is_open_in("<think></think><think>")
    assert not is_open_in("<think>\n\n</think>\n\n") and not is_open_in("assistant\n")
