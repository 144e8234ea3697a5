"""Runs whose trainer's ranks join from other processes, for real, over 127.0.0.1."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_joining_run import PATIENCE, free_port, joining, offering

import headrace
from headrace.core.errors import ConfigError
from headrace.facts.facts import RunEnded, WorkerJoined
from headrace.processes.health.live_status import read_live
from support.runs import preloaded_python
from support.runs.beside import Beside, until
from support.tiny_run import SYNCHRONOUS, at_steps, of, tiny_config, weights_of

TRAINER = ("--offers", "trainer", "--again")


def elsewhere(directory: Path, model: Path, port: int, **tables: Any) -> dict[str, Any]:
    return joining(directory, model, port, orchestration={"trainer": "elsewhere"}, **tables)


TWO_RANKS: dict[str, Any] = {
    **SYNCHRONOUS,
    "train": {**SYNCHRONOUS["train"], "parallel": {"shard": 2}, "microbatch_tokens": 48, "steps": 5},
    "rollout": {"max_tokens": 12},
}


def assert_equal(run: Path, other: Path) -> None:
    ours, theirs = weights_of(run), weights_of(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def local(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose two ranks are child processes."""
    directory = tmp_path_factory.mktemp("local")
    headrace.train(tiny_config(directory, tiny_llama, **TWO_RANKS))
    return directory / "runs" / "tiny"


@pytest.mark.slow
def test_joined_ranks_learn_what_local_ranks_do_bit_for_bit(local: Path, tiny_llama: Path, tmp_path: Path) -> None:
    port = free_port()
    config = elsewhere(tmp_path, tiny_llama, port, **TWO_RANKS)
    with offering(tmp_path, port) as (engine,), offering(tmp_path, port, "--offers", "trainer", count=2) as ranks:
        headrace.train(config)
        assert [one.wait(PATIENCE) for one in (engine, *ranks)] == [0, 0, 0]
    run = tmp_path / "runs" / "tiny"
    seats = of(run, WorkerJoined)
    assert [seat.who for seat in seats] == ["engine", "trainer rank 0", "trainer rank 1"]
    assert {seat.pid for seat in seats[1:]} == {rank.pid for rank in ranks}
    assert_equal(run, local)


@pytest.mark.slow
def test_when_a_rank_dies_it_and_the_others_come_back(
    local: Path, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, port = tmp_path / "runs" / "joined", free_port()
    config = elsewhere(tmp_path, tiny_llama, port, **TWO_RANKS, name="joined")
    killed: list[int] = []

    def kill() -> None:
        killed.append(of(run, WorkerJoined)[-1].pid)
        os.kill(killed[0], signal.SIGKILL)

    with offering(tmp_path, port, "--again") as (engine,), offering(tmp_path, port, *TRAINER, count=2) as ranks:
        harm = at_steps(config, {2: kill})
        result = headrace.train(config)
        harm.join()
        assert [one.poll() for one in (engine, *ranks)] == [None] * 3
    assert result.step == 5
    output = capsys.readouterr().err
    assert f"(process {killed[0]}) is lost: its connection has ended" in output
    assert "death no. 1 of train.max_deaths = 3" in output
    seats = [(worker.who, worker.pid) for worker in of(run, WorkerJoined)]
    assert [who for who, _ in seats] == ["engine", "trainer rank 0", "trainer rank 1"] * 2
    assert ("trainer rank 1", killed[0]) in seats[:3] and killed[0] not in [pid for _, pid in seats[3:]]
    assert of(run, RunEnded)[-1].accounting.balance() == 0
    assert_equal(run, local)


@pytest.mark.slow
def test_ranks_join_a_run_whose_engines_are_those_of_rollout_hosts(
    local: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    """Its weights are those of a local run, bit for bit. After a rank's death the run waits for another one, and its status names that wait."""
    run, port, bus = tmp_path / "runs" / "tiny", free_port(), f"jsonl:{tmp_path / 'bus'}"
    config = joining(tmp_path, tiny_llama, port, orchestration={"trainer": "elsewhere", "bus": bus}, **TWO_RANKS)

    def kill() -> None:
        os.kill(next(worker.pid for worker in of(run, WorkerJoined) if worker.who == "trainer rank 1"), signal.SIGKILL)

    def bring() -> None:
        until(lambda: "as trainer rank 1" in str(read_live(run)))
        with offering(tmp_path, port, "--offers", "trainer", count=2) as more:
            until(lambda: of(run, RunEnded)[-1:] and of(run, RunEnded)[-1].step == 5)
            assert [one.wait(PATIENCE) for one in more] == [0, 0]

    words = [sys.executable, "-m", "headrace", "rollouts", "--bus", bus, "--set", "engine.threads=1"]
    host = preloaded_python.Program(words, stderr=subprocess.PIPE, text=True)
    try:
        with offering(tmp_path, port, "--offers", "trainer", count=2):
            harm, brought = at_steps(config, {2: kill}), Beside(bring)
            assert headrace.train(config).step == 5
            harm.join()
            brought.join()
        assert "the run is over" in host.communicate(timeout=PATIENCE)[1]
    finally:
        host.kill()
    assert_equal(run, local)


@pytest.mark.slow
def test_a_single_rank_joins(tiny_llama: Path, tmp_path: Path) -> None:
    headrace.train(tiny_config(tmp_path, tiny_llama, **SYNCHRONOUS, name="local"))
    port = free_port()
    config = elsewhere(tmp_path, tiny_llama, port, **SYNCHRONOUS, name="joined")
    with offering(tmp_path, port) as (engine,), offering(tmp_path, port, "--offers", "trainer") as (trainer,):
        headrace.train(config)
        assert (engine.wait(PATIENCE), trainer.wait(PATIENCE)) == (0, 0)
    assert_equal(tmp_path / "runs" / "joined", tmp_path / "runs" / "local")


@pytest.mark.slow
def test_a_stopped_rank_is_noticed_by_its_silence(tiny_llama: Path, tmp_path: Path) -> None:
    run, port = tmp_path / "runs" / "tiny", free_port()
    config = elsewhere(tmp_path, tiny_llama, port, **TWO_RANKS)
    stopped: list[int] = []

    def stop() -> None:
        stopped.append(next(worker.pid for worker in of(run, WorkerJoined) if worker.who == "trainer rank 0"))
        os.kill(stopped[0], signal.SIGSTOP)

    with offering(tmp_path, port, "--again"), offering(tmp_path, port, *TRAINER, count=3):
        harm = at_steps(config, {2: stop})
        assert headrace.train(config).step == 5
        harm.join()
    assert "of rank 0 on" in (why := of(run, RunEnded)[0].reason) and "it was silent for" in why
    joined = sorted(worker.who for worker in of(run, WorkerJoined))
    assert joined == ["engine", "engine", "trainer rank 0", "trainer rank 0", "trainer rank 1", "trainer rank 1"]


@pytest.mark.slow
def test_ranks_with_other_weights_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    """A rank whose copy of the model holds other weights would train another model in silence."""
    import shutil

    from safetensors.torch import load_file, save_file

    other = shutil.copytree(tiny_llama, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    name = next(iter(weights))
    weights[name] = weights[name] + 1e-3
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    port = free_port()
    config = elsewhere(tmp_path, tiny_llama, port, train={"parallel": {"shard": 2}})
    with (
        offering(tmp_path, port),
        offering(tmp_path, port, "--offers", "trainer"),
        offering(tmp_path, port, "--offers", "trainer", "--model", str(other)),
        pytest.raises(ConfigError, match=r"the files of weights of rank 1 .* are not those of rank 0"),
    ):
        headrace.train(config)
