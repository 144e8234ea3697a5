"""Process rewards: the steps of a completion in text and in tokens, and the credit of every token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_services import PROMPT, failures

from headrace.algo.config import AlgoConfig
from headrace.algo.training_rows import algorithm_of
from headrace.core.batches import Failure
from headrace.core.types import Completion, Episode, Scored, Turn, VersionSpan
from headrace.episodes.scoring.config import RewardConfig, RewardSpec
from headrace.episodes.scoring.extract import returns_of, split, token_ends
from headrace.episodes.scoring.reward_scorer import RewardScorer
from headrace.episodes.scoring.services.config import ServiceConfig
from headrace.loop.world import virtual_time
from headrace.testing.fake_service import ScriptedPost

PIECES = ["a", "bc", ".\n", "\n", "\n\n", " d", "é", "\n\ne", "\u2603"]
"""A vocabulary whose tokens hold separators, halves of them, and what is around them."""


def decode(tokens: Sequence[int]) -> str:
    """As a tokenizer of bytes does: half a character is a replacement character. 100 is the end of the turn, without a text."""
    raw = b"".join(_bytes(token) for token in tokens if token != 100)
    return raw.decode(errors="replace")


def _bytes(token: int) -> bytes:
    if token < len(PIECES):
        return PIECES[token].encode()
    return "\u2603".encode()[token - 50 : token - 49]  # 50, 51, 52: the bytes of one character


def completion(tokens: Sequence[int], text: str | None = None) -> Completion:
    said = decode(tokens) if text is None else text
    return Completion(tuple(tokens), (-1.0,) * len(tokens), (VersionSpan(0, 0, 0),), "stop", said)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("one", ["one"]),
        ("", [""]),
        ("one\n\ntwo", ["one\n\n", "two"]),
        ("one\n\ntwo\n\n", ["one\n\n", "two\n\n"]),
        ("one\n\n\n\ntwo", ["one\n\n\n\n", "two"]),
        ("\n\none\n\ntwo", ["\n\none\n\n", "two"]),
        ("\n\n", ["\n\n"]),
    ],
)
def test_steps_end_with_the_separator(text, steps):
    assert split(text, "\n\n") == steps


@given(st.text("ab\n", max_size=20), st.sampled_from(["\n", "\n\n", "ab", "a"]))
def test_steps_are_together_the_text(text, separator):
    steps = split(text, separator)
    assert "".join(steps) == text and all(step.endswith(separator) for step in steps[:-1])
    assert all(step.replace(separator, "") for step in steps) or len(steps) == 1


@given(
    st.lists(st.sampled_from([*range(len(PIECES)), 100]), min_size=1, max_size=12), st.sampled_from(["\n\n", "\n", "."])
)
@settings(max_examples=200)
def test_a_token_belongs_to_the_step_of_its_first_character(tokens, separator):
    done = completion(tokens)
    steps = split(done.text, separator)
    ends = token_ends(done, steps, decode)
    assert ends is not None and ends[-1] == len(tokens) and list(ends) == sorted(ends)
    boundaries = [sum(map(len, steps[: n + 1])) for n in range(len(steps))]
    for place in range(len(tokens)):
        start = len(decode(tokens[:place]))  # whole characters: these pieces are
        by_hand = next((n for n, boundary in enumerate(boundaries) if start < boundary), len(steps) - 1)
        found = next(n for n, end in enumerate(ends) if place < end)
        assert found == by_hand or decode(tokens[place : place + 1]) == "", (tokens, ends)


def test_bytes_of_one_character_stay_together():
    tokens = (0, 3, 50, 51, 52, 3, 1)  # a \n ☃ \n bc
    done = completion(tokens)
    assert done.text == "a\n\u2603\nbc"
    assert token_ends(done, split(done.text, "\n"), decode) == (2, 6, 7)
    halved = completion((0, 50, 51), "a\ufffd")
    assert token_ends(halved, split(halved.text, "\n"), decode) == (3,)


def test_a_text_that_is_not_that_of_its_tokens_is_refused():
    assert token_ends(completion((0, 4, 1), "a\n\nBC"), ["a\n\n", "BC"], decode) is None
    assert token_ends(completion((0, 4, 1), "aBC"), ["aBC"], decode) == (3,), (
        "one step has all tokens, whatever they say"
    )


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8))
def test_returns_are_sums_and_minima_of_what_follows(scores):
    assert returns_of(scores, "sum") == pytest.approx([sum(scores[n:]) for n in range(len(scores))])
    assert returns_of(scores, "min") == [min(scores[n:]) for n in range(len(scores))]


# -- from a scorer to tokens -------------------------------------------------------------------------------------------------

FIRST = (0, 4, 1, 4, 0, 100)  # a \n\n | bc \n\n | a <end>
SECOND = (1, 4, 0)  # bc \n\n | a


def scored_by(
    answers: Any, form: str = "sum", weight: float = 1.0, given: Sequence[Completion] = ()
) -> list[Scored | Failure]:
    service = ServiceConfig(name="steps", url="http://prm", segments="\n\n", form=form, weight=weight, retries=0)  # type: ignore[arg-type]
    scored: Any = answers if callable(answers) else lambda body: answers
    done = given or (completion(FIRST), completion(SECOND))

    async def main() -> list[Scored | Failure]:
        scorer = RewardScorer(RewardConfig(services=(service,)), poster=ScriptedPost(scored), decode=decode)
        return await scorer.score(PROMPT, [Episode((Turn(PROMPT.tokens, one),)) for one in done])

    return virtual_time.run(main())


def test_a_service_scores_each_step():
    asked: list[Any] = []

    def scores(body: Any) -> list[Any]:
        asked.append(body["segments"])
        return [[1.0, 0.25, 0.5], [0.75, 0.125]]

    one, other = scored_by(scores, "min", weight=2.0)
    assert asked == [[["a\n\n", "bc\n\n", "a"], ["bc\n\n", "a"]]]
    assert isinstance(one, Scored) and isinstance(other, Scored)
    assert (one.rewards, one.reward) == ({"steps": 0.25}, 0.5)
    assert one.segments == (((2, 1.0, 0.5), (4, 0.25, 0.5), (6, 0.5, 1.0)),)
    assert other.segments == (((2, 0.75, 0.25), (3, 0.125, 0.25)),)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([[1.0, 1.0], [1.0, 1.0]], "reward_wrong_count"),
        ([[1.0, 1.0, None], [1.0, 1.0]], "reward_none"),
        ([1.0, 2.0], "reward_wrong_type"),
        ([[1.0, 1.0, "x"], [1.0, 1.0]], "reward_wrong_type"),
    ],
)
def test_scores_that_do_not_fit_the_steps_are_refused(answers, reason):
    assert failures(scored_by(answers)) == [reason] * 2


def test_a_completion_whose_text_was_changed_fails_alone():
    found = scored_by([[1.0, 2.0], [1.0, 2.0]], given=(completion((0, 4, 1), "a\n\nBC"), completion(SECOND)))
    assert failures(found) == ["segments_unaligned"] and isinstance(found[1], Scored)


def test_a_function_scores_steps(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def steps(completions, segments):\n    return [[float(len(s)) for s in one] for one in segments]\n"
    )

    async def main() -> list[Scored | Failure]:
        config = RewardConfig(functions=(RewardSpec(f"{path}:steps", segments="\n\n"),))
        scorer = RewardScorer(config, decode=decode)
        try:
            return await scorer.score(PROMPT, [Episode((Turn(PROMPT.tokens, completion(FIRST)),))])
        finally:
            await scorer.close()

    (one,) = asyncio.run(main())
    assert (
        isinstance(one, Scored) and [score for _, score, _ in one.segments[0]] == [3.0, 4.0, 1.0] and one.reward == 8.0
    )


def rows_of(advantage: str, *scored: Scored | Failure) -> list[tuple[float, ...]]:
    algorithm = algorithm_of(AlgoConfig(advantage=advantage, credit="segment"), 16)
    return [
        row.advantages for row in algorithm.rows(PROMPT, [rollout for rollout in scored if isinstance(rollout, Scored)])
    ]


@pytest.mark.parametrize(
    ("form", "first", "second"),
    [
        # returns: sum 1.75 0.75 0.5 and 0.875 0.125; min 0.25 0.25 0.5 and 0.125 0.125. Each is less the mean of its place.
        ("sum", [0.4375] * 2 + [0.3125] * 2 + [0.0] * 2, [-0.4375] * 2 + [-0.3125]),
        ("min", [0.0625] * 4 + [0.0] * 2, [-0.0625] * 3),
    ],
)
def test_every_token_has_the_advantage_of_its_step(form, first, second):
    one, other = rows_of("centred", *scored_by([[1.0, 0.25, 0.5], [0.75, 0.125]], form))
    assert list(one) == pytest.approx(first) and list(other) == pytest.approx(second)


def test_other_rewards_come_at_the_end_and_count_for_all_steps():
    one, other = scored_by([[0.0, 0.0, 0.0], [0.0, 0.0]])
    assert isinstance(one, Scored) and isinstance(other, Scored)
    from msgspec.structs import replace

    right = replace(one, reward=one.reward + 1.0, rewards={**one.rewards, "exact": 1.0})
    found = rows_of("centred", right, other)
    assert found[0] == (0.5,) * 4 + (0.0,) * 2 and found[1] == (-0.5,) * 3


def test_steps_of_several_turns_and_context_between_them():
    """The result of a tool belongs to no step, and no step reaches over a turn."""
    turns = (Turn(PROMPT.tokens, completion((0, 4, 1))), Turn((60, 61), completion((1, 100)), parents=(0,)))

    async def main() -> list[Scored | Failure]:
        service = ServiceConfig(name="steps", url="http://prm", segments="\n\n")
        scorer = RewardScorer(
            RewardConfig(services=(service,)), poster=ScriptedPost(lambda body: [[1.0, 2.0, 4.0], [0.0]]), decode=decode
        )
        return await scorer.score(PROMPT, [Episode(turns), Episode((Turn(PROMPT.tokens, completion((1,))),))])

    one, other = virtual_time.run(main())
    assert isinstance(one, Scored) and one.segments == (((2, 1.0, 7.0), (3, 2.0, 6.0)), ((2, 4.0, 4.0),))
    found = rows_of("centred", one, other)
    assert found[0] == (3.5, 3.5, 0.0, 0.0, 0.0, 0.0, 0.0) and found[1] == (-3.5,)


def test_credit_by_step_is_refused_with_what_compares_whole_rollouts():
    with pytest.raises(ValueError, match="algo.credit"):
        AlgoConfig("opo", credit="segment")
