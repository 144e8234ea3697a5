"""Teachers and the reference as a stage of scoring: what they are asked, what becomes of their answers, and of their failures."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.batches import Failure
from headrace.core.errors import CheckpointError, ConfigError, IdentityError, WorkerDied
from headrace.core.types import Completion, Episode, Prompt, Scored, Stop, Turn, VersionSpan
from headrace.core.weights import WeightUpdate
from headrace.episodes.scoring.teacher.stage import NoReward, Teacher, TraceScorer, score_episode, vocabulary_problem
from headrace.episodes.scoring.teacher.text_teacher import TextScorer, TextTeacher, with_system
from headrace.facts.facts import Waited
from headrace.facts.waits import Waits
from headrace.run.config import load_config
from headrace.run.learning_problems import teacher_engine
from headrace.run.teaching import messages_of
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.fake_scorer import FakeScorer
from headrace.trainer.step.reference import Shadow
from headrace.weight_sync.directory import DirectoryReceiver, offer

PROMPT = Prompt("p", "2 + 2?", (7, 8, 9), {"kind": "sum", "level": 2})


def opinion(tokens: Sequence[int]) -> float:
    """Depends on everything before a token: a wrong context gives another number."""
    return -sum((place + 1) * token for place, token in enumerate(tokens)) / 100


def said(*tokens: int, text: str = "", stop: Stop = "stop") -> Completion:
    return Completion(tokens, (-1.0,) * len(tokens), (VersionSpan(0, 3, 3),), stop, text)


def single(*tokens: int, **rest: Any) -> Episode:
    return Episode((Turn(PROMPT.tokens, said(*tokens, **rest)),))


def engine(version: int = 0, **options: Any) -> FakeEngine:
    made = FakeEngine(**{"seconds_per_token": 0.0, "opinion": opinion, **options})
    asyncio.run(
        made.load(WeightUpdate(version=version, kind="full", fingerprint=f"fake-{version}", nbytes=0, seconds=0.0))
    )
    return made


def waits(facts: list[Any] | None = None) -> Waits:
    return Waits((facts if facts is not None else []).append, lambda: 0.0, 60, 120)


def everybody(prompt: Prompt) -> bool:
    return True


def run(scorer: Any, prompt: Prompt, episodes: Sequence[Episode]) -> list[Any]:
    return asyncio.run(scorer.score(prompt, episodes))


# --- by token --------------------------------------------------------------------------------------------------------------

TREE = Episode(
    (
        Turn((7, 8, 9), said(1, 2)),
        Turn((20,), said(3), parents=(0,)),
        Turn((21, 22), said(4, 5, 6), parents=(1,)),
        Turn((23,), said(10), parents=(0,)),  # forks behind the first turn
        Turn((24,), said(11, 12), parents=(3, 2)),  # joins: it goes on from its first parent
    )
)
CONTEXTS = [
    (7, 8, 9),
    (7, 8, 9, 1, 2, 20),
    (7, 8, 9, 1, 2, 20, 3, 21, 22),
    (7, 8, 9, 1, 2, 23),
    (7, 8, 9, 1, 2, 23, 10, 24),
]


def test_every_turn_is_scored_given_its_whole_path_and_paths_are_asked_once():
    asked = engine(version=4)
    scores = asyncio.run(score_episode(asked, PROMPT, TREE))
    assert isinstance(scores, tuple)
    for turn, context, score in zip(TREE.turns, CONTEXTS, scores, strict=True):
        tokens = turn.completion.tokens
        assert score.logprobs == tuple(opinion((*context, *tokens[: t + 1])) for t in range(len(tokens)))
        assert score.version == 4
    assert sorted(len(request.prompt) for request in asked.requests) == [10, 12], "two paths hold all five turns"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=7))
@settings(max_examples=60)
def test_any_tree_of_turns_is_scored_as_if_each_were_asked_alone(shape: list[tuple[int, int, int]]):
    turns: list[Turn] = []
    for number, (between, length, back) in enumerate(shape):
        parents = (number - 1 - back % number,) if number and back < 5 else ()
        context = tuple(
            range(30, 30 + between)
        )  # a path may begin with other tokens than the prompt's: a role's, a judge's
        turns.append(Turn(context, said(*range(1, length + 1)), parents))
    scores = asyncio.run(score_episode(engine(), PROMPT, Episode(tuple(turns))))
    assert isinstance(scores, tuple)

    def path(number: int) -> tuple[int, ...]:
        turn = turns[number]
        before = (*path(turn.parents[0]), *turns[turn.parents[0]].completion.tokens) if turn.parents else ()
        return (*before, *(turn.context if turn.parents else turn.context or PROMPT.tokens))

    for number, (turn, score) in enumerate(zip(turns, scores, strict=True)):
        tokens = turn.completion.tokens
        assert score.logprobs == tuple(opinion((*path(number), *tokens[: t + 1])) for t in range(len(tokens)))


def test_the_most_probable_tokens_are_those_of_the_turn():
    scores = asyncio.run(score_episode(engine(), PROMPT, TREE, top=3))
    assert isinstance(scores, tuple)
    for turn, score in zip(TREE.turns, scores, strict=True):
        tokens = turn.completion.tokens
        assert score.top is not None and score.top.k == 3
        ids = np.frombuffer(score.top.tokens, np.int32).reshape(len(tokens), 3)
        assert ids[:, 0].tolist() == list(tokens)
        first = np.frombuffer(score.top.logprobs, np.float32).reshape(len(tokens), 3)[:, 0]
        assert first == pytest.approx(np.array(score.logprobs, dtype=np.float32))


def teaching(
    *teachers: Teacher, reference: FakeEngine | None = None, inner: Any = None, facts: Any = None
) -> TraceScorer:
    told: list[str] = facts if facts is not None else []
    return TraceScorer(inner or FakeScorer(), teachers, reference, waits(), told.append)


def test_traces_and_references_join_the_reward():
    scorer = teaching(Teacher("north", engine(version=5), everybody), reference=engine())
    one, two = run(scorer, PROMPT, [single(1, 2), single(3)])
    assert isinstance(one, Scored) and one.rewards["fake"] == one.reward
    assert one.teachers[0].name == "north" and one.teachers[0].versions == (5, 5)
    assert one.teachers[0].logprobs == one.references[0] == (opinion((7, 8, 9, 1)), opinion((7, 8, 9, 1, 2)))
    assert two.teachers[0].versions == (5,) and two.references == ((opinion((7, 8, 9, 3)),),)


def test_the_first_teacher_that_takes_a_prompt_has_it_and_prompts_of_nobody_are_counted_and_told():
    told: list[str] = []
    sums = Teacher("sums", engine(), lambda prompt: prompt.columns["kind"] == "sum")
    hard = Teacher("hard", engine(), lambda prompt: prompt.columns["level"] > 1)
    scorer = teaching(sums, hard, facts=told)
    names = [
        run(scorer, Prompt("p", "", (7, 8, 9), {"kind": kind, "level": level}), [single(1, 2)])[0].teachers[0].name
        for kind, level in (("sum", 2), ("text", 2), ("text", 1), ("text", 1), ("text", 1))
    ]
    assert names == ["sums", "hard", "", "", ""]
    assert scorer.untaught == 3 and len(told) == 2, "told at the first and the second, then ever more rarely"
    nobody = run(scorer, Prompt("p", "", (7, 8, 9), {"kind": "text", "level": 0}), [single(1, 2)])[0]
    assert all(map(math.isnan, nobody.teachers[0].logprobs)) and len(nobody.teachers[0].logprobs) == 2


def test_what_a_teacher_fails_at_is_data_and_only_that_rollout_is_lost():
    picky = FakeEngine(0.0, failure_rate=0.5, opinion=opinion, seed=1)
    asyncio.run(picky.load(WeightUpdate(version=0, kind="full", fingerprint="fake-0", nbytes=0, seconds=0.0)))
    results = run(teaching(Teacher("north", picky, everybody)), PROMPT, [single(t) for t in range(20)])
    failed = [one for one in results if isinstance(one, Failure)]
    assert 0 < len(failed) < 20
    assert {(one.reason, one.detail) for one in failed} == {("teacher_error", "north: injected failure")}
    reasons = {
        one.reason
        for one in run(teaching(reference=picky), PROMPT, [single(t) for t in range(20)])
        if isinstance(one, Failure)
    }
    assert reasons == {"reference_error"}


class Refusing(FakeEngine):
    async def generate(self, request: Any) -> Any:
        raise ValueError("the prompt needs 9 tokens, the engine's context holds 8")


class Lost(FakeEngine):
    async def generate(self, request: Any) -> Any:
        raise WorkerDied("teacher north", "was killed")


def test_a_refusal_is_data_and_a_lost_engine_ends_the_run():
    assert run(teaching(Teacher("north", Refusing(), everybody)), PROMPT, [single(1)]) == [
        Failure("teacher_refused", "north: the prompt needs 9 tokens, the engine's context holds 8")
    ]
    with pytest.raises(WorkerDied, match="teacher north"):
        run(teaching(Teacher("north", Lost(), everybody)), PROMPT, [single(1)])


class Interrupting(FakeEngine):
    """Is told to end all that it has, every other time."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.asked: list[str] = []

    async def generate(self, request: Any) -> Any:
        done = await super().generate(request)
        self.asked.append(request.id)
        return done if len(self.asked) % 2 == 0 else replace(done, stop="interrupted", prompt_logprobs=None)


