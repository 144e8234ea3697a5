"""Whole runs whose trainer takes turns with a vLLM server: the fake one, which the run starts, over headrace's engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.core.errors import ConfigError
from headrace.facts.facts import IdentityChecked, RunEnded, Slept, Woke, WorkerLost
from headrace.facts.records import StepRow
from support import fake_servers
from support.server_processes import servers
from support.tiny_run import at_steps, of, tiny_config, until_noted

STEPS = 3


def config_for(directory: Path, model: Path, **tables: Any) -> dict[str, Any]:
    engine = {"kind": "vllm", "python": str(fake_servers.interpreter(directory)), **tables.pop("engine", {})}
    train = {"steps": STEPS, "learning_rate": 1e-2}
    place = {"placement": "shared"}
    return tiny_config(
        directory, model, engine=engine, train=train, orchestration=place, watch={"identity_every": 1}, **tables
    )


def checked(run: Path, deaths: int) -> None:
    (ended,) = of(run, RunEnded)
    assert ended.reason == "finished" and ended.accounting.balance() == 0
    assert len(of(run, IdentityChecked)) == STEPS + 1 and all(probe.ok for probe in of(run, IdentityChecked))
    assert len(of(run, StepRow)) == STEPS and len(of(run, WorkerLost)) == deaths
    to_engine, to_trainer = [(Slept, "trainer"), (Woke, "engine")], [(Slept, "engine"), (Woke, "trainer")]
    turns = sorted(of(run, Slept) + of(run, Woke), key=lambda fact: fact.t)
    assert [(type(fact), fact.who) for fact in turns][: 2 + 4 * STEPS] == [
        *to_engine,
        *(to_trainer + to_engine) * STEPS,
    ]
    assert not servers(), "the server has ended with the run"


@pytest.mark.slow
def test_a_server_that_is_killed_asleep_costs_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"

    def kill() -> None:
        ((server, *_),) = servers().values()
        os.kill(server, signal.SIGKILL)
        until_noted(run, WorkerLost)

    config = config_for(tmp_path, tiny_llama)
    killer = at_steps(config, {1: kill})
    assert headrace.train(config).step == STEPS
    killer.join()
    checked(run, deaths=1)


@pytest.mark.slow
def test_an_adapter_takes_turns(tiny_llama: Path, tmp_path: Path) -> None:
    assert headrace.train(config_for(tmp_path, tiny_llama, lora={"rank": 4})).step == STEPS
    checked(tmp_path / "runs" / "tiny", deaths=0)


def test_a_build_for_cpus_is_refused_before_anything_is_started(tiny_llama: Path, tmp_path: Path) -> None:
    config = config_for(tmp_path, tiny_llama)
    metadata = tmp_path / "site" / "vllm-0.32.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.32.0", "0.32.0+cpu"))
    with pytest.raises(ConfigError, match='has no sleep mode.*use engine.kind = "native"'):
        headrace.train(config)
    assert not servers()
