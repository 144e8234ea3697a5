"""Tasks: endless, deterministic, resumable streams of prompts, apart from what is held out; and every bad input."""

from __future__ import annotations

import datetime
import decimal
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.core.batches import RewardsBefore
from headrace.core.errors import ConfigError
from headrace.core.protocols import Task
from headrace.core.types import Prompt
from headrace.durable.journal import DrawnRecord, GoneRecord
from headrace.durable.spelling import jsonable
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.reasoning_gym import BY_HASH, ReasoningGymTask
from headrace.episodes.tasks.rows import RowsTask
from headrace.episodes.tasks.seeds import SeedsTask
from headrace.loop.buffer import Buffer
from headrace.loop.staleness import StalenessConfig
from headrace.testing.fake_task import FakeTask
from support.few import few

NONE: Mapping[str, Any] = {}
ADDING = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


class LetterEncoder:
    """One token a character, so that a test reads what was encoded."""

    shows_tools = ""

    def argument_problem(self, names: Iterable[str]) -> str:
        return "".join(f"{name} is no argument of the template" for name in names if name != "enable_thinking")

    images = None
    unknown = None

    def specials_in(self, messages: Sequence[Mapping[str, Any]]) -> set[str]:
        return {"<end>"} if "<end>" in str(messages) else set()

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] = NONE,
    ) -> tuple[str, tuple[int, ...]]:
        text = "".join(f"[{message['role']}]{message['content']}" for message in messages) + "[assistant]"
        text = "".join(f"{{{tool['function']['name']}}}" for tool in tools) + text
        text += "".join(f"({name}={value})" for name, value in arguments.items())
        return text, self.encode_text(text)

    def encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def lacking(self, characters: Iterable[str]) -> set[str]:
        return set()


def read(prompt: Prompt) -> str:
    return "".join(map(chr, prompt.tokens))


def gym(name: str = "chain_sum", seed: int = 0, **settings: Any) -> ReasoningGymTask:
    settings.setdefault("options", ADDING if name == "chain_sum" else {})
    return ReasoningGymTask(TaskConfig(kind="reasoning_gym", name=name, **settings), seed, LetterEncoder())


def rows(path: Path, seed: int = 0, kind: Any = "jsonl", **settings: Any) -> RowsTask:
    settings.setdefault("held_out", 2)
    return RowsTask(TaskConfig(kind=kind, path=str(path), **settings), seed, LetterEncoder())


def write(path: Path, table: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in table))
    return path