def test_who_is_interrupted_by_a_swap_is_asked_again():
    (plain,) = run(teaching(reference=engine()), PROMPT, [single(1, 2)])
    interrupting = Interrupting(seconds_per_token=0.0, opinion=opinion)
    asyncio.run(interrupting.load(WeightUpdate(version=0, kind="full", fingerprint="fake-0", nbytes=0, seconds=0.0)))
    (again,) = run(teaching(reference=interrupting), PROMPT, [single(1, 2)])
    assert len(set(interrupting.asked)) == 2 and again.references == plain.references


def test_a_reward_that_failed_stays_the_reason():
    scorer = teaching(Teacher("north", Refusing(), everybody), inner=FakeScorer(failure_rate=1.0))
    assert run(scorer, PROMPT, [single(1)])[0].reason == "reward_raised"


def test_teachers_are_asked_beside_the_reward_under_named_waits():
    facts: list[Any] = []

    async def go() -> str:
        north = FakeEngine(0.05, opinion=opinion)
        await north.load(WeightUpdate(version=0, kind="full", fingerprint="fake-0", nbytes=0, seconds=0.0))
        clock = asyncio.get_running_loop().time
        named = Waits(facts.append, clock, 60, 120)
        scorer = TraceScorer(FakeScorer(seconds=0.05), [Teacher("north", north, everybody)], north, named, facts.append)
        scoring = asyncio.ensure_future(scorer.score(PROMPT, [single(1)] * 4))
        await asyncio.sleep(0.02)
        picture = named.picture()
        assert len(north.requests) == 8, "all rollouts are under way at once, while the reward is"
        await scoring
        return picture

    picture = asyncio.run(go())
    assert "scoring has waited" in picture and "the teacher north" in picture and "the reference" in picture
    assert {fact.what for fact in facts if isinstance(fact, Waited)} == {"the teacher north", "the reference"}


