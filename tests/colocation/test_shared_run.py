"""Whole runs whose engine and trainer take turns: the weights are those of a run that keeps them apart, killed or not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import preloaded_python
import pytest
import torch
from tiny_run import SYNCHRONOUS, Config, held_reward, of, release, tiny_config, weights_of, workers_of

import headrace
from headrace.observe.facts import RunEnded, Slept, Woke

CHILD = "import json, sys, headrace; headrace.train(json.loads(sys.argv[1]))"


def shared(directory: Path, model: Path, kv: str = "host", **tables: Any) -> Config:
    directory.mkdir(parents=True, exist_ok=True)
    place = {"orchestration": {"placement": "shared", "kv": kv}} if kv else {}
    return tiny_config(directory, model, **place, **tables)


def run_dir(directory: Path) -> Path:
    return directory / "runs" / "tiny"


def same(one: Path, other: Path) -> bool:
    mine, theirs = weights_of(run_dir(one)), weights_of(run_dir(other))
    return mine.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


@pytest.fixture(scope="module")
def apart(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with devices for both."""
    directory = tmp_path_factory.mktemp("apart")
    headrace.train(shared(directory, tiny_llama, "", **SYNCHRONOUS))
    return directory


@pytest.mark.parametrize("kv", ["host", "drop"])
def test_the_weights_are_those_of_a_run_that_keeps_them_apart(tiny_llama: Path, tmp_path: Path, apart: Path, kv: str):
    headrace.train(shared(tmp_path, tiny_llama, kv, **SYNCHRONOUS))
    assert same(tmp_path, apart)
    slept, woke = of(run_dir(tmp_path), Slept), of(run_dir(tmp_path), Woke)
    assert [fact.who for fact in slept] == ["trainer", *["engine", "trainer"] * 3]
    assert [fact.who for fact in woke] == ["engine", *["trainer", "engine"] * 3]
    assert all(fact.report.seconds > 0 for fact in [*slept, *woke])


def test_requests_under_way_go_on_after_the_trainers_turn(tiny_llama: Path, tmp_path: Path):
    headrace.train(
        shared(tmp_path, tiny_llama, "host", eval={"prompts": 4, "samples": 1, "every": 2}, lora={"rank": 4})
    )
    (ended,) = of(run_dir(tmp_path), RunEnded)
    assert ended.reason == "finished" and ended.accounting.balance() == 0


def until_fact(directory: Path, kind: str, who: str, count: int, child: subprocess.Popen[bytes]) -> None:
    """Waits for the `count`-th such fact."""
    metrics, deadline = run_dir(directory) / "metrics.jsonl", time.monotonic() + 600
    while True:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if sum(f'"fact":"{kind}"' in line and f'"who":"{who}"' in line for line in lines) >= count:
            return
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)


PHASES: Sequence[tuple[str, str, str]] = [
    ("Slept", "engine", ""),  # the trainer wakes, or steps
    ("Woke", "trainer", "trainer"),
    ("Slept", "trainer", "engine"),  # the engine wakes
    ("Woke", "engine", ""),
    ("Woke", "trainer", "engine"),  # the engine is asleep
]
"""After which fact a process is killed, and which: the controller, where it is empty."""


@pytest.mark.parametrize(
    ("kind", "who", "whom"), PHASES, ids=[f"{kind}-{who}-{whom or 'controller'}" for kind, who, whom in PHASES]
)
def test_killed_in_every_phase_it_loses_nothing(
    tiny_llama: Path, tmp_path: Path, apart: Path, kind: str, who: str, whom: str
):
    """The run cannot end before it is killed: it is killed after its first change of that kind, and a reward holds its third step."""
    tables = {**SYNCHRONOUS, "reward": held_reward(tmp_path), "train": {**SYNCHRONOUS["train"], "max_deaths": 2}}
    config = shared(tmp_path, tiny_llama, "host", **tables)
    child = preloaded_python.Program([sys.executable, "-c", CHILD, json.dumps(config)], stdout=subprocess.DEVNULL)
    try:
        until_fact(tmp_path, kind, who, 1, child)
        os.kill(workers_of(child.pid)[whom] if whom else child.pid, signal.SIGKILL)
        release(tmp_path)
        if whom:
            assert child.wait(600) == 0
    finally:
        child.kill()
        child.wait()
    if not whom:
        headrace.train(resume=run_dir(tmp_path))
    assert same(tmp_path, apart)
