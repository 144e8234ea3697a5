"""Reward functions written for TRL: what they are called with, and what None means (docs/python.md)."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.algo.advantages import GroupRewards, gdpo, z_scores
from headrace.core.batches import Failure
from headrace.core.errors import ConfigError
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.episodes.scoring.config import RewardConfig, RewardSpec
from headrace.episodes.scoring.job import ScoringJob, call
from headrace.episodes.scoring.reward_scorer import RewardScorer
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.rows import RowsTask

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
CHAT = ScoringJob("2 + 2?", ("4", "five"), ((1,), (2, 3)), {"question": MESSAGES, "answer": "4"}, chat="question")
TEXT = ScoringJob("2 + 2?", ("4", "five"), ((1,), (2, 3)), {"answer": "4"})


def called_with(job: ScoringJob, mark: bool = True) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def look(**given: Any) -> list[float]:
        seen.update(given)
        return [0.0] * len(given["completions"])

    assert call(headrace.trl_reward(look) if mark else look, job) == [0.0, 0.0]
    return seen


def test_a_conversation_stays_one():
    assert called_with(CHAT) == {
        "prompts": [MESSAGES, MESSAGES],
        "completions": [[{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "five"}]],
        "completion_ids": [[1], [2, 3]],
        "answer": ["4", "4"],
    }


def test_text_stays_text():
    assert called_with(TEXT) == {
        "prompts": ["2 + 2?", "2 + 2?"],
        "completions": ["4", "five"],
        "completion_ids": [[1], [2, 3]],
        "answer": ["4", "4"],
    }


def test_a_function_without_the_mark_gets_strings_as_before():
    seen = called_with(CHAT, mark=False)
    assert seen["prompts"] == ["2 + 2?", "2 + 2?"] and seen["completions"] == ["4", "five"]
    assert seen["completion_tokens"] == [[1], [2, 3]] and "completion_ids" not in seen
    assert seen["question"] == [MESSAGES, MESSAGES]


def test_what_a_function_changes_is_its_own():
    def spoil(prompts, completions):
        prompts[0].clear()
        return [float(len(prompt)) for prompt in prompts]

    assert call(headrace.trl_reward(spoil), CHAT) == [0.0, 2.0]
    assert len(MESSAGES) == 2


def test_rows_say_where_their_conversation_is():
    class Encoder:
        shows_tools = ""
        images = None

        def argument_problem(self, names: Any) -> str:
            return ""

        def specials_in(self, messages: Any) -> Any:
            return set()

        def encode_messages(self, messages: Any, tools: Any, arguments: Any) -> Any:
            return "", (1,)

        def encode_text(self, text: str) -> Any:
            return (1,)

    rows = [{"question": MESSAGES, "answer": "4"}, {"question": "3 + 3?", "answer": "6"}]
    config = TaskConfig(kind="python", rows="x", prompt="question", held_out=0, shuffle=False)
    task = RowsTask(config, 0, Encoder(), rows)
    first, second = task.draw(), task.draw()
    assert (first.chat, first.columns["question"], first.text) == ("question", MESSAGES, "2 + 2?")
    assert (second.chat, second.columns) == ("", {"answer": "6"})


# -- None -------------------------------------------------------------------------------------------------------------------


def episode(text: str) -> Episode:
    return Episode((Turn((), Completion((1,), (-1.0,), (VersionSpan(0, 0, 0),), "stop", text)),))


def scored(functions: Any, *texts: str) -> list[Scored | Failure]:
    config = RewardConfig(functions=tuple(RewardSpec(f"python:{name}", weight) for name, _, weight in functions))

    async def go() -> list[Scored | Failure]:
        scorer = RewardScorer(config, [function for _, function, _ in functions])
        try:
            return await scorer.score(Prompt("p", "2 + 2?", (1,), {"answer": "4"}), [episode(text) for text in texts])
        finally:
            await scorer.close()

    return asyncio.run(go())


def for_sums(completions, **columns):
    return [1.0 if "4" in text else None for text in completions]


def length(completions, **columns):
    return [float(len(text)) for text in completions]


def test_none_leaves_the_sum_to_the_others():
    first, second = scored([("sums", headrace.trl_reward(for_sums), 10.0), ("length", length, 0.5)], "4", "five")
    assert isinstance(first, Scored) and isinstance(second, Scored)
    assert (first.reward, first.rewards) == (10.5, {"sums": 1.0, "length": 1.0})
    assert (second.reward, second.rewards) == (2.0, {"length": 4.0})


def test_where_no_function_applies_there_is_no_reward():
    first, second = scored([("sums", headrace.trl_reward(for_sums), 1.0)], "4", "five")
    assert isinstance(first, Scored) and first.reward == 1.0
    assert (
        isinstance(second, Failure) and second.reason == "reward_none" and "no reward function applies" in second.detail
    )


def test_none_of_a_function_without_the_mark_is_a_failure():
    _, second = scored([("sums", for_sums, 1.0), ("length", length, 1.0)], "4", "five")
    assert isinstance(second, Failure) and second.reason == "reward_none"


def test_a_list_that_is_missing_is_a_failure_for_both():
    def forgotten(completions, **columns):
        [1.0 for _ in completions]

    assert all(
        isinstance(rollout, Failure) for rollout in scored([("f", headrace.trl_reward(forgotten), 1.0)], "4", "5")
    )


def test_advantages_by_reward_compare_those_that_have_it():
    with_gap = GroupRewards(
        (1.0, 2.0, 3.0), named={"a": (1.0, math.nan, 3.0), "b": (0.0, 2.0, 4.0)}, weights={"b": 2.0}
    )
    low, high = z_scores((1.0, 3.0))
    assert gdpo(with_gap) == [a + 2.0 * b for a, b in zip((low, 0.0, high), z_scores((0.0, 2.0, 4.0)), strict=True)]


# -- refused ----------------------------------------------------------------------------------------------------------------


def test_what_only_trl_has_is_refused_at_start_unless_it_may_be_missing():
    def needs(completions, trainer_state, **columns):
        return []

    def may(completions, trainer_state=None, log_metric=None):
        return [0.0] * len(completions)

    with pytest.raises(
        ConfigError, match="needs trainer_state, which only TRL's trainers have; give the parameter a default"
    ):
        RewardScorer(RewardConfig(), [headrace.trl_reward(needs)])
    assert call(headrace.trl_reward(may), TEXT) == [0.0, 0.0]


def test_a_function_for_trl_without_its_mark_is_told_of_it():
    def unmarked(prompts, completions, completion_ids):
        return [0.0] * len(completions)

    failure = call(unmarked, TEXT)[0]
    assert isinstance(failure, Failure) and "has to be marked: headrace.trl_reward(function)" in failure.detail


# -- in a file --------------------------------------------------------------------------------------------------------------

FILE = """
import headrace

@headrace.trl_reward
def plain(prompts, completions, completion_ids, **kwargs):
    return [None if one[0]["content"] == "five" else float(len(ids)) for one, ids in zip(completions, completion_ids)]

@headrace.trl_reward
async def later(prompts, completions, **kwargs):
    return [float(len(one)) for one in prompts]
"""


def test_the_mark_works_in_a_file_of_rewards(tmp_path: Path):
    file = tmp_path / "rewards.py"
    file.write_text(FILE)
    config = RewardConfig(functions=(RewardSpec(f"{file}:plain"), RewardSpec(f"{file}:later")))

    async def go() -> list[Scored | Failure]:
        scorer = RewardScorer(config)
        try:
            prompt = Prompt("p", "2 + 2?", (1,), {"question": MESSAGES}, "question")
            return await scorer.score(prompt, [episode("4"), episode("five")])
        finally:
            await scorer.close()

    first, second = asyncio.run(go())
    assert isinstance(first, Scored) and first.rewards == {"plain": 1.0, "later": 2.0}
    assert isinstance(second, Scored) and second.rewards == {"later": 2.0}