# --- by text ---------------------------------------------------------------------------------------------------------------


def text_teacher(asked: FakeEngine, weight: float = 0.5, takes: Callable[[Prompt], bool] = everybody) -> TextTeacher:
    """Its vocabulary: a token for every two characters."""
    return TextTeacher(
        name="critic",
        engine=asked,
        takes=takes,
        weight=weight,
        encode_prompt=lambda prompt: (1, *map(ord, prompt.text)),
        encode_messages=written,
        encode_completion=pairs,
        has_ended=lambda done: done.stop == "stop" and done.tokens[-1] != PLAIN,
    )


PLAIN = 99
"""A token that is no end of the policy's: a completion behind it was ended by a stop string."""


def written(messages: Sequence[dict[str, Any]], prompt: Prompt = PROMPT) -> tuple[int, ...]:
    """The teacher's template: its tokens of each message between 1 and 2, and 1 for the turn that is opened. Tools need a call."""
    if any("tool_calls" not in before for before, one in pairwise(messages) if one["role"] == "tool"):
        raise ConfigError("no call")
    rendered = [f"{message['role'][0]}{message['content']}{message.get('tool_calls', '')}" for message in messages]
    return (*(token for text in rendered for token in (1, ord(text[0]), *pairs(text[1:], True))), 1, ord("a"))


