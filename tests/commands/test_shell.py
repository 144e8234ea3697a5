"""`headrace init`, `ls`, `compare` and `completion`."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import cli
from headrace.commands.training.starter import look_at, starter_text
from headrace.episodes.scoring.extract import last_number
from headrace.run.config import load_config
from support.fact_stream import write_run

ROWS = [{"question": f"{i} + {i}?", "answer": str(2 * i), "level": i % 3} for i in range(40)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("sums.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = cli.main(words)
    out, err = capsys.readouterr()
    return code, out + err


# --- init --------------------------------------------------------------------------------------------------------------


def test_a_written_config_passes_the_rehearsal_with_the_reward_beside_it(
    here: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = ("--model", str(tiny_llama), "--data", "sums.jsonl", "--reward", "rewards.py:exact")
    code, out = said(capsys, "init", "mine.toml", *answers)
    assert code == 0 and out.splitlines()[:2] == ["mine.toml", "rewards.py"], out
    config = load_config("mine.toml")
    assert (config.task.prompt, config.task.answer, config.task.held_out) == ("question", "answer", 8)
    assert config.reward.extract == "last_number" and config.engine.context_length == 256
    assert config.train.minutes == 10, "a first run has a curve soon, however slow the machine is"
    text = Path("mine.toml").read_text()
    assert all("#" in line for line in text.splitlines() if re.match(r"(max_lag|steps|group_size|held_out) ", line))
    code, out = said(capsys, "train", "mine.toml", "--dry-run")
    assert code == 0, out
    assert "exact" in out and re.search(r"1\.0|1\b", out)


def test_rows_that_are_sorted_into_a_few_kinds_get_their_names_and_solved_rows(
    here: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked without either, a small model never gives a label alone, so that no group has contrast and no step is made."""
    kinds = ("billing", "delivery", "no answer")
    rows = [f'"message {number}, please",{kinds[number % 3]}' for number in range(30)]
    Path("tickets.csv").write_text("\n".join(["prompt,answer", *rows]))
    answers = ("--model", str(tiny_llama), "--data", "tickets.csv", "--reward", "rewards.py:exact")
    assert said(capsys, "init", "mine.toml", *answers)[0] == 0
    config = load_config("mine.toml")
    assert config.task.system == "Answer with one of these alone: billing, delivery, no answer."
    assert (config.task.examples, config.rollout.max_tokens) == (4, 17)
    code, out = said(capsys, "train", "mine.toml", "--dry-run")
    assert code == 0 and "exact = 1" in out, out


def test_a_small_model_is_shown_numbers_alone_and_a_larger_one_may_work_them_out(tmp_path: Path) -> None:
    (tmp_path / "sums.csv").write_text("\n".join(["question,answer", *(f"{n} + {n}?,{2 * n}" for n in range(20))]))
    data = look_at(str(tmp_path / "sums.csv"))
    for model, lines in {
        "smollm2-135m-instruct": r"^examples = 4 .*^max_tokens = 16 ",
        "org/name": r"^# examples = 4 .*^max_tokens = 128 ",
    }.items():
        text = starter_text(tmp_path / "mine.toml", model=model, data=data, reward="r.py:exact")
        assert re.search(lines, text, re.MULTILINE | re.DOTALL), text


def test_a_label_of_other_letters_than_latin_fits_the_limit(tmp_path: Path, tiny_llama: Path) -> None:
    """A tokenizer of bytes gives three tokens to each of these letters."""
    rows = [{"prompt": f"{number}?", "answer": ("退货申请已提交", "账单")[number % 2]} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    data = look_at(str(tmp_path / "rows.jsonl"))
    text = starter_text(tmp_path / "mine.toml", model=str(tiny_llama), data=data, reward="r.py:exact")
    assert int(re.search(r"max_tokens = (\d+)", text)[1]) >= len("退货申请已提交".encode()) + 1
    assert "退货申请已提交" in text


@pytest.mark.parametrize(
    "answers",
    [
        [f"text {number}" for number in range(30)],
        ["yes"] * 28 + ["no"] * 2,
        ["one\nline"] * 15 + ["two"] * 15,
        ["yes", "no"] * 4,
    ],
    ids=["all different", "two of a kind", "lines", "too few rows"],
)
def test_other_answers_are_no_kinds_and_solved_rows_are_left_to_the_user(
    here: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str], answers: list[str]
) -> None:
    Path("rows.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"{n}?", "answer": text}) for n, text in enumerate(answers))
    )
    assert look_at("rows.jsonl").labels == ()
    assert (
        said(capsys, "init", "mine.toml", "--model", str(tiny_llama), "--data", "rows.jsonl", "--reward", "r.py:exact")[
            0
        ]
        == 0
    )
    assert "# examples = 4" in Path("mine.toml").read_text() and load_config("mine.toml").task.examples == 0