def table(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {i}", "answer": i, "source": "test"} for i in range(count)]


def refusal(make: Any, *arguments: Any, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make(*arguments, **settings)
    return str(caught.value)


def test_a_row_is_one_question_in_every_epoch_whatever_it_is_shown_before(tmp_path: Path) -> None:
    """The rewards of a prompt are kept by it, so that they are found again where the id and the solved examples are others."""
    task = rows(write(tmp_path / "rows.jsonl", table(6)), held_out=1)
    buffer = Buffer(StalenessConfig(groups_per_step=1, max_lag=9), groups_wanted=99, remembers=True)
    drawn = [task.draw() for _ in range(10)]
    assert len({prompt.id for prompt in drawn}) == 10 and len({prompt.text for prompt in drawn}) == 5
    for ticket, prompt in enumerate(drawn):
        before = buffer.rewards_before(prompt)
        assert before and before.groups == ticket // 5
        buffer.count(DrawnRecord(0.0, ticket, prompt))
        buffer.count(GoneRecord(0.0, ticket, "dropped", "no_contrast", rewards=(1.0, 1.0)))
    assert buffer.rewards_before(msgspec.structs.replace(drawn[0], tokens=(1, 2, 3))) == buffer.rewards_before(drawn[0])
    other = msgspec.structs.replace(drawn[0], columns={**drawn[0].columns, "answer": -1})
    assert buffer.rewards_before(other) == RewardsBefore(), "another answer makes another question"


# --- what holds for every task -----------------------------------------------------------------------------------------


@pytest.fixture(params=["gym", "rows", "ordered rows", "fake"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    write(tmp_path / "rows.jsonl", table(12))
    return {
        "gym": lambda seed=0: gym(seed=seed, held_out=20),
        "rows": lambda seed=0: rows(tmp_path / "rows.jsonl", seed, held_out=4),
        "ordered rows": lambda seed=0: rows(tmp_path / "rows.jsonl", seed, held_out=4, shuffle=False),
        "fake": lambda seed=0: FakeTask(seed),
    }[request.param]


def test_every_task_keeps_the_contract(make: Any) -> None:
    task: Task = make()
    held = task.held_out(4)
    drawn = [task.draw() for _ in range(30)]
    assert held == task.held_out(4) == make().held_out(4) and task.held_out(2) == held[:2] and task.held_out(0) == []
    assert len({prompt.id for prompt in [*held, *drawn]}) == 34
    assert drawn == [other.draw() for other in [make()] for _ in range(30)], "the same seed draws the same"
    for prompt in [*held, *drawn]:
        assert msgspec.json.decode(msgspec.json.encode(prompt), type=Prompt) == prompt, "columns are JSON-able"
        assert prompt.tokens


@pytest.mark.parametrize("before", [0, 1, 7, 8, 9, 25])
def test_every_task_goes_on_where_it_stood(make: Any, before: int) -> None:
    task = make()
    for _ in range(before):
        task.draw()
    state = json.loads(json.dumps(task.state()))
    expected = [task.draw() for _ in range(20)]
    resumed = make()
    resumed.draw()
    resumed.restore(state)
    assert [resumed.draw() for _ in range(20)] == expected


def test_asking_for_more_held_out_prompts_than_there_are(tmp_path: Path) -> None:
    for task in (gym(held_out=3), rows(write(tmp_path / "r.jsonl", table(9)), held_out=3)):
        assert "raise task.held_out or lower eval.prompts" in refusal(task.held_out, 4)


# --- reasoning gym -----------------------------------------------------------------------------------------------------


def test_the_prompt_holds_question_template_and_columns() -> None:
    prompt = gym(system="Be short.").draw()
    assert prompt.id == "train/0" and prompt.text.startswith("State the final answer")
    assert read(prompt) == f"[system]Be short.[user]{prompt.text}[assistant]"
    terms = prompt.columns["metadata"]["expression"].removesuffix(" =")
    assert str(eval(terms)) == prompt.columns["answer"]
    assert gym(chat=False).draw().tokens == tuple(map(ord, prompt.text))


def test_other_run_seeds_draw_other_problems_and_hold_out_the_same() -> None:
    first, second = gym(seed=1), gym(seed=2)
    assert first.held_out(20) == second.held_out(20)
    assert {first.draw().text for _ in range(50)} != {second.draw().text for _ in range(50)}


def test_held_out_problems_are_never_drawn_even_when_there_are_few() -> None:
    one_digit = {**ADDING, "max_digits": 1}  # 162 problems or so
    task = gym(options=one_digit, held_out=60, examples=3)
    held = {prompt.text for prompt in task.held_out(60)}
    assert len(held) == 60
    drawn = [task.draw() for _ in range(2000)]
    assert not held & {prompt.text for prompt in drawn}
    shown = read(drawn[0]).split("[user]")[1:-1]
    assert len(shown) == 3 and not any(prompt.text in "".join(shown) for prompt in drawn)
    assert [int(prompt.id.removeprefix("train/")) for prompt in drawn] == sorted(
        {int(prompt.id.removeprefix("train/")) for prompt in drawn}
    )


def test_examples_are_solved_problems_in_front() -> None:
    text = read(gym(examples=2, system="S").draw())
    assert text.startswith("[system]S[user]State") and text.count("[user]") == 3 and text.count("[assistant]") == 3
    for turn in text.split("[user]")[1:-1]:
        question, answer = turn.split("[assistant]")
        assert str(eval(question.split(":")[1].replace("=", ""))) == answer


def test_problems_do_not_repeat_at_the_seam_of_two_blocks() -> None:
    task = gym(options={"min_terms": 4, "max_terms": 6}, held_out=0)
    texts = [task.draw().text for _ in range(1100)]
    assert len(set(texts)) > 1090


@pytest.mark.parametrize(
    ("arguments", "words"),
    few(starmap(pytest.param, [
        ({"name": "chainsum"}, "is not a reasoning_gym dataset; did you mean chain_sum"),
        ({"name": "xyzzy"}, "task.name = xyzzy is not a reasoning_gym dataset (1"),
        ({"options": {"max_term": 3}}, "task.options.max_term is not an option of reasoning_gym chain_sum; did you mean max_terms"),
        ({"options": {"colour": 3}}, "chain_sum; there are allow_negation, max_digits"),
        ({"options": {"min_terms": 9}}, "refuses task.options (min_terms = 9): max_terms must be >= min_terms"),
        ({"options": {"min_terms": "two"}}, "refuses task.options (min_terms = two)"),
        ({"options": {"seed": 3}}, "task.options.seed is decided by the run"),
        ({"options": {"size": 3}}, "task.options.size is decided by the run"),
        ({"name": "rubiks_cube", "examples": 1}, "gives no answers that could be shown; set task.examples = 0"),
        ({"options": {**ADDING, "max_digits": 1}, "held_out": 900}, "different problems were found where 900 are needed; lower task.held_out"),
    ]), keep=4),
)  # fmt: skip
def test_bad_families_and_options(arguments: dict[str, Any], words: str) -> None:
    assert words in refusal(gym, **arguments)


def test_a_family_whose_problems_are_all_held_out() -> None:
    task = gym(options={**ADDING, "max_digits": 1}, held_out=0)
    everything = len({task.draw().text for _ in range(6000)})
    assert "problems in a row were held-out ones; lower task.held_out" in refusal(
        gym, options={**ADDING, "max_digits": 1}, held_out=everything
    )


def test_a_cursor_of_another_task_is_refused() -> None:
    state = gym(seed=1).state()
    assert "the task is not the one that the checkpoint was written with" in refusal(gym(seed=2).restore, state)
    other = gym(options={**ADDING, "max_digits": 1}, seed=1)
    assert "start a new run" in refusal(other.restore, state)


MADE = """
import sys
from reasoning_gym.factory import DATASETS, create_dataset

for family in sys.argv[1:] or sorted(DATASETS):
    if family != "composite":
        problems = create_dataset(family, size=20, seed=7)
        print(family, [(problems[place]["question"], problems[place]["answer"]) for place in (0, 5, 11)])
"""


def made(hashes: str, *families: str) -> dict[str, str]:
    """The problems that a process makes, by family."""
    environment = {**os.environ, "PYTHONHASHSEED": hashes}
    done = subprocess.run(
        [sys.executable, "-c", MADE, *families], env=environment, capture_output=True, text=True, check=True
    )
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " [(" in line)


@pytest.mark.slow
def test_the_families_that_make_other_problems_in_each_process_are_known() -> None:
    several = [made(hashes) for hashes in "1234"]
    assert len(several[0]) > 90
    differ = {family for family in several[0] if len({one[family] for one in several}) > 1}
    assert differ == BY_HASH


@pytest.mark.slow
def test_a_family_that_makes_other_problems_in_each_process_needs_a_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with it they are the same."""
    for hashes in ("random", "", None):
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        if hashes is not None:
            monkeypatch.setenv("PYTHONHASHSEED", hashes)
        assert "start with PYTHONHASHSEED=0 in the environment" in refusal(lambda: gym("ransom_note"))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    gym("ransom_note")
    assert made("0", "ransom_note") == made("0", "ransom_note") != made("1", "ransom_note")


def test_a_process_that_makes_other_problems_does_not_resume() -> None:
    state = gym(seed=1).state()
    gym(seed=1).restore({name: value for name, value in state.items() if name != "problems"})  # of an older version
    assert "makes other problems in this process" in refusal(gym(seed=1).restore, {**state, "problems": "others"})


# --- rows: what is drawn -----------------------------------------------------------------------------------------------


def test_each_row_once_an_epoch_in_another_order_each_time(tmp_path: Path) -> None:
    task = rows(write(tmp_path / "r.jsonl", table(20)), held_out=5)
    epochs = [[task.draw() for _ in range(15)] for _ in range(3)]
    texts = [[prompt.text for prompt in epoch] for epoch in epochs]
    assert len(set(texts[0])) == 15 and sorted(texts[0]) == sorted(texts[1]) == sorted(texts[2])
    assert texts[0] != texts[1] != texts[2]
    assert [prompt.id.split("/")[1] for prompt in epochs[1]] == ["1"] * 15
    assert all(prompt.text == f"question {prompt.id.split('/')[2]}" for prompt in epochs[2]), "the id names the row"
    assert {prompt.text for prompt in task.held_out(5)}.isdisjoint(texts[0])


def test_the_run_seed_changes_the_order_and_not_what_is_held_out(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", table(20))
    first, second = rows(path, seed=1), rows(path, seed=2)
    assert first.held_out(2) == second.held_out(2)
    assert [first.draw().text for _ in range(18)] != [second.draw().text for _ in range(18)]


def test_without_shuffling_the_order_is_that_of_the_file(tmp_path: Path) -> None:
    task = rows(write(tmp_path / "r.jsonl", table(6)), shuffle=False)
    assert [task.draw().text for _ in range(5)] == [f"question {i}" for i in (0, 1, 2, 3, 0)]
    assert [prompt.text for prompt in task.held_out(2)] == ["question 4", "question 5"]


def test_columns_and_text_of_a_row(tmp_path: Path) -> None:
    task = rows(write(tmp_path / "r.jsonl", [{"q": "1 + 1", "answer": 2, "level": {"a": [1]}}]), prompt="q", held_out=0)
    prompt = task.draw()
    assert prompt == Prompt("train/0/0", "1 + 1", prompt.tokens, {"answer": 2, "level": {"a": [1]}})
    assert read(prompt) == "[user]1 + 1[assistant]"


def test_conversations_keep_their_column(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "bye"},
    ]
    task = rows(write(tmp_path / "r.jsonl", [{"messages": messages}]), prompt="messages", held_out=0, system="S")
    prompt = task.draw()
    assert read(prompt) == "[system]S[user]hi[assistant]hello[user]bye[assistant]"
    assert prompt.text == "bye" and prompt.columns == {"messages": messages}


def test_plain_text_without_a_template(tmp_path: Path) -> None:
    assert read(rows(write(tmp_path / "r.jsonl", table(3)), chat=False, shuffle=False).draw()) == "question 0"


def test_examples_come_from_rows_that_are_never_drawn(tmp_path: Path) -> None:
    task = rows(write(tmp_path / "r.jsonl", table(12)), examples=2, held_out=3)
    drawn = [task.draw() for _ in range(14)]
    assert len({prompt.text for prompt in drawn}) == 7
    (front,) = {read(prompt).removesuffix(f"[user]{prompt.text}[assistant]") for prompt in [*drawn, *task.held_out(3)]}
    shown = [turn.split("[assistant]") for turn in front.split("[user]")[1:]]
    assert len(shown) == 2 and all(question == f"question {answer}" for question, answer in shown)
    assert not {question for question, _ in shown} & {prompt.text for prompt in [*drawn, *task.held_out(3)]}


def test_held_out_rows_from_a_file_of_their_own(tmp_path: Path) -> None:
    apart = write(tmp_path / "test.jsonl", [{"prompt": f"test {i}"} for i in range(4)] + [{"prompt": "question 3"}])
    train = write(tmp_path / "r.jsonl", table(6))
    task = rows(train, held_out_path=str(apart), held_out=5)
    assert [prompt.text for prompt in task.held_out(5)] == ["test 0", "test 1", "test 2", "test 3", "question 3"]
    drawn = Counter(task.draw().text for _ in range(10))
    assert drawn == {f"question {i}": 2 for i in (0, 1, 2, 4, 5)}, "what is held out is not trained on"


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=14), st.integers(0, 6), st.integers(0, 3), st.booleans()
)
def test_train_held_out_and_examples_never_ask_the_same(
    tmp_path: Path, asked: list[str], held_out: int, examples: int, shuffle: bool
) -> None:
    path = write(tmp_path / "r.jsonl", [{"prompt": text, "answer": text.upper()} for text in asked])
    try:
        task = rows(path, held_out=held_out, examples=examples, shuffle=shuffle)
    except ConfigError as error:
        assert "none is left to train on" in str(error)
        return
    drawn = [task.draw() for _ in range(30)]
    held = {prompt.text for prompt in task.held_out(min(held_out, len(asked)))}
    shown = {turn.split("[assistant]")[0] for turn in read(drawn[0]).split("[user]")[1:-1]}
    assert not {prompt.text for prompt in drawn} & (held | shown) and not held & shown


# --- rows: formats -----------------------------------------------------------------------------------------------------


def test_parquet_and_saved_datasets_give_the_same_rows_as_jsonl(tmp_path: Path) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = table(8)
    write(tmp_path / "r.jsonl", data)
    pq.write_table(pa.Table.from_pylist(data), tmp_path / "r.parquet")
    datasets.Dataset.from_list(data).save_to_disk(str(tmp_path / "saved"))
    made = [
        rows(tmp_path / "r.jsonl"),
        rows(tmp_path / "r.parquet", kind="parquet"),
        rows(tmp_path / "saved", kind="datasets"),
    ]
    drawn = [[task.draw() for _ in range(9)] for task in made]
    assert drawn[0] == drawn[1] == drawn[2]


def test_values_of_parquet_become_json(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = {"prompt": "a", "when": datetime.datetime(2026, 1, 2), "price": decimal.Decimal("1.50"), "tags": ["x"]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "r.parquet")
    columns = rows(tmp_path / "r.parquet", kind="parquet", held_out=0).draw().columns
    assert columns == {"when": "2026-01-02T00:00:00", "price": 1.5, "tags": ["x"]}
    pq.write_table(pa.Table.from_pylist([{**row, "image": b"\x89PNG"}]), tmp_path / "r.parquet")
    message = refusal(rows, tmp_path / "r.parquet", kind="parquet")
    assert "row 1: the column image is for models that see or hear" in message
    assert 'set task.images = ["image"] if the model is to see it' in message


@pytest.mark.parametrize(
    "other, told",
    [
        ({"prompt": ["b"], "x": [0.5], "a": [1]}, "the column a is int64 in "),
        ({"prompt": ["b"]}, "the column x is absent in "),
        ({"prompt": ["b"], "x": [{"a": 1}]}, "the column x is struct<a: int64> in "),
        ({"prompt": ["b"], "x": [0.1]}, "the column x is double in "),
    ],
)
def test_files_of_a_directory_of_parquet_that_lose_something_to_the_first_are_refused(
    other: dict[str, Any], told: str, tmp_path: Path
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": ["a"], "x": pa.array([0.5], pa.float32())}), tmp_path / "0.parquet")
    pq.write_table(pa.table(other), tmp_path / "1.parquet")
    assert refusal(rows, tmp_path, kind="parquet").startswith(told)
    alike = {"x": pa.array([None], pa.float32()), "prompt": ["b"]}
    pq.write_table(pa.table(alike), tmp_path / "1.parquet")
    assert rows(tmp_path, kind="parquet", held_out=0, shuffle=False).draw().columns == {"x": 0.5}


def test_jsonable_leaves_nothing_that_an_encoder_refuses() -> None:
    value = {
        "a": (np.str_("x"), np.float64(1.5), np.int64(2), {3, 1}),
        4: np.arange(2),
        "n": None,
        "t": True,
        "b": 10**30,
    }
    plain = jsonable(value)
    assert plain == {"a": ["x", 1.5, 2, [1, 3]], "4": [0, 1], "n": None, "t": True, "b": "1" + "0" * 30}
    assert msgspec.json.decode(msgspec.json.encode(plain)) == plain and plain["t"] is True
    with pytest.raises(TypeError, match="two keys of the same text"):
        jsonable({1: "a", "1": "b"})


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)))  # fmt: skip
def test_jsonable_is_the_identity_on_what_encoders_take(value: Any) -> None:
    try:
        packed = msgspec.msgpack.encode(value)
    except OverflowError:
        return
    assert jsonable(value) == msgspec.msgpack.decode(packed) == value


def test_a_byte_order_mark_and_empty_lines_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n{"prompt": "b"}\n\n')
    task = rows(tmp_path / "r.jsonl", held_out=0, shuffle=False)
    assert [task.draw().text for _ in range(2)] == ["a", "b"]


# --- rows: bad input ---------------------------------------------------------------------------------------------------


def test_missing_files_name_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", table(3))
    message = refusal(rows, tmp_path / "trian.jsonl")
    assert f"there is no {tmp_path / 'trian.jsonl'}; did you mean {tmp_path / 'train.jsonl'}?" in message
    assert "there is no" in refusal(rows, tmp_path / "no" / "such" / "dir.jsonl")
    assert "there is no" in refusal(rows, tmp_path / "train.jsonl", held_out_path=str(tmp_path / "gone.jsonl"))


def test_a_missing_column_names_those_that_exist(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", [{"promt": "a", "answer": 1}])
    message = refusal(rows, path)
    assert "there is no column prompt (task.prompt)" in message and "did you mean promt?" in message
    assert "its columns are: promt, answer" in message
    later = write(tmp_path / "later.jsonl", [{"prompt": "a"}, {"prompt": "b"}, {"question": "c"}])
    assert f"{later}, row 3: there is no column prompt" in refusal(rows, later)


def test_examples_need_answers(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", [{"prompt": str(i), "solution": 1} for i in range(5)])
    message = refusal(rows, path, examples=1)
    assert "there is no column answer (task.answer)" in message and "It is needed for task.examples" in message
    assert rows(path, examples=1, answer="solution").draw()
    path = write(tmp_path / "null.jsonl", [{"prompt": str(i), "answer": None} for i in range(5)])
    assert "an example needs a prompt that is a string and an answer" in refusal(rows, path, examples=1)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "r.jsonl").write_text(content)
    assert "holds no rows; a task needs at least one prompt" in refusal(rows, tmp_path / "r.jsonl")


def test_empty_parquet_and_datasets(tmp_path: Path) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "r.parquet")
    datasets.Dataset.from_dict({"prompt": []}).save_to_disk(str(tmp_path / "saved"))
    assert "holds no rows" in refusal(rows, tmp_path / "r.parquet", kind="parquet")
    assert "holds no rows" in refusal(rows, tmp_path / "saved", kind="datasets")


def test_nothing_left_to_train_on(tmp_path: Path) -> None:
    message = refusal(rows, write(tmp_path / "r.jsonl", table(5)), held_out=64)
    assert "has 5 rows, of which none is left to train on after task.held_out = 64" in message
    same = write(tmp_path / "same.jsonl", [{"prompt": "a"}] * 5)
    assert "they ask only 1 different question(s) in the column prompt" in refusal(rows, same, held_out=1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a"', "r.jsonl:2: not valid JSON"),
        ("plain text", "r.jsonl:2: not valid JSON"),
        ('{"prompt": "a", "answer": 1, "answer": 2}', "r.jsonl:2: not valid JSON (answer stands twice in an object)"),
        ('["a"]', "r.jsonl:2: a JSON list where an object with columns is needed"),
        ('{"prompt": ""}', "row 2: the prompt in column prompt is empty"),
        ('{"prompt": null}', "is empty (null); a prompt is a string or a list of messages"),
        ('{"prompt": 3}', "is of type int; a prompt is a string or a list of messages"),
        ('{"prompt": []}', "is an empty list of messages"),
        ('{"prompt": ["hi"]}', "is a list with something else than messages"),
        ('{"prompt": [{"role": "user"}]}', "is a list with something else than messages"),
        (
            '{"prompt": "\\ud800"}',
            "the column prompt cannot be kept in the journal (text with half of a surrogate pair",
        ),
        ('{"prompt": "a", "completions": 1}', "row 2: the column completions has a name that reward functions need"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "r.jsonl").write_text('{"prompt": "first"}\n' + line + "\n")
    assert words in refusal(rows, tmp_path / "r.jsonl")


def test_messages_and_settings_that_contradict_each_other(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write(tmp_path / "r.jsonl", [{"prompt": own}])
    assert "begins with a system message of its own; remove it, or task.system" in refusal(rows, path, system="S")
    assert "need the chat template; set task.chat = true" in refusal(rows, path, chat=False)
    assert read(rows(path, held_out=0).draw()) == "[system]s[user]u[assistant]"


def test_a_template_that_refuses_a_row_names_it(tmp_path: Path) -> None:
    class Picky(LetterEncoder):
        def encode_messages(self, messages: Sequence[Mapping[str, Any]], *given: Any) -> tuple[str, tuple[int, ...]]:
            if messages[0]["role"] == "tool":
                raise ConfigError("no such role")
            return super().encode_messages(messages, *given)

    path = write(tmp_path / "r.jsonl", [{"prompt": "a"}, {"prompt": [{"role": "tool", "content": "b"}]}])
    config = TaskConfig(kind="jsonl", path=str(path), held_out=0, shuffle=False)
    task = RowsTask(config, 0, Picky())
    task.draw()
    assert refusal(task.draw) == "prompt train/0/1: no such role"


def test_files_of_another_kind(tmp_path: Path) -> None:
    import datasets

    path = write(tmp_path / "r.jsonl", table(3))
    assert "cannot be read as Parquet" in refusal(rows, path, kind="parquet")
    assert "is not a dataset written by save_to_disk" in refusal(rows, tmp_path, kind="datasets")
    assert "is a directory; task.kind = jsonl needs a file" in refusal(rows, tmp_path)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in refusal(rows, tmp_path / "binary.jsonl")
    split = datasets.Dataset.from_list(table(4))
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "splits"))
    assert str(tmp_path / "splits" / "train") in refusal(rows, tmp_path / "splits", kind="datasets")
    assert rows(tmp_path / "splits" / "train", kind="datasets").draw()


def test_other_data_than_at_the_checkpoint_is_refused(tmp_path: Path) -> None:
    state = rows(write(tmp_path / "r.jsonl", table(9))).state()
    changed = rows(write(tmp_path / "r.jsonl", table(10)))
    assert "its data or settings changed" in refusal(changed.restore, state)


# --- settings ----------------------------------------------------------------------------------------------------------


def test_seeds_never_end_and_none_is_held_out_and_drawn() -> None:
    def seeds(seed: int, **settings: Any) -> SeedsTask:
        return SeedsTask(TaskConfig(kind="seeds", system="play", held_out=20, **settings), seed, LetterEncoder())

    task = seeds(0)
    first = [task.draw() for _ in range(200)]
    state = task.state()
    later, again = [task.draw() for _ in range(5)], seeds(0)
    again.restore(state)
    assert [again.draw() for _ in range(5)] == later
    held = task.held_out(20)
    assert held == seeds(1).held_out(20), "runs can be compared"
    drawn = {one.columns["seed"] for one in first}
    assert len(drawn) == 200 and len({one.columns["seed"] for one in held} - drawn) == 20
    assert all(one.columns["seed"] % 2 for one in held) and not any(one.columns["seed"] % 2 for one in first)
    assert read(first[0]) == f"[system]play[user]seed {first[0].columns['seed']}[assistant]"
    with pytest.raises(ConfigError, match="not the one that the checkpoint was written with"):
        seeds(1).restore(state)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": "tsv"}, "reasoning_gym"),
        ({"kind": "csv"}, "task.path is missing"),
        ({"kind": "reasoning_gym"}, "task.name is missing"),
        ({"kind": "jsonl"}, "task.path is missing"),
        ({"kind": "jsonl", "path": "a", "name": "chain_sum"}, "task.name means nothing to task.kind = jsonl"),
        ({"kind": "parquet", "path": "a", "options": {"a": 1}}, "task.options means nothing to task.kind = parquet"),
        ({"kind": "reasoning_gym", "name": "a", "path": "b"}, "task.path means nothing to task.kind = reasoning_gym"),
        ({"kind": "reasoning_gym", "name": "a", "prompt": "b"}, "task.prompt means nothing"),
        ({"kind": "reasoning_gym", "name": "a", "shuffle": False}, "task.shuffle means nothing"),
        ({"kind": "seeds", "path": "a"}, "task.path means nothing to task.kind = seeds"),
        ({"kind": "seeds", "examples": 2}, "task.examples means nothing to task.kind = seeds"),
        ({"kind": "jsonl", "path": "a", "chat": False, "system": "s"}, "task.chat = false; set task.chat = true"),
        ({"kind": "jsonl", "path": "a", "chat": False, "examples": 2}, "task.chat = false; set task.chat = true"),
        (
            {"kind": "jsonl", "path": "a", "chat": False, "template": {"a": 1}},
            "task.chat = false; set task.chat = true or",
        ),
        (
            {"kind": "jsonl", "path": "a", "chat": False, "specials_in_text": "allow"},
            "task.chat = false; set task.chat",
        ),
        ({"kind": "jsonl", "path": "a", "held_out": -1}, "greater than or equal to 0"),
        ({"kind": "jsonl", "path": "a", "colum": "b"}, "colum"),
    ],
)
def test_bad_settings(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TaskConfig(**arguments)