def pairs(text: str, ended: bool) -> tuple[int, ...]:
    return (*(ord(text[i]) for i in range(0, len(text), 2)), *((2,) if ended else ()))


def test_a_text_teacher_reads_the_text_with_its_own_tokens_and_is_a_named_reward_by_byte():
    asked = engine()
    episode = single(41, 42, text="héé")
    (one,) = run(TextScorer(FakeScorer(), [text_teacher(asked)], waits()), PROMPT, [episode])
    front, behind = (1, *map(ord, "2 + 2?")), (ord("h"), ord("é"), 2)
    total = sum(opinion((*front, *behind[: t + 1])) for t in range(3))
    assert asked.requests[0].prompt == (*front, *behind)
    assert one.rewards["critic"] == pytest.approx(total / (5 + 1)), "5 bytes of UTF-8 and the end of the turn"
    assert one.reward == pytest.approx(one.rewards["fake"] + 0.5 * one.rewards["critic"])
    assert one.episode is episode, "the policy's tokens stay as they are (C5)"
    (cut,) = run(TextScorer(NoReward(), [text_teacher(asked)], waits()), PROMPT, [single(41, text="hé", stop="length")])
    assert asked.requests[1].prompt[-1] != 2 and cut.rewards["critic"] == pytest.approx(opinion((*front, ord("h"))) / 3)
    assert list(cut.rewards) == ["critic"]
    stopped = single(41, PLAIN, text="hé")
    (by_string,) = run(TextScorer(NoReward(), [text_teacher(asked)], waits()), PROMPT, [stopped])
    assert asked.requests[2].prompt == asked.requests[1].prompt, "a stop string is no end that the teacher is asked for"
    assert by_string.rewards == cut.rewards


def test_a_text_teacher_that_is_not_asked_leaves_the_reward_alone():
    scorer = TextScorer(FakeScorer(), [text_teacher(engine(), takes=lambda prompt: False)], waits())
    (one,) = run(scorer, PROMPT, [single(1, text="x")])
    assert list(one.rewards) == ["fake"] and one.reward == one.rewards["fake"]


def test_what_cannot_be_read_as_text_is_a_failure():
    scorer = TextScorer(NoReward(), [text_teacher(engine())], waits())
    several = Episode((*TREE.turns[:2],))
    empty, turns = run(scorer, PROMPT, [single(5, text="", stop="length"), several])
    assert empty == Failure("teacher_refused", "critic: the completion has no text to score")
    assert turns.reason == "teacher_refused" and "not a conversation of messages" in turns.detail
    (inner,) = run(TextScorer(FakeScorer(failure_rate=1.0), [text_teacher(engine())], waits()), PROMPT, [single(1)])
    assert inner.reason == "reward_raised"
    broken = engine()
    broken.opinion = lambda tokens: math.nan
    (nan,) = run(TextScorer(NoReward(), [text_teacher(broken)], waits()), PROMPT, [single(1, text="x")])
    assert nan.reason == "reward_nan"


def says(role: str, content: str, **rest: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **rest}


def turn(said_: Completion, *messages: dict[str, Any], reply: dict[str, Any] | None = None, **rest: Any) -> Turn:
    return Turn((9,), said_, messages=messages, reply=reply or says("assistant", said_.text), **rest)


def judged_by_hand(*completions: tuple[tuple[int, ...], str, bool]) -> float:
    """The mean per byte over completions, each given all that was before it. `completions`: the tokens before, the text, whether it ended."""
    total = sum(
        opinion((*front, *pairs(text, ended)[: t + 1]))
        for front, text, ended in completions
        for t in range(len(pairs(text, ended)))
    )
    return total / sum(len(text.encode()) + ended for _, text, ended in completions)


def test_a_text_teacher_reads_all_turns_of_a_conversation_in_one_request():
    asked = engine()
    talk = Episode(
        (
            turn(said(41, text="héé"), says("system", "be kind"), says("user", "2?")),
            turn(said(42, text="abc", stop="length"), says("user", "more", problem="raised"), parents=(0,)),
        )
    )
    (one,) = run(TextScorer(NoReward(), [text_teacher(asked)], waits()), PROMPT, [talk])
    first = [says("system", "be kind"), says("user", "2?")]
    second = [*first, says("assistant", "héé"), says("user", "more")]
    expected = judged_by_hand((written(first), "héé", True), (written(second), "abc", False))
    assert one.rewards == {"critic": pytest.approx(expected)}
    assert [request.prompt for request in asked.requests] == [(*written(second), *pairs("abc", False))]


