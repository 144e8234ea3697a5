"""Whole runs whose engine and trainer take turns, or whose trainer lends its cores: the weights are those of a run that keeps them apart,
killed or not."""

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

import pytest
import torch

import headrace
from headrace.facts.facts import RunEnded, Slept, Warned, Woke, WorkerLost
from headrace.native.resources import available_cores
from support.few import few
from support.runs import preloaded_python
from support.tiny_run import (
    SYNCHRONOUS,
    Config,
    engines_of,
    held_reward,
    of,
    release,
    tiny_config,
    weights_of,
    workers_of,
)

CHILD = "import json, sys, headrace; headrace.train(json.loads(sys.argv[1]))"


def shared(directory: Path, model: Path, kv: str = "host", **tables: Any) -> Config:
    directory.mkdir(parents=True, exist_ok=True)
    place = {"orchestration": {"placement": "shared", "kv": kv}} if kv else {}
    return tiny_config(directory, model, **place, **tables)


def run_dir(directory: Path) -> Path:
    return directory / "runs" / "tiny"


def same(path: Path, other: Path) -> bool:
    mine, theirs = weights_of(run_dir(path)), weights_of(run_dir(other))
    return mine.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


@pytest.fixture(scope="module")
def apart(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with devices for both."""
    directory = tmp_path_factory.mktemp("apart")
    headrace.train(shared(directory, tiny_llama, "", **SYNCHRONOUS))
    return directory


@pytest.mark.parametrize("kv", few(["host", "drop"], keep=1))
def test_the_weights_are_those_of_a_run_that_keeps_them_apart(tiny_llama: Path, tmp_path: Path, apart: Path, kv: str):
    headrace.train(shared(tmp_path, tiny_llama, kv, **SYNCHRONOUS))
    assert same(tmp_path, apart)
    slept, woke = of(run_dir(tmp_path), Slept), of(run_dir(tmp_path), Woke)
    turns = 4  # the first version after the trial, and three steps
    assert [fact.who for fact in slept] == ["trainer", *["engine", "trainer"] * turns]
    assert [fact.who for fact in woke] == ["engine", *["trainer", "engine"] * turns]
    assert all(fact.report.seconds > 0 for fact in [*slept, *woke])


@pytest.mark.slow
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


@pytest.mark.slow
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


# -- lending ----------------------------------------------------------------------------------------------------------------

CORES = sorted(available_cores())
NEEDS_TWO = pytest.mark.skipif(len(CORES) < 2, reason="engine and trainer need a core each")


def lending(directory: Path, model: Path, *, lend: bool = True, **tables: Any) -> Config:
    """Two rows for sixteen rollouts, so that requests wait for rows."""
    directory.mkdir(parents=True, exist_ok=True)
    own = {"orchestration": {"lend": True, "give_way": 3.0}} if lend else {}
    engine = {**SYNCHRONOUS["engine"], "max_running": 2, "context_length": 128, "cores": CORES[:1]}
    train = {**SYNCHRONOUS["train"], "cores": CORES[-1:], "max_deaths": 2}
    rollout = {"group_size": 8, "max_tokens": 24}
    settled = {"staleness": SYNCHRONOUS["staleness"], "engine": engine, "train": train, "rollout": rollout}
    return tiny_config(directory, model, **{**settled, **own, **tables})


@pytest.fixture(scope="module")
def lends_nothing(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lends-nothing")
    headrace.train(lending(directory, tiny_llama, lend=False))
    return directory


@pytest.mark.slow
@NEEDS_TWO
def test_a_trainer_that_lends_its_cores_gets_the_weights_that_it_would_have(
    tiny_llama: Path, tmp_path: Path, lends_nothing: Path, capsys: pytest.CaptureFixture[str]
):
    headrace.train(lending(tmp_path, tiny_llama))
    assert same(tmp_path, lends_nothing)
    back = [fact.report for fact in of(run_dir(tmp_path), Slept) if fact.who == "lent engine"]
    assert len(back) >= 3 and sum(report.tokens for report in back) > 0
    (ended,) = of(run_dir(tmp_path), RunEnded)
    assert ended.accounting.balance() == 0 and not of(run_dir(tmp_path), WorkerLost)
    assert "lent 3 times while the trainer waited" in capsys.readouterr().out
    assert "while the trainer waited" in (run_dir(tmp_path) / "report.html").read_text()


@pytest.mark.slow
@NEEDS_TWO
@pytest.mark.parametrize("whom", ["controller", "dies", pytest.param("hangs", marks=pytest.mark.waits)])
def test_killed_while_devices_are_lent_it_loses_nothing(
    tiny_llama: Path, tmp_path: Path, lends_nothing: Path, whom: str
):
    """A reward holds the third step, in which the trainer lends for the third time."""
    config = lending(tmp_path, tiny_llama, reward=held_reward(tmp_path))
    child = preloaded_python.Program([sys.executable, "-c", CHILD, json.dumps(config)], stdout=subprocess.DEVNULL)
    try:
        until_fact(tmp_path, "Woke", "lent engine", 3, child)
        if whom == "controller":
            os.kill(child.pid, signal.SIGKILL)
        else:
            (lent,) = [pid for pid in engines_of(child.pid) if os.sched_getaffinity(pid) == set(CORES[-1:])]
            os.kill(lent, signal.SIGKILL if whom == "dies" else signal.SIGSTOP)
        release(tmp_path)
        if whom != "controller":
            assert child.wait(600) == 0
    finally:
        child.kill()
        child.wait()
    if whom == "controller":
        headrace.train(resume=run_dir(tmp_path))
    assert same(tmp_path, lends_nothing)
    messages = [fact.message for fact in of(run_dir(tmp_path), Warned)]
    assert any("has not given the trainer's devices back within 3 s" in one for one in messages) == (whom == "hangs")
