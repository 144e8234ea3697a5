"""A whole run whose rows, rewards and exceptions hold what a terminal would obey, in a terminal."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from headrace.run.config import dump_config, load_config
from support.pseudo_terminal import POISON, in_terminal, is_unsafe, obeyed
from support.runs import preloaded_python
from support.tiny_run import tiny_config

ROOT = Path(__file__).resolve().parents[2]

REWARD = """
import sys
from support.pseudo_terminal import POISON, SURROGATE

def raises(prompts, completions, answer, **columns):
    print(POISON, file=sys.stderr)
    for prompt, text, right in zip(prompts, completions, answer):
        if int(prompt.split()[0]) % 3 == 0 and text.strip() != right.strip():
            raise ValueError(POISON + SURROGATE)
    return [text.count("e") / max(len(text), 1) for text in completions]
"""


@pytest.fixture
def here(tmp_path: Path, tiny_llama: Path) -> Path:
    rows = [{"prompt": f"{i} + {i}? {POISON}", "answer": f"{2 * i}{POISON}"} for i in range(200)]
    tables = {
        "rollout": {"max_tokens": 4},
        "engine": {"context_length": 256},
        "train": {"steps": 2},
        "eval": {"prompts": 4},
    }
    config = tiny_config(tmp_path, tiny_llama, **tables, reward={"function": f"{tmp_path / 'poisonous.py'}:raises"})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "poisonous.py").write_text(REWARD)
    (tmp_path / "mine.toml").write_text(dump_config(load_config(config)))
    return tmp_path


def headrace(here: Path, *words: str, paths: tuple[Path, ...] = (ROOT, ROOT / "tests")) -> str:
    command, variables = [sys.executable, "-m", "headrace", *words], {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    return in_terminal(command, here, variables, start=preloaded_python.Program)[1]


@pytest.mark.slow
@pytest.mark.parametrize("terminal", ["plain", "live"])
def test_a_run_of_poisoned_rows_and_rewards_steers_no_terminal(here: Path, terminal: str) -> None:
    out = headrace(here, "train", "mine.toml", "--set", f'observe.terminal="{terminal}"')
    assert obeyed(out, live=terminal == "live") == [] and "␛[2J" in out and "🔥" not in out
    assert ("\x1b[?25l" in out) == (terminal == "live"), "our own cursor moves"
    logs = {path.name: path.read_text() for path in (here / "runs" / "tiny" / "logs").glob("*.log")}
    assert not any(is_unsafe(one) for text in logs.values() for one in text)
    assert any("[red]kept[/red]" in text for text in logs.values()), "the reward has printed"
    if terminal == "live":
        return  # its files are those of the other run
    for words in (["status", "runs/tiny"], ["inspect", "runs/tiny"], ["ls"], ["eval", "runs/tiny"]):
        shown = headrace(here, *words)
        assert obeyed(shown) == [], words


@pytest.mark.slow
def test_a_rehearsal_of_poisoned_rows_and_rewards_steers_no_terminal(here: Path) -> None:
    out = headrace(here, "train", "mine.toml", "--dry-run")
    assert obeyed(out) == [] and "␛[2J" in out
    (here / "poisonous.py").write_text(REWARD.replace(" and text.strip() != right.strip()", ""))
    out = headrace(here, "train", "mine.toml", "--dry-run")
    assert obeyed(out) == [] and "ValueError" in out and "␛[2J" in out, "the error of a reward that always fails"
