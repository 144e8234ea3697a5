"""Several evaluation sets (`eval.sets`): what each is made of, what is refused with which remedy, and a whole run with three of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.cli import main
from headrace.core.errors import ConfigError
from headrace.episodes.tasks.rows import RowsTask
from headrace.models.chat import ChatEncoder
from headrace.run.build import build_task
from headrace.run.config import dump_config, load_config, set_runs
from headrace.run.evaluation_sets import ReadSet, read_sets
from support.tiny_run import tiny_config


def tiny(directory: Path, model: Path, *sets: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A run of rows, and beside them a file `hard.jsonl` of 12 rows of which one is trained as well."""
    rows = [{"prompt": f"{i} times {i}?", "answer": str(i * i)} for i in range(11)] + [
        {"prompt": "3 + 3?", "answer": "6"}
    ]
    (directory / "hard.jsonl").write_text("\n".join(map(json.dumps, rows)))
    looks = {"prompts": 4, "samples": 2, "sets": list(sets), **more.pop("eval", {})}
    return tiny_config(directory, model, eval=looks, task={"held_out": 8, "shuffle": False}, **more)


def read(directory: Path, model: Path, *sets: dict[str, Any]) -> list[ReadSet]:
    config = load_config(tiny(directory, model, *sets))
    encoder = ChatEncoder(model)
    return read_sets(config, encoder, build_task(config.task, encoder, config.seed))


HARD = {"name": "hard", "prompts": 50, "samples": 3, "task": {"path": "hard.jsonl"}}


def at(directory: Path, **more: Any) -> dict[str, Any]:
    return {**HARD, "task": {"path": str(directory / "hard.jsonl")}, **more}


def test_a_set_has_the_runs_settings_unless_it_has_its_own(tmp_path: Path, tiny_llama: Path) -> None:
    config = load_config(tiny(tmp_path, tiny_llama, {"name": "greedy", "temperature": 0.0}, at(tmp_path)))
    greedy, hard = set_runs(config).values()
    assert greedy.task == config.task and (greedy.eval.samples, greedy.eval.temperature) == (2, 0.0)
    assert hard.task.shuffle is False and hard.task.path.endswith("hard.jsonl") and hard.reward == config.reward
    assert (hard.eval.samples, hard.eval.temperature) == (3, 1.0)
    assert config.eval.beside == 4 * 2 + 50 * 3
    (tmp_path / "again.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.toml") == config, "a resumed run reads them back"
    changed = load_config(tmp_path / "again.toml", ["eval.sets.hard.prompts=5"])
    assert [one.prompts for one in changed.eval.sets] == [0, 5]


def test_relative_paths_of_a_set_are_relative_to_the_file(tmp_path: Path, tiny_llama: Path) -> None:
    config = load_config(tiny(tmp_path, tiny_llama, at(tmp_path)))
    text = dump_config(config).replace(str(tmp_path / "hard.jsonl"), "hard.jsonl")
    (tmp_path / "run.toml").write_text(text)
    assert load_config(tmp_path / "run.toml").eval.sets[0].task["path"] == str(tmp_path / "hard.jsonl")


def test_all_rows_of_its_file_are_measured_and_those_that_are_trained_too_are_told(
    tmp_path: Path, tiny_llama: Path
) -> None:
    (hard,) = read(tmp_path, tiny_llama, at(tmp_path))
    assert [prompt.text for prompt in hard.prompts] == [*(f"{i} times {i}?" for i in range(11)), "3 + 3?"]
    assert hard.remarks == [
        "the evaluation set hard: 1 of 12 prompts are trained on, too: their reward does not say what the policy does with prompts that it "
        "has not seen"
    ]
    assert not hard.has_own_environment
    (few,) = read(tmp_path, tiny_llama, at(tmp_path, prompts=11))
    assert len(few.prompts) == 11 and few.remarks == [], "the row that is trained is not among the first eleven"


def test_a_set_without_rows_has_the_held_out_prompts(tmp_path: Path, tiny_llama: Path) -> None:
    config = load_config(tiny(tmp_path, tiny_llama))
    encoder = ChatEncoder(tiny_llama)
    task = build_task(config.task, encoder, config.seed)
    assert isinstance(task, RowsTask)
    greedy, told = read(
        tmp_path,
        tiny_llama,
        {"name": "greedy", "prompts": 3, "temperature": 0.0},
        {"name": "told", "prompts": 3, "task": {"system": "Be brief."}},
    )
    assert greedy.prompts == task.held_out(3)
    assert [prompt.text for prompt in told.prompts] == [prompt.text for prompt in greedy.prompts]
    assert told.prompts[0].tokens != greedy.prompts[0].tokens and told.has_own_environment


