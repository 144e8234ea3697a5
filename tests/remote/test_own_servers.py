"""Whole runs that start their server themselves: headrace's, and the fake vLLM as if it were installed in another environment."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.core.errors import ConfigError
from headrace.facts.facts import IdentityChecked, MemberMoved, RunEnded, WorkerLost
from headrace.facts.records import StepRow
from support import fake_servers
from support.server_processes import servers
from support.tiny_run import at_steps, of, tiny_config, until_noted


def config_for(directory: Path, model: Path, kind: str, **tables: Any) -> dict[str, Any]:
    engine = {"kind": kind, **tables.pop("engine", {})}
    if kind == "vllm":
        engine = {"python": str(fake_servers.interpreter(directory)), **engine}
    return tiny_config(directory, model, engine=engine, train={"steps": 4}, checkpoint={"every": 4}, **tables)


def checked(run: Path, deaths: int) -> None:
    (ended,) = of(run, RunEnded)
    assert ended.reason == "finished" and ended.accounting.balance() == 0
    assert of(run, IdentityChecked) and all(probe.ok for probe in of(run, IdentityChecked))
    rows = of(run, StepRow)
    assert len(rows) == 4 and max(lag for row in rows for lag in row.lags) <= 1
    assert len(of(run, WorkerLost)) == deaths
    assert not servers(), "the server has ended with the run"
    assert not list(run.rglob("*.token"))


@pytest.mark.slow
def test_a_vllm_that_the_run_started_is_started_again_when_it_is_killed(tiny_llama: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"

    def kill() -> None:
        ((server, *_),) = servers().values()
        os.kill(server, signal.SIGKILL)
        until_noted(run, WorkerLost)

    config = config_for(tmp_path, tiny_llama, "vllm", lora={"rank": 4})
    killer = at_steps(config, {1: kill})
    headrace.train(config)
    killer.join()
    checked(run, deaths=1)
    (lost,) = of(run, WorkerLost)
    assert "was killed by SIGKILL" in lost.how


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("vllm", marks=pytest.mark.slow), "headrace"])
def test_two_servers_that_the_run_started_of_which_one_is_killed(kind: str, tiny_llama: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"

    def kill() -> None:
        (one, *_), _ = servers().values()
        os.kill(one, signal.SIGKILL)
        until_noted(run, WorkerLost)

    engine = {"replicas": 2, "cores": sorted(os.sched_getaffinity(0))[:2]}
    config = config_for(tmp_path, tiny_llama, kind, engine=engine)
    killer = at_steps(config, {1: kill})
    headrace.train(config)
    killer.join()
    checked(run, deaths=1)
    assert of(run, MemberMoved)[0].state == "away"
    assert sorted(path.name for path in run.rglob("engine-*.log")) == ["engine-1.log", "engine-2.log"]


def log_in(message: str) -> str:
    """The log that a message names, which must be there when it is read."""
    (path,) = re.findall(r"its output is in ([^,)]+)", message)
    return Path(path).read_text()


def test_a_server_that_cannot_start_is_refused_with_its_complaint(tiny_llama: Path, tmp_path: Path) -> None:
    config = config_for(tmp_path, tiny_llama, "vllm", engine={"server_args": ["--no-such-option"]})
    with pytest.raises(
        ConfigError, match=re.escape("the vllm server that this run started did not come up")
    ) as refused:
        headrace.train(config)
    assert "unrecognized arguments: --no-such-option" in str(refused.value) and not servers()
    assert "unrecognized arguments" in log_in(str(refused.value))
    assert [path.name for path in (tmp_path / "runs").rglob("*.*")] == ["engine.log"], "nothing else is left of it"


def test_an_evaluation_whose_server_cannot_start_leaves_its_log(tiny_llama: Path, tmp_path: Path) -> None:
    config = config_for(tmp_path, tiny_llama, "vllm", engine={"server_args": ["--no-such-option"]})
    with pytest.raises(ConfigError, match="did not come up") as refused:
        headrace.evaluate(config, prompts=2)
    assert "unrecognized arguments" in log_in(str(refused.value)) and not servers()


@pytest.mark.slow
def test_a_server_that_ends_at_its_first_request_is_not_started_again(tiny_llama: Path, tmp_path: Path) -> None:
    """vLLM finds out only then that it has no kernel for the model."""
    config = config_for(tmp_path, tiny_llama, "vllm", engine={"server_args": ["--fault", "no_kernel"]})
    with pytest.raises(ConfigError, match="came up and ended before it had served a request") as refused:
        headrace.train(config)
    assert "RuntimeError: Unsupported CPU attention configuration: head_dim=16" in str(refused.value)
    assert log_in(str(refused.value)).count("Unsupported CPU attention") == 2, "one process, which said it twice"
    assert not of(tmp_path / "runs" / "tiny", WorkerLost) and not servers()