def test_turns_that_branch_or_are_rewritten_are_read_where_they_stand():
    """Two replies to one turn, and one whose template dropped what was before: each is read once, behind its own conversation."""
    asked = engine()
    talk = Episode(
        (
            turn(said(41, text="one"), says("user", "a")),
            turn(said(42, text="two"), says("user", "b"), parents=(0,)),
            turn(said(43, text="three"), says("user", "c"), parents=(0,)),
            turn(said(44, text="four"), says("user", "d"), rewrites=(1,)),
            turn(said(45, text="other"), says("user", "e"), agent="critic"),
        )
    )
    (one,) = run(TextScorer(NoReward(), [text_teacher(asked)], waits()), PROMPT, [talk])
    start = [says("user", "a")]
    after = [*start, says("assistant", "one")]
    deep = [*after, says("user", "b"), says("assistant", "two"), says("user", "d")]
    expected = judged_by_hand(
        (written(start), "one", True),
        (written([*after, says("user", "b")]), "two", True),
        (written([*after, says("user", "c")]), "three", True),
        (written(deep), "four", True),
        (written([says("user", "e")]), "other", True),
    )
    assert one.rewards == {"critic": pytest.approx(expected)}
    assert len(asked.requests) == 3, "the first branch with what follows, the second, and the other role"


def test_a_template_that_wants_calls_for_results_reads_replies_as_calls():
    calls = [{"function": {"name": "look"}}]
    talk = Episode(
        (
            turn(said(41, text="<look>"), says("user", "a"), reply=says("assistant", "", tool_calls=calls)),
            turn(said(42, text="so"), says("tool", "42", tool_call_id="call00001"), parents=(0,)),
        )
    )
    asked = engine()
    (one,) = run(TextScorer(NoReward(), [text_teacher(asked)], waits()), PROMPT, [talk])
    start = [says("user", "a")]
    second = [*start, says("assistant", "", tool_calls=calls), says("tool", "42")]
    expected = judged_by_hand((written(start), "<look>", True), (written(second), "so", True))
    assert one.rewards == {"critic": pytest.approx(expected)} and len(asked.requests) == 2


def test_a_teachers_own_system_message_takes_the_place_of_the_policys():
    user = says("user", "a")
    assert with_system([says("system", "x"), user], "") == [says("system", "x"), user]
    assert with_system([says("system", "x"), user], "y") == with_system([user], "y") == [says("system", "y"), user]


def test_a_template_that_refuses_is_data():
    def refuse(prompt: Prompt) -> tuple[int, ...]:
        raise ConfigError("the chat template refuses messages of the roles tool")

    teacher = TextTeacher(
        name="critic",
        engine=engine(),
        takes=everybody,
        weight=1.0,
        encode_prompt=refuse,
        encode_messages=written,
        encode_completion=pairs,
        has_ended=lambda done: done.stop == "stop",
    )
    (one,) = run(TextScorer(NoReward(), [teacher], waits()), PROMPT, [single(1, text="x")])
    assert one == Failure("teacher_refused", "critic: the chat template refuses messages of the roles tool")


def test_the_teacher_reads_a_conversation_where_there_is_one():
    question = {"role": "user", "content": "2 + 2?"}
    told = {"role": "system", "content": "Be brief."}
    assert messages_of(PROMPT, "prompt", "") == [question]
    assert messages_of(PROMPT, "prompt", "Be brief.") == [told, question]
    talk = [question, {"role": "assistant", "content": "4"}, {"role": "user", "content": "sure?"}]
    assert messages_of(Prompt("p", "sure?", (1,), {"prompt": talk}), "prompt", "Be brief.") == [told, *talk]


# --- vocabularies ----------------------------------------------------------------------------------------------------------


def test_vocabularies_are_equal_or_told_apart():
    words = {"a": 0, "b": 1, "<end>": 2}
    assert vocabulary_problem(words, dict(reversed(words.items()))) == ""
    assert "1 of 3 ids differ, the first: 1 is 'b' for the student and 'c'" in vocabulary_problem(
        words, {"a": 0, "c": 1, "<end>": 2}
    )
    assert "the first: 2 is '<end>' for the student and None" in vocabulary_problem(words, {"a": 0, "b": 1})
    assert vocabulary_problem(words, {**words, "again": 2}) != ""