@pytest.mark.parametrize(
    ("sets", "more", "words", "remedied"),
    [
        ([{"name": "a b"}], {}, "use at most 40 letters", ([{"name": "a_b", "prompts": 4}], {})),
        ([{"name": "a"}, {"name": "a"}], {}, "two sets are called a; give each", ([{"name": "a", "prompts": 4}], {})),
        (
            [{"name": "a", "prompts": 4}],
            {"eval": {"prompts": 0}},
            "eval.prompts = 0 switches evaluation off; set it",
            ([{"name": "a", "prompts": 4}], {"eval": {"prompts": 4}}),
        ),
        (
            [{"name": "a", "every": 20}],
            {},
            "a has every = 20, and with eval.every = 0 nothing is measured during training; set eval.every = 20",
            ([{"name": "a", "every": 20}], {"eval": {"every": 20}}),
        ),
        (
            [{"name": "a", "every": 25}],
            {"eval": {"every": 10}},
            "use a multiple of that, such as 30",
            ([{"name": "a", "every": 30}], {"eval": {"every": 10}}),
        ),
        (
            [{"name": "a", "prompts": 9}],
            {},
            "the evaluation set a: eval.prompts = 9 asks for more than task.held_out = 8",
            ([{"name": "a", "prompts": 8}], {}),
        ),
        (
            [{**HARD, "task": {**HARD["task"], "held_out": 3}}],  # type: ignore[dict-item]
            {},
            "the evaluation set hard: task.held_out divides rows .* remove it",
            ([HARD], {}),
        ),
        (
            [{**HARD, "environment": {"kind": "gateway"}}],
            {},
            "the evaluation set hard: .* hands out the rollouts of a run at one address",
            ([{**HARD, "environment": {"kind": "single_turn"}}], {}),
        ),
        (
            [{**HARD, "task": {"path": "hard.jsonl", "images": ["picture"]}}],
            {},
            "task.images has to be that of the run",
            ([HARD], {}),
        ),
    ],
)
def test_what_cannot_work_is_refused_and_its_remedy_works(
    tmp_path: Path,
    tiny_llama: Path,
    sets: list[Any],
    more: dict[str, Any],
    words: str,
    remedied: tuple[list[Any], dict[str, Any]],
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(tiny(tmp_path, tiny_llama, *sets, **more))
    load_config(tiny(tmp_path, tiny_llama, *remedied[0], **remedied[1]))


@pytest.mark.slow
def test_a_run_measures_all_sets_and_so_does_headrace_eval(
    tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`letters` has a reward and a system message of its own: the share of another letter."""
    letters = at(tmp_path, name="letters", prompts=5, reward={"function": f"{tmp_path / 'reward.py'}:share_of_o"})
    letters["task"]["system"] = "Go."
    sets = {"name": "greedy", "prompts": 4, "samples": 1, "temperature": 0.0, "every": 4}, at(tmp_path), letters
    config = tiny(tmp_path, tiny_llama, *sets, eval={"every": 2, "name": "sums"}, train={"steps": 4})
    run = headrace.train(config)
    assert run.before and run.before.name == "sums" and not run.before.beside
    assert [(name, table["step"]) for name, table in run.sets.items()] == [
        ("greedy", [0, 4]),
        ("hard", [0, 2, 4]),
        ("letters", [0, 2, 4]),
    ]
    assert {name: table["prompts"][0] for name, table in run.sets.items()} == {"greedy": 4, "hard": 12, "letters": 5}
    seen = [look.text for look in run.state.sets["letters"][-1].looks]
    given = [look.rewards[0] for look in run.state.sets["letters"][-1].looks]
    assert given == pytest.approx([text.count("o") / max(len(text), 1) for text in seen])
    capsys.readouterr()
    assert main(["eval", str(run.directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0].rpartition(", ")[2] for line in lines] == ["sums", "greedy", "hard", "letters"]
    for line, name in zip(lines[1:], run.sets, strict=True):
        assert f"reward {run.sets[name]['reward'][-1]:.4f} " in line, "the same prompts, seeds and weights"
    assert headrace.evaluate(run=run.directory, of="greedy").reward_mean == run.sets["greedy"]["reward"][-1]
    with pytest.raises(ConfigError, match="no set called greddy.*greedy"):
        headrace.evaluate(run=run.directory, of="greddy")
