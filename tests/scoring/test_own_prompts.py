"""Teachers with a prompt of their own: what they read, which completions they are shown, and what is refused."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.batches import Failure
from headrace.core.errors import ConfigError
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.core.weights import WeightUpdate
from headrace.episodes.scoring.teacher.config import TeacherConfig
from headrace.episodes.scoring.teacher.own_prompt import OwnPrompt, first_problem
from headrace.episodes.scoring.teacher.stage import Teacher, TraceScorer
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.prompts import PromptMaker
from headrace.facts.waits import Waits
from headrace.models.chat import ChatEncoder
from headrace.run.build import build_scorer
from headrace.run.config import load_config
from headrace.run.rehearsal.words import shown_to_teacher
from headrace.run.rehearse import try_files
from headrace.run.rehearsed import Rehearsal
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.fake_scorer import FakeScorer
from support.tiny_run import tiny_config

SHOWN = "{prompt}\n\nA solution: {solution}"
TASK = {"kind": "jsonl", "path": "rows.jsonl"}
PROMPT = Prompt("train/0/3", "2 + 2?", (7, 8, 9), {"solution": "4"})


def opinion(tokens: Sequence[int]) -> float:
    """Depends on everything before a token, and on its place."""
    return -sum((place + 1) * token for place, token in enumerate(tokens)) / 100


def said(*tokens: int, text: str = "") -> Episode:
    done = Completion(tokens, (-1.0,) * len(tokens), (VersionSpan(0, 3, 3),), "stop", text)
    return Episode((Turn(PROMPT.tokens, done),))


class Codes:
    """Writes prompts as the codes of their characters."""

    def __init__(self, reads_sibling: bool = False, right: float = 1.0) -> None:
        self.reads_sibling, self.right = reads_sibling, right

    def tokens(self, prompt: Prompt, sibling: str = "") -> tuple[int, ...]:
        if "solution" not in prompt.columns:
            raise ConfigError("there is no column solution")
        return tuple(map(ord, f"{prompt.text}{prompt.columns['solution']}{sibling}"))


def score(shows: Codes | None, episodes: Sequence[Episode], inner: Any, prompt: Prompt = PROMPT, top: int = 0) -> Any:
    engine = FakeEngine(0.0, opinion=opinion)

    async def go() -> Any:
        await engine.load(WeightUpdate(version=6, kind="full", fingerprint="fake-6", nbytes=0, seconds=0.0))
        teacher = Teacher("self", engine, lambda prompt: True, top, shows)
        waits = Waits(lambda fact: None, lambda: 0.0, 60, 120)
        return await TraceScorer(inner, [teacher], None, waits, lambda said: None).score(prompt, episodes)

    return asyncio.run(go()), engine.requests


# --- the stage ---------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 2))
def test_the_sampled_tokens_are_scored_behind_the_teachers_prompt_and_nothing_else_changes(tokens: list[int], top: int):
    episode = said(*tokens)
    ((one,), (request,)) = score(Codes(), [episode], FakeScorer(), top=top)
    front = tuple(map(ord, "2 + 2?4"))
    trace = one.teachers[0]
    assert request.prompt == (*front, *tokens), "exactly the sampled ids (C5)"
    assert trace.logprobs == tuple(opinion((*front, *tokens[: t + 1])) for t in range(len(tokens)))
    assert trace.versions == (6,) * len(tokens) and one.episode is episode
    if top:
        ids = np.frombuffer(trace.top.tokens, np.int32).reshape(len(tokens), top)
        assert ids[:, 0].tolist() == tokens
    ((plain,), _) = score(None, [episode], FakeScorer())
    assert plain.teachers[0].logprobs != trace.logprobs


def by_text(prompt: Prompt, episode: Episode) -> float:
    """The completion says its reward."""
    return float(episode.last.text)


def test_each_rollout_is_scored_beside_the_first_other_one_that_was_right():
    texts = ["0", "1", "0.5", "1.0", "no number"]
    results, requests = score(Codes(True), [said(5, text=text) for text in texts], FakeScorer(reward=by_text))
    assert isinstance(results[4], Failure), "what has no reward is neither shown nor scored"
    shown = ["1", "1.0", "1", "1"]
    assert [request.prompt for request in requests] == [(*map(ord, f"2 + 2?4{text}"), 5) for text in shown]
    for result, request in zip(results[:4], requests, strict=True):
        assert result.teachers[0].logprobs == (opinion(request.prompt),)


def test_who_alone_is_right_learns_nothing_and_so_does_a_group_without_a_right_one():
    results, requests = score(Codes(True), [said(5, text=text) for text in "010"], FakeScorer(reward=by_text))
    assert len(requests) == 2 and all(map(math.isnan, results[1].teachers[0].logprobs))
    assert results[1].teachers[0].name == "self" and results[0].teachers[0].logprobs[0] < 0
    results, requests = score(Codes(True), [said(5, text="0")] * 3, FakeScorer(reward=by_text))
    assert not requests and all(math.isnan(one.teachers[0].logprobs[0]) for one in results)
    _, requests = score(Codes(True, right=0.0), [said(5, text="0")] * 3, FakeScorer(reward=by_text))
    assert len(requests) == 3


def test_only_who_is_shown_completions_waits_for_the_rewards():
    class Slow(FakeScorer):
        async def score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Scored | Failure]:
            await asyncio.sleep(0.05)
            order.append("reward")
            return await super().score(prompt, episodes)

    class Writes(Codes):
        def tokens(self, prompt: Prompt, sibling: str = "") -> tuple[int, ...]:
            order.append("teacher")
            return super().tokens(prompt, sibling)

    for reads, wanted in ((False, ["teacher", "teacher", "reward"]), (True, ["reward", "teacher", "teacher"])):
        order: list[str] = []
        score(Writes(reads), [said(5, text="1"), said(6, text="1")], Slow(reward=by_text))
        assert order == wanted


def test_a_prompt_that_cannot_be_written_is_a_failure_of_its_rollouts():
    bare = Prompt("train/0/1", "2 + 2?", (7, 8, 9))
    results, requests = score(Codes(), [said(5)], FakeScorer(), bare)
    assert results == [Failure("teacher_refused", "self: there is no column solution")] and not requests


# --- the prompt ----------------------------------------------------------------------------------------------------------------


def writer(encoder: ChatEncoder, words: str = SHOWN, **task: Any) -> OwnPrompt:
    teacher = TeacherConfig(name="self", student="snapshot", prompt=words)
    config = TaskConfig(**{**TASK, **task})
    return OwnPrompt(teacher, config, encoder.using(config.rendering))


def test_the_teacher_reads_what_the_task_would_have_made_of_the_longer_question(tiny_llama: Path):
    encoder = ChatEncoder(tiny_llama)
    wanted = encoder.encode_messages(
        [{"role": "system", "content": "add"}, {"role": "user", "content": "2 + 2?\n\nA solution: 4"}]
    )[1]
    assert writer(encoder, system="add").tokens(PROMPT) == wanted
    plain = writer(encoder, "{prompt} ({solution}) ", chat=False)
    assert plain.tokens(PROMPT) == encoder.encode_text("2 + 2? (4) ")
    named = writer(encoder, "{prompt} {{x}} {question} {solution} {sibling}", prompt="question")
    wanted = encoder.encode_messages([{"role": "user", "content": "2 + 2? {x} 2 + 2? 4.5 {prompt}"}])[1]
    assert named.tokens(replace(PROMPT, columns={"solution": 4.5}), "{prompt}") == wanted, (
        "what is put in is not read again"
    )


def test_the_last_question_of_a_conversation_is_worded_anew_and_the_rest_stays(tiny_llama: Path):
    encoder = ChatEncoder(tiny_llama)
    talk = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "I am"},
    ]
    columns = {"prompt": talk, "solution": "yes"}
    prompt = PromptMaker(TaskConfig(**TASK), encoder).make("train/0/0", talk, columns, "prompt")
    anew = [*talk[:2], {"role": "user", "content": "sure?\n\nA solution: yes"}, talk[3]]
    assert writer(encoder).tokens(prompt) == encoder.encode_messages(anew)[1] != prompt.tokens
    assert prompt.columns["prompt"] == talk, "the policy's conversation is as it was"


def test_the_text_of_a_special_token_in_a_solution_ends_no_turn(tiny_llama: Path):
    encoder = ChatEncoder(tiny_llama)
    end = encoder.special[encoder.endings.written]
    shown = writer(encoder).tokens(replace(PROMPT, columns={"solution": f"4{end}"}))
    usual = writer(encoder).tokens(PROMPT)
    assert shown.count(encoder.endings.written) == usual.count(encoder.endings.written)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"solutions": "4"}, "there is no column solution in it; did you mean solutions?; its columns are: solutions"),
        ({"solution": None}, "its column solution is empty (null) and no text"),
        ({"solution": ["4"]}, "its column solution is of type list and no text"),
        ({"solution": " "}, "its column solution is empty"),
        ({"solution": "4", "sibling": "5"}, "rename the column"),
    ],
)
def test_a_row_that_lacks_what_is_shown_is_named(columns: dict[str, Any], problem: str, tiny_llama: Path):
    shows = writer(ChatEncoder(tiny_llama), "{prompt} {solution} {sibling}")
    assert problem in shows.problem(columns)
    with pytest.raises(ConfigError, match="the prompt train/0/3 cannot be shown to the teacher self: "):
        shows.tokens(replace(PROMPT, columns=columns))
    taken = TeacherConfig(name="self", student="snapshot", prompt=SHOWN)
    rows = [{"solution": "4", "kind": "a"}, {"kind": "b", **columns}]
    assert first_problem([(taken, shows)], rows).startswith("row 2 cannot be shown to the teacher self: ")
    before = TeacherConfig(name="other", path="m", route={"column": "kind", "values": ["b"]})
    assert first_problem([(before, None), (taken, shows)], rows) == "", "another teacher scores it"


def test_prompts_that_are_too_long_for_the_teacher_are_told_with_lengths_that_fit(tiny_llama: Path):
    encoder = ChatEncoder(tiny_llama)
    for words, behind in (("{prompt} {solution}", 8), ("{prompt} {solution} {sibling}", 16)):
        shows = writer(encoder, words)
        prompts = [PROMPT, replace(PROMPT, columns={"solution": "4" * 30})]
        needed = len(shows.tokens(prompts[1])) + behind

        def rehearsed(context: int, of: Sequence[Prompt], shows: OwnPrompt = shows) -> Any:
            return shown_to_teacher("self", shows, of, encoder.written, context=context, most=8)

        lines, problem, certain = rehearsed(needed - 1, prompts)
        assert (
            problem.startswith("1 of 2 prompts") and f"set engine.context_length of its table to {needed}," in problem
        )
        assert not certain and "2 + 2? 4" in dict(lines)["it reads"]
        assert rehearsed(needed, prompts)[1] == "" and rehearsed(needed - behind, prompts[1:])[2]


def rehearsed(directory: Path, model: Path, **changes: Any) -> Rehearsal:
    teacher = {"name": "self", "path": str(model), "prompt": "{prompt} {answer}", **changes}
    config = tiny_config(directory, model, algo={"name": "opsd"}, teachers=[teacher], eval={"prompts": 4})
    config["task"]["held_out_path"] = str(directory / "apart.jsonl")
    apart = [{"prompt": f"{i} + 1?"} for i in range(20)]
    (directory / "apart.jsonl").write_text("\n".join(map(json.dumps, apart)))
    return asyncio.run(try_files(load_config(config)))


def test_the_rehearsal_shows_what_the_teacher_reads_and_refuses_what_it_cannot(tmp_path: Path, tiny_llama: Path):
    found = rehearsed(tmp_path, tiny_llama)
    assert not found.problems, "held-out rows are shown to no teacher, and need no answer"
    first = next(text for label, text in found.sections["Prompts"] if label == "the first")
    shown = next(text for label, text in found.sections["Teachers"] if label == "it reads")
    question = first.removeprefix("<user>").removesuffix("<end><assistant>")
    assert shown.startswith(f"<user>{question} ") and len(shown) > len(first)
    (problem,) = rehearsed(tmp_path, tiny_llama, prompt="{prompt} {answers}").problems
    assert "rows.jsonl, row 1 cannot be shown to the teacher self: there is no column answers" in problem
    long = "{prompt} {answer} " + "so much " * 8
    (problem,) = rehearsed(tmp_path, tiny_llama, prompt=long).problems
    (needed,) = re.findall(r"set engine.context_length of its table to (\d+),", problem)
    assert problem.startswith("all prompts")
    assert not rehearsed(tmp_path, tiny_llama, prompt=long, engine={"context_length": int(needed)}).problems


def test_completions_are_not_shown_as_right_without_a_reward():
    changes: dict[str, Any] = {"algo": {"name": "sdpo"}, **teacher(prompt="{prompt} {sibling}")}
    without = {name: table for name, table in BASE.items() if name != "reward"}
    with pytest.raises(
        ConfigError,
        match="the teacher self shows another completion that was right, .*; set reward.function, or show it a column",
    ):
        build_scorer(load_config({**without, **changes}))
    build_scorer(load_config({**without, **teacher(), "eval": {"prompts": 0}}))
    build_scorer(load_config({**without, **changes}), [by_length])


def by_length(prompts: list[str], completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


# --- settings ------------------------------------------------------------------------------------------------------------------

SELF = {"name": "self", "student": "snapshot", "prompt": SHOWN}
BASE = {
    "model": {"path": "m"},
    "task": TASK,
    "reward": {"function": "reward.py:right"},
    "algo": {"name": "opsd"},
    "teachers": [SELF],
}


def teacher(**changes: Any) -> dict[str, Any]:
    return {"teachers": [{**SELF, **changes}]}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (teacher(prompt=""), 'give it a prompt, such as "{prompt}\\n\\nA solution:\\n{solution}", or set algo.name = opd_topk'),
        ({"algo": {"name": "sdpo"}}, 'such as "{prompt}\\n\\nAnother answer, which is right:\\n{sibling}"'),
        (teacher(prompt="A solution: {solution}"), "leaves out the question: write {prompt} where it is to stand"),
        (teacher(prompt="{prompt} again"), "add one in braces, such as {solution}, or {sibling}"),
        (teacher(prompt="{prompt} {"), "a brace that is text is written twice"),
        (teacher(prompt="{prompt} {}"), "a brace that is text is written twice"),
        (teacher(prompt="{prompt} {solution:>9}"), "a brace that is text is written twice"),
        (teacher(right=0.5), "right of the teacher self needs a prompt with {sibling}; set it, or remove right"),
        (
            {"algo": {"name": "grpo"}, "teachers": [{"name": "t", "path": "m", "mode": "text", "prompt": SHOWN}]},
            'prompt of the teacher t needs mode = "tokens"',
        ),
        ({"environment": {"function": "play.py:play"}}, "with environment.function the environment writes what the policy reads"),
        ({"task": {**TASK, "examples": 2}}, "set task.examples = 0, and write them into task.system"),
        ({"task": {**TASK, "images": ["image"]}}, "task.images shows the policy images, which the teacher would not see"),
        ({"algo": {"name": "sdpo"}, "rollout": {"group_size": 1}, **teacher(prompt="{prompt} {sibling}")}, "raise rollout.group_size"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_with_the_remedy(changes: dict[str, Any], complaint: str):
    with pytest.raises(ConfigError) as refused:
        load_config({**BASE, **changes})
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        teacher(prompt="{prompt}\n\nA solution:\n{solution}"),
        {"algo": {"name": "opd_topk"}, **teacher(prompt="")},
        {"algo": {"name": "opd"}},
        {
            "algo": {"name": "sdpo"},
            **teacher(prompt="{prompt}\n\nAnother answer, which is right:\n{sibling}", right=0.5),
        },
        teacher(prompt="{prompt} {{ {solution}"),
        teacher(student="", path="m"),
    ],
)
def test_the_remedies_are_accepted(changes: dict[str, Any]):
    load_config({**BASE, **changes})