# --- settings --------------------------------------------------------------------------------------------------------------

BASE = {
    "model": {"path": "m"},
    "task": {"kind": "reasoning_gym", "name": "chain_sum"},
    "reward": {"function": "reasoning_gym"},
}
NORTH = {"name": "north", "path": "org/teacher"}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"algo": {"name": "opd"}}, "there is none; add a [[teachers]] table"),
        ({"teachers": [NORTH]}, "set algo.name = opd or opd_topk"),
        ({"algo": {"name": "opd"}, "teachers": [{**NORTH, "mode": "text"}]}, "there is none"),
        ({"algo": {"name": "opd"}, "teachers": [NORTH], "rollout": {"temperature": 0.7}}, "set rollout.temperature = 1"),
        ({"algo": {"name": "opd"}, "teachers": [NORTH], "rollout": {"top_p": 0.9}}, "remove them"),
        ({"algo": {"kl": {"coef": 0.1, "place": "reward"}}, "rollout": {"temperature": 0.7}}, "the reference's log-probs"),
        ({"algo": {"name": "gkd"}}, 'algo.distill.model = "PATH"; or set algo.name = opd_topk'),
        ({"algo": {"name": "gkd"}, "teachers": [NORTH]}, 'algo.distill.model = "org/teacher" instead of the [[teachers]] table'),
        ({"algo": {"name": "opd_student_topk"}, "teachers": [NORTH]}, "algo.distill.over = student_top compares what no engine returns"),
        ({"algo": {"name": "opd_topk", "distill": {"temperature": 2.0}}, "teachers": [NORTH]}, "algo.distill.temperature = 2 compares"),
        ({"algo": {"name": "gkd", "distill": {"model": "t"}}, "teachers": [NORTH]}, "remove algo.distill.model, or the table"),
        ({"algo": {"name": "opsd", "distill": {"model": "t"}}}, "use a [[teachers]] table with a prompt"),
        ({"algo": {"name": "gkd", "distill": {"model": "t"}}, "train": {"parallel": {"pipeline": 2}}}, "set train.parallel.shard instead"),
        (
            {"algo": {"name": "gkd", "distill": {"model": "t"}}, "lora": {"rank": 4}, "adapters": [{"name": "a"}, {"name": "b"}]},
            "algo.distill.model is the teacher of one policy",
        ),
        (
            {
                "algo": {"name": "gkd", "distill": {"model": "t"}},
                "task": {"kind": "jsonl", "path": "r.jsonl", "images": ["image"]},
                "reward": {"function": "e.py:f"},
            },
            "use [[teachers]], whose engines read the prompt's images",
        ),
        ({"algo": {"name": "opd"}, "teachers": [NORTH, NORTH]}, "2 teachers are called north"),
        ({"algo": {"name": "opd"}, "teachers": [{"name": "north"}]}, "and has neither"),
        ({"algo": {"name": "opd"}, "teachers": [{**NORTH, "student": "average"}]}, "and has both"),
        ({"teachers": [{"name": "n", "student": "average", "mode": "text"}]}, "leave mode = tokens"),
        ({"algo": {"name": "opd"}, "teachers": [{**NORTH, "weight": 0.5}]}, "weight of the teacher north needs mode = "),
        ({"algo": {"name": "opd"}, "teachers": [{**NORTH, "system": "Be terse."}]}, "system of the teacher north needs mode = "),
        ({"algo": {"name": "opd"}, "teachers": [{**NORTH, "every": 5}]}, "every of the teacher north needs student"),
        ({"algo": {"name": "opd"}, "teachers": [{"name": "n", "student": "snapshot", "decay": 0.9}]}, 'needs student = "average"'),
        (
            {"algo": {"name": "opd"}, "teachers": [{"name": n, "student": "average"} for n in "ab"]},
            "a and b are both the student itself",
        ),
        ({"algo": {"name": "opd"}, "teachers": [{**NORTH, "engine": {"kv_gb": 1}}]}, "the teacher north, engine.kv_gb is not a setting; did you mean kv_gib"),
        ({"algo": {"name": "opd"}, "teachers": [{**NORTH, "engine": {"context_length": 64}}]}, "too short for all that the run's"),
        ({"algo": {"name": "opd"}, "teachers": [{**NORTH, "engine": {"cores": [4095]}}]}, "may not use"),
        ({"teachers": [{**NORTH, "name": "reasoning_gym", "mode": "text"}]}, "has the name of a reward function"),
        ({"teachers": [{**NORTH, "mode": "text", "route": {"column": "kind"}}]}, "teachers[0].route.values is missing"),
        ({"teachers": [{**NORTH, "mode": "text", "weigth": 2.0}]}, "did you mean teachers.weight"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_with_the_remedy(changes: dict[str, Any], complaint: str):
    with pytest.raises(ConfigError) as refused:
        load_config({**BASE, **changes})
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    "algo",
    [
        {"name": "gkd", "distill": {"model": "t", "temperature": 2.0}},
        {"name": "opd_student_topk", "distill": {"model": "t"}},
        {"name": "opd", "distill": {"model": "t"}},
        {"name": "opd_topk", "distill": {"kind": "forward"}},
    ],
)
def test_sampling_is_free_where_distributions_are_compared_or_the_trainer_holds_the_teacher(algo: dict[str, Any]):
    served = [] if "model" in algo["distill"] else [NORTH]
    load_config({**BASE, "algo": algo, "teachers": served, "rollout": {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1}})


