"""Whole runs of the recipes with the libraries themselves, none of them a fake: two steps of a tiny model each.

The reward has a part that no two rollouts share, because a model that knows nothing earns the same everywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.durable.journal import read_steps
from headrace.facts.facts import GroupEnded
from support.tiny_run import of

ROOT = Path(__file__).parents[2]
OPENENV = os.environ.get("HEADRACE_OPENENV_PYTHON") or str(ROOT / ".venv-openenv/bin/python")
VERIFIERS = os.environ.get("HEADRACE_VERIFIERS_PYTHON") or str(ROOT / ".venv-verifiers/bin/python")
REWARD = """
def varied(completions, **columns):
    return [sum(map(ord, text)) % 97 / 97 for text in completions]
"""
SMALL = (
    "train.minutes=0",
    "train.steps=2",
    "train.warmup_steps=0",
    "train.dtype=float32",
    "engine.dtype=float32",
    "engine.kv_gib=0.05",
    "engine.context_length=4096",
    "rollout.group_size=3",
    "rollout.max_tokens=8",
    "staleness.groups_per_step=2",
    "eval.prompts=0",
    "checkpoint.every=0",
    "observe.terminal=off",
)


@pytest.fixture(scope="module")
def roomy(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for conversations that are tokenised by character."""
    directory = tmp_path_factory.mktemp("roomy") / "model"
    shutil.copytree(tiny_llama, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    return directory


def run(recipe: str, model: Path, place: Path, *sets: str, **tables: Any) -> list[Any]:
    """Returns the scored rollouts of a finished run of the recipe, in which no rollout failed. `tables`: in place of the recipe's."""
    (place / "reward.py").write_text(REWARD)
    folder = shutil.copytree(ROOT / "recipes" / recipe, place / recipe)
    own = (f"name={recipe}", f"out={json.dumps(str(place))}", f"model.path={json.dumps(str(model))}")
    reward = f"reward.function={json.dumps(str(place / 'reward.py') + ':varied')}"
    path = folder / f"{recipe}.toml"
    config = {**tomllib.loads(path.read_text()), **tables} if tables else path
    result = headrace.train(config, sets=[*own, reward, *SMALL, *sets])
    assert result.reason == "finished"
    steps = list(read_steps(result.directory))
    assert len(steps) == 2 and not any(fact.failures for fact in of(result.directory, GroupEnded))
    return [rollout for step in steps for group in step.groups for rollout in group.scored]


def check(rollouts: list[Any], reward: str, most: int) -> None:
    for rollout in rollouts:
        assert any(name.endswith(reward) for name in rollout.rewards), rollout.rewards
        assert 1 <= len(rollout.episode.turns) <= most and all(turn.completion.tokens for turn in rollout.episode.turns)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "reward", "turns"),
    [("attempts", "reasoning_gym", 3), ("gym", "gym", 4), ("game", "textarena", 20), ("self_play", "textarena", 24)],
)
def test_a_recipe_trains(recipe: str, reward: str, turns: int, roomy: Path, tmp_path: Path) -> None:
    rollouts = run(recipe, roomy, tmp_path)
    check(rollouts, reward, turns)
    if recipe == "self_play":
        agents = {turn.agent for rollout in rollouts for turn in rollout.episode.turns}
        assert agents and agents <= {"player 0", "player 1"}, "who begins may lose by two moves that are not allowed"


@pytest.mark.slow
def test_an_environment_of_skyrl_gym_trains(roomy: Path, tmp_path: Path) -> None:
    pytest.importorskip("skyrl_gym")
    row = {"prompt": "What is 8 times 9?", "reward_spec": {"ground_truth": "72"}, "extra_info": {}}
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({**row, "prompt": f"{i}: 8 * 9?"}) for i in range(40)))
    task = {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl"), "held_out": 0}
    environment = {"kind": "gym", "name": "gsm8k_multi_turn", "max_turns": 4}
    check(run("gym", roomy, tmp_path, task=task, environment=environment), "gym", 4)


@contextmanager
def served(place: Path, source: str = "") -> Iterator[str]:
    """A server in the interpreter that has the package: the recipe's, unless another source is given."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    source = source or (ROOT / "recipes" / "openenv" / "openenv_server.py").read_text()
    assert "port=8000" in source
    (place / "server.py").write_text(source.replace("port=8000", f"port={port}"))
    process = subprocess.Popen([OPENENV, str(place / "server.py")])
    deadline, url = time.monotonic() + 300, f"http://127.0.0.1:{port}"
    try:
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=30).close()
                break
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(not Path(OPENENV).exists(), reason=f"no openenv in {OPENENV}: make openenv-setup")
def test_a_server_of_openenv_trains(roomy: Path, tmp_path: Path) -> None:
    with served(tmp_path) as url:
        check(run("openenv", roomy, tmp_path, f"environment.name={json.dumps(url)}"), "openenv", 6)


@pytest.mark.slow
@pytest.mark.skipif(not Path(VERIFIERS).exists(), reason=f"no verifiers in {VERIFIERS}: make verifiers-setup")
def test_a_taskset_of_verifiers_trains(roomy: Path, tmp_path: Path) -> None:
    rollouts = run("verifiers", roomy, tmp_path, f"environment.python={json.dumps(VERIFIERS)}")
    check(rollouts, "number", 2)
