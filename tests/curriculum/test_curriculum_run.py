"""A whole run with a curriculum over several epochs of few rows: killed with SIGKILL twice, it draws what its journal says."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.durable.journal import DrawnRecord, ReadyRecord, count_steps, read_journal
from headrace.facts.facts import PromptChosen
from headrace.facts.records import read_metrics
from headrace.loop.curriculum import open_curriculum
from headrace.models.chat import ChatEncoder
from headrace.run.build import build_task
from headrace.run.config import dump_config, read_config
from support.runs import preloaded_python
from support.runs.beside import PATIENCE, until
from support.tiny_run import tiny_config

REWARD = "def has_e(completions, **columns): return [float('e' in text) for text in completions]\n"


def killed_after(command: list[str], run_dir: Path, steps: int) -> None:
    """Kills the controller when its journal has so many steps."""
    process = preloaded_python.Program(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: process.poll() is not None or count_steps(run_dir) >= steps)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL, "the run has no end"


GROWS = {"kind": "contrast", "largest_group": 12, "least_chance": 0.8}


@pytest.mark.slow
@pytest.mark.parametrize("setting", [GROWS, pytest.param({"kind": "pools"}, marks=pytest.mark.slow)])
def test_killed_twice_it_draws_what_a_reader_of_its_journal_draws(
    tmp_path: Path, tiny_llama: Path, setting: dict[str, Any]
):
    curriculum = {**setting, "candidates": 3}
    settings = tiny_config(tmp_path, tiny_llama, train={"steps": 100_000}, curriculum=curriculum)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i} + 1?"}) for i in range(9)))
    (tmp_path / "reward.py").write_text(REWARD)
    settings["task"]["held_out"], settings["reward"]["function"] = 2, f"{tmp_path / 'reward.py'}:has_e"
    settings["rollout"]["group_size"] = 3
    config = read_config(settings)
    path, run_dir = tmp_path / "tiny.toml", config.run_dir
    path.write_text(dump_config(config))
    headrace = [sys.executable, "-m", "headrace", "train"]
    killed_after([*headrace, str(path)], run_dir, 3)
    again = [*headrace, "--resume", str(run_dir)]
    killed_after(again, run_dir, count_steps(run_dir) + 3)
    end = f"train.steps={count_steps(run_dir) + 3}"
    last = preloaded_python.Program([*again, "--set", end], stderr=subprocess.PIPE, text=True)
    output = last.communicate(timeout=PATIENCE)[1]
    assert last.returncode == 0, output
    task = build_task(config.task, ChatEncoder(tiny_llama), config.seed)
    reader = open_curriculum(task, config.curriculum, config.rollout.group_size)
    drawn, sizes = [], set[int]()
    for record in read_journal(run_dir):
        if isinstance(record, ReadyRecord):
            sizes.add(len(record.group.scored))
            assert len(record.group.scored) == (record.group.prompt.rollouts or 3)
        if isinstance(record, DrawnRecord):
            prompt, choice = reader.draw(record.ticket)
            assert prompt == record.prompt, f"ticket {record.ticket}"
            drawn.append((record.ticket, choice))
        reader.count(record)
    assert int(prompt.id.split("/")[1]) > 1, "several epochs"
    assert max(sizes) > 3 or "largest_group" not in setting, "no group has grown"
    facts = {fact.ticket: fact.choice for fact in read_metrics(run_dir) if isinstance(fact, PromptChosen)}
    assert set(facts) <= dict(drawn).keys() and len(facts) >= len(drawn) - 4, "a kill may cost the last facts"