def test_a_teachers_engine_is_the_runs_with_its_own_settings_on_top():
    teacher = {
        **NORTH,
        "engine": {"kv_gib": 0.25, "dtype": "float32"},
        "route": {"column": "kind", "values": ["sum", 3]},
    }
    config = load_config(
        {**BASE, "algo": {"name": "opd"}, "teachers": [teacher], "engine": {"max_running": 7, "max_adapters": 2}}
    )
    engine = teacher_engine(config.engine, config.teachers[0])
    assert (engine.kv_gib, engine.dtype, engine.max_running, engine.max_adapters) == (0.25, "float32", 7, 0)
    takes = config.teachers[0].takes
    assert takes({"kind": 3}) and takes({"kind": "sum"}) and not takes({"kind": "text"}) and not takes({})


def test_a_teachers_path_is_seen_from_the_config(tmp_path: Path):
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "m/m"\n[task]\nkind = "reasoning_gym"\nname = "chain_sum"\n[reward]\nfunction = "reasoning_gym"\n'
        '[algo]\nname = "opd"\n[[teachers]]\nname = "a"\npath = "../runs/taught"\n[[teachers]]\nname = "b"\npath = "org/name"\n'
    )
    assert [teacher.path for teacher in load_config(tmp_path / "run.toml").teachers] == [
        str(tmp_path.parent / "runs/taught"),
        "org/name",
    ]


# --- the student's shadow --------------------------------------------------------------------------------------------------