def test_the_written_function_compares_numbers(
    here: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers with separators are numbers to `init`, so `last_number` and the function must agree about them."""
    right = ["1,200", 3.5, 7]
    Path("many.jsonl").write_text("".join(f'{{"prompt": "?", "answer": {json.dumps(one)}}}\n' for one in right))
    answers = ("--model", str(tiny_llama), "--data", "many.jsonl", "--reward", "rewards.py:exact")
    assert said(capsys, "init", "mine.toml", *answers)[0] == 0
    exact = runpy.run_path("rewards.py")["exact"]
    for said_so, wanted in (
        ("1,200", [1, 0, 0]),
        ("1200.0", [1, 0, 0]),
        ("3.50", [0, 1, 0]),
        ("-7", [0, 0, 0]),
        ("", [0, 0, 0]),
    ):
        assert exact([""] * 3, [last_number(said_so)] * 3, answer=right) == wanted
    Path("many.jsonl").write_text('{"prompt": "?", "answer": "50,5"}\n')
    assert said(capsys, "init", "other.toml", *answers)[0] == 0
    assert load_config("other.toml").reward.extract == ""


def test_problems_of_reasoning_gym_need_no_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = ("--model", "smollm2-135m-instruct", "--data", "chain_sum", "--reward", "reasoning_gym")
    assert said(capsys, "init", *answers)[0] == 0
    config = load_config("mine.toml")
    assert (config.task.kind, config.task.name, config.reward.function) == (
        "reasoning_gym",
        "chain_sum",
        "reasoning_gym",
    )
    assert sorted(path.name for path in here.iterdir()) == ["mine.toml", "sums.jsonl"]


def test_an_existing_function_is_kept_and_paths_are_seen_from_the_config(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("own").mkdir()
    Path("own/judge.py").write_text("def mine(prompts, completions, **columns):\n    return [0.5] * len(completions)\n")
    before = Path("own/judge.py").read_text()
    code, out = said(
        capsys, "init", "own/a.toml", "--model", "org/name", "--data", "sums.jsonl", "--reward", "judge.py:mine"
    )
    assert code == 0 and out.splitlines()[0] == "own/a.toml" and Path("own/judge.py").read_text() == before
    assert load_config("own/a.toml").task.path == str(here / "sums.jsonl")


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ((), "give --model"),
        (("--model", "m"), "give --data"),
        (("--model", "m", "--data", "absent.jsonl", "--reward", "r.py:f"), "there is no absent.jsonl"),
        (("--model", "m", "--data", "no_such_family", "--reward", "r.py:f"), "nor one of reasoning-gym's families"),
        (
            ("--model", "m", "--data", "sums.jsonl", "--reward", "reasoning_gym"),
            "judges answers to its own problems only",
        ),
        (("--model", "m", "--data", "sums.jsonl", "--reward", "unit_tests"), "needs a column tests"),
        (("--model", "m", "--data", "sums.jsonl", "--reward", "exact"), "of the form FILE.py:FUNCTION"),
        (("--model", "m", "--data", "other.jsonl", "--reward", "r.py:f"), "none of the columns of other.jsonl (text)"),
        (("--model", "m", "--data", "empty.jsonl", "--reward", "r.py:f"), "empty.jsonl has no rows"),
    ],
)
def test_answers_that_cannot_work_are_refused_and_nothing_is_written(
    here: Path, capsys: pytest.CaptureFixture[str], answers: tuple[str, ...], words: str
) -> None:
    Path("other.jsonl").write_text('{"text": "a"}')
    Path("empty.jsonl").write_text("")
    before = sorted(here.iterdir())
    code, out = said(capsys, "init", *answers)
    assert code == 2 and words in out, out
    assert sorted(here.iterdir()) == before


def test_a_config_that_exists_is_not_written_over(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.toml").write_text("mine")
    code, out = said(capsys, "init", "--model", "m", "--data", "chain_sum", "--reward", "reasoning_gym")
    assert code == 2 and "exists already" in out and Path("mine.toml").read_text() == "mine"


def test_in_a_terminal_it_asks_and_an_empty_answer_is_the_usual_one(here: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            [sys.executable, "-m", "headrace", "init"], stdin=theirs, stdout=subprocess.PIPE, text=True
        ) as process:
            os.write(ours, b"\nsums.jsonl\n\n")
            out, _ = process.communicate()
    finally:
        os.close(ours)
        os.close(theirs)
    assert process.returncode == 0 and "[smollm2-135m-instruct]" in out and "[rewards.py:exact]" in out
    config = load_config("mine.toml")
    assert config.model.path == "smollm2-135m-instruct" and config.reward.function.endswith("rewards.py:exact")


# --- ls and compare ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("listed") / "runs"
    write_run(root / "first", config="[train]\nlr = 1e-5\n")
    write_run(root / "second", seed=1, end=False, config="[train]\nlr = 3e-5\n")
    return root


def test_runs_are_listed_with_state_step_and_reward(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out = said(capsys, "ls", str(runs))
    first = next(line for line in out.splitlines() if line.startswith("first"))
    second = next(line for line in out.splitlines() if line.startswith("second"))
    assert code == 0 and "finished" in first and "30 of 30" in first and "died" in second
    code, out = said(capsys, "ls", str(runs), "--json")
    lines = {one["name"]: one for one in json.loads(out)}
    assert code == 0 and lines["first"]["life"] == "finished" and lines["second"]["life"] == "died"
    assert f"{lines['first']['reward']:.3f}" in first and lines["first"]["step"] == 30


def test_a_directory_without_runs_is_said_so(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "ls", ".") == (0, ". holds no run yet; headrace train CONFIG.toml starts one\n")
    code, out = said(capsys, "ls")
    assert code == 2 and "runs is not a directory" in out


def test_two_runs_are_compared_in_the_terminal(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(runs.parent)
    code, out = said(capsys, "compare", "first", "second")
    assert code == 0
    rows = {re.split(r"\s{2,}", line.strip())[0]: re.split(r"\s{2,}", line.strip())[1:] for line in out.splitlines()}
    assert rows["train.lr"] == ["1e-05", "3e-05"] and rows["seed"] == ["0", "1"] and "name" not in rows
    assert rows["state"] == ["finished", "died"] and rows["steps"] == ["30 of 30", "30 of 30"]
    curves = [line for line in out.splitlines() if re.search(r"^  (first|second) +[▁▂▃▄▅▆▇█]", line)]
    assert len(curves) == 6, out


def test_the_page_has_the_settings_the_numbers_and_a_line_for_each_run(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "both.html"
    names = (str(runs / "first"), str(runs / "second"))
    assert said(capsys, "compare", *names, "--html", str(page))[0] == 0
    html = page.read_text()
    assert "train.lr" in html and "http://" not in html.replace("http://www.w3.org", "")
    reward = html[html.index("<b>Reward</b>") :]
    reward = reward[: reward.index("</figure>")]
    assert 'class="line c1"' in reward and 'class="line c2"' in reward and 'class="line c3"' not in reward
    assert reward.count("<rect") == 30 and "first " in reward and "second " in reward


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["first"], "1 runs were named; compare takes two to 5"),
        (["first", "first"], "one run was named twice"),
        (["first", "absent"], "there is no run absent"),
        (["first", "empty"], "empty is not the directory of a run"),
        (["first", "second", "--html", "page.txt"], "name a file that ends in .html"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], names: list[str], words: str
) -> None:
    (runs / "empty").mkdir(exist_ok=True)
    monkeypatch.chdir(runs.parent)
    code, out = said(capsys, "compare", *names)
    assert code == 2 and words in out, out


# --- completion --------------------------------------------------------------------------------------------------------

LINES = """
PATH={bin}:$PATH
source <(headrace completion bash)
for line in "headrace comp" "headrace status --wa" "headrace status fi" "headrace train a.toml --set staleness.max_l"; do
  COMP_LINE=$line COMP_POINT=${{#line}} COMP_TYPE=9
  _python_argcomplete headrace
  echo "${{COMPREPLY[@]}}"
done
"""


def test_bash_completes_commands_flags_runs_and_settings(runs: Path, tmp_path: Path) -> None:
    program = tmp_path / "headrace"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m headrace "$@"\n')
    program.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", LINES.format(bin=tmp_path)],
        capture_output=True,
        text=True,
        cwd=runs.parent,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["compare", "completion"], done
    assert lines[1] == ["--watch"] and lines[2] == ["first"], done
    assert "staleness.max_lag=" in lines[3]


@pytest.mark.parametrize(("shell", "words"), [("zsh", "#compdef headrace"), ("fish", "complete --command headrace")])
def test_zsh_and_fish_have_scripts_of_their_own(capsys: pytest.CaptureFixture[str], shell: str, words: str) -> None:
    code, out = said(capsys, "completion", shell)
    assert code == 0 and words in out


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.csv", "csv"), ("a.tsv", "csv"), ("a.csv.gz", "csv"), ("a.json", "jsonl"), ("a.jsonl.gz", "jsonl")],
)
def test_init_knows_a_file_by_its_name(tmp_path: Path, name: str, kind: str) -> None:
    mark = "\t" if ".tsv" in name else ","
    text = f"question{mark}answer\n2 + 2?{mark}4\n" if kind == "csv" else '[{"conversations": "2 + 2?", "answer": "4"}]'
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    found = look_at(str(tmp_path / name))
    assert (found.kind, found.rows, found.numeric) == (kind, 1, True)
    assert found.prompt == ("question" if kind == "csv" else "conversations")