class Recording:
    """A sender that keeps what it was given."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.sent: list[dict[str, torch.Tensor]] = []

    def send(self, version: int, parameters: Any, adapter: Any = None) -> WeightUpdate:
        self.slots.append(version % 2)
        self.sent.append({name: tensor.clone() for name, tensor in parameters})
        return WeightUpdate(version=version, kind="full", fingerprint="mark", nbytes=0, seconds=0.0)


def weights(step: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [("a", torch.randn(3, 4, generator=generator)), ("b", torch.randn(5, generator=generator))]


def published(shadow: Shadow, steps: int, first: int = 1) -> list[int | None]:
    """Versions that each optimizer step publishes."""
    versions = []
    for step in range(first, steps + 1):
        shadow.follow(step, weights(step))
        update = shadow.publish()
        versions.append(update.version if update else None)
    return versions


def test_a_snapshot_is_the_student_of_the_last_multiple():
    sender = Recording()
    shadow = Shadow(
        "snapshot", every=2, decay=0.9, dtype=torch.bfloat16, sender=sender, version=0, parameters=weights(0)
    )
    first = shadow.publish()
    assert first is not None and first.version == 0 and shadow.publish() is None
    assert published(shadow, 7) == [None, 2, None, 4, None, 6, None]
    assert sender.slots == [0, 1, 0, 1], "versions are even, the slots alternate all the same"
    for version, sent in zip((0, 2, 4, 6), sender.sent, strict=True):
        assert all(torch.equal(sent[name], tensor.bfloat16()) for name, tensor in weights(version))


def test_an_average_is_the_weighted_sum_of_all_that_was():
    sender = Recording()
    shadow = Shadow(
        "average", every=3, decay=0.8, dtype=torch.bfloat16, sender=sender, version=0, parameters=weights(0)
    )
    shadow.publish()
    assert published(shadow, 6) == [None, None, 3, None, None, 6]
    wanted = 0.8**6 * weights(0)[0][1].double()
    wanted += sum(0.2 * 0.8 ** (6 - step) * weights(step)[0][1].double() for step in range(1, 7))
    assert sender.sent[-1]["a"].dtype == torch.float32, "the sender casts"
    assert torch.allclose(sender.sent[-1]["a"].double(), wanted, atol=1e-6)


@pytest.mark.parametrize("kind", ["snapshot", "average"])
def test_a_shadow_survives_bit_for_bit(kind: Any, tmp_path: Path):
    whole, killed, again = (Recording() for _ in range(3))
    shadow = Shadow(kind, every=2, decay=0.7, dtype=torch.bfloat16, sender=whole, version=0, parameters=weights(0))
    published(shadow, 8)
    before = Shadow(kind, every=2, decay=0.7, dtype=torch.bfloat16, sender=killed, version=0, parameters=weights(0))
    published(before, 5)
    before.save(tmp_path)
    after = Shadow(kind, every=2, decay=0.7, dtype=torch.bfloat16, sender=again, version=5, parameters=weights(5))
    after.restore(tmp_path)
    resumed = after.publish()
    assert resumed is not None and resumed.version == (4 if kind == "snapshot" else 5)
    assert published(after, 8, first=6) == [6, None, 8]
    for mine, theirs in zip(again.sent[1:], whole.sent[-2:], strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in ("a", "b"))


def test_a_shadow_of_another_kind_or_model_is_refused_and_none_is_a_beginning(tmp_path: Path):
    Shadow(
        "average", every=2, decay=0.7, dtype=torch.bfloat16, sender=Recording(), version=3, parameters=weights(3)
    ).save(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"holds the student's average, not its snapshot: .*student = \"average\""
    ):
        Shadow(
            "snapshot", every=2, decay=0.7, dtype=torch.bfloat16, sender=Recording(), version=0, parameters=weights(0)
        ).restore(tmp_path)
    with pytest.raises(CheckpointError, match="belongs to another model"):
        Shadow(
            "average",
            every=2,
            decay=0.7,
            dtype=torch.bfloat16,
            sender=Recording(),
            version=0,
            parameters=[("a", torch.zeros(2))],
        ).restore(tmp_path)
    (tmp_path / "shadow.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Shadow(
            "average", every=2, decay=0.7, dtype=torch.bfloat16, sender=Recording(), version=0, parameters=weights(0)
        ).restore(tmp_path)
    shadow = Shadow(
        "average", every=2, decay=0.7, dtype=torch.bfloat16, sender=Recording(), version=9, parameters=weights(9)
    )
    shadow.restore(tmp_path / "elsewhere")
    assert shadow.version == 9


# --- weights from a directory ----------------------------------------------------------------------------------------------


def test_files_that_were_written_again_are_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    update = offer(tmp_path)
    receiver = DirectoryReceiver(tmp_path, lambda path: {"a": torch.ones(1)}, torch.float32)
    assert update.version == 0 and update.nbytes == 9 and list(receiver.receive(update)) == ["a"]
    (tmp_path / "tokenizer.json").write_text("may be touched")
    receiver.receive(update)
    (tmp_path / "model.safetensors").write_bytes(b"others.")
    with pytest.raises(IdentityError, match="have been written since"):
        receiver.receive(update)


def test_weights_that_lack_a_parameter_are_not_made_up(tiny_llama: Path, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    from headrace.engine.native.runners.skeleton import parameters_from_dir

    tensors = load_file(tiny_llama / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    with pytest.raises(
        ValueError, match=r"lack or do not fit 1 parameters of its config.json, the first: model.norm.weight"
    ):
        parameters_from_dir(tmp_path, torch.float32)
