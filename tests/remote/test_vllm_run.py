"""Whole runs with `engine.kind = "vllm"`: the tiny model, the real trainer here, and in a process of its own a server that speaks as
vLLM 0.32 does, over headrace's engine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import vllm_server
from tiny_run import of, tiny_config, when_step

import headrace
from headrace.engine.servers.server_process import free_port
from headrace.errors import ConfigError, IdentityError
from headrace.observe.facts import IdentityChecked, RunEnded, WorkerLost
from headrace.observe.records import StepRow

OPTIONS = "--host 127.0.0.1 --dtype float32 --max-model-len 65 --enable-lora --max-loras 2 --enable-scale-out"
VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}


class Server:
    def __init__(self, model: Path, *faults: str) -> None:
        port = free_port()
        self._words = [
            "serve",
            str(model),
            "--port",
            str(port),
            "--logprobs-mode",
            "processed_logprobs",
            *OPTIONS.split(),
        ]
        self._words += [word for fault in faults for word in ("--fault", fault)]
        self.url = f"http://127.0.0.1:{port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, vllm_server.__file__, *self._words]
        self.process = subprocess.Popen(command, env={**os.environ, **VARIABLES})

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def serving(model: Path, *faults: str) -> Iterator[Server]:
    server = Server(model, *faults)
    try:
        yield server
    finally:
        server.kill()


def config_for(directory: Path, model: Path, server: Server, **tables: Any) -> dict[str, Any]:
    config = tiny_config(directory, model, **tables)
    engine = {"kind": "vllm", "urls": [server.url], "dtype": "float32", "context_length": 64, "patience": 300.0}
    return {**config, "engine": {**engine, **tables.get("engine", {})}}


def checked_run(directory: Path, steps: int) -> None:
    (ended,) = of(directory, RunEnded)
    rows = of(directory, StepRow)
    assert ended.reason == "finished" and ended.accounting.balance() == 0, ended.accounting
    assert of(directory, IdentityChecked) and all(one.ok for one in of(directory, IdentityChecked))
    assert len(rows) == steps and max(lag for row in rows for lag in row.lags) <= 1


def test_a_run_trains_and_a_server_that_is_killed_costs_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(tiny_llama) as server:
        run = tmp_path / "runs" / "tiny"

        def kill_and_start_again() -> None:
            server.kill()
            server.start()

        killer = when_step(run, 2, kill_and_start_again)
        result = headrace.train(config_for(tmp_path, tiny_llama, server))
        killer.join()
    assert result.step == 6
    checked_run(run, 6)
    assert len(of(run, WorkerLost)) == 1


def test_an_adapter_is_trained(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(tiny_llama) as server:
        config = config_for(tmp_path, tiny_llama, server, lora={"rank": 4}, train={"steps": 3, "learning_rate": 1e-2})
        assert headrace.train(config).step == 3
    checked_run(tmp_path / "runs" / "tiny", 3)


@pytest.mark.parametrize(("fault", "lora"), [("adapter_ignored", {"rank": 4}), ("weights_ignored", {})])
def test_the_probe_stops_a_run_whose_server_did_not_load(
    fault: str, lora: dict[str, Any], tiny_llama: Path, tmp_path: Path
) -> None:
    with serving(tiny_llama, fault) as server:
        train = {"steps": 3, "learning_rate": 0.5}
        watch = {"identity_every": 1}
        with pytest.raises(
            IdentityError, match=r"does not compute the policy that is trained\. Its server has not applied"
        ):
            headrace.train(config_for(tmp_path, tiny_llama, server, lora=lora, train=train, watch=watch))


def test_what_cannot_be_is_refused_before_the_trainer_starts(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(tiny_llama) as server:
        for tables, words in (
            ({"engine": {"dtype": "bfloat16"}}, 'set engine.dtype = "float32"'),
            ({"engine": {"context_length": 128}}, "vllm serve --max-model-len 129"),
            ({"rollout": {"stop": ["x"]}}, "remove rollout.stop"),
            ({"partial": {"mode": "stream"}}, 'set partial.mode = "inflight"'),
        ):
            with pytest.raises(ConfigError, match=re.escape(words)):
                headrace.train(config_for(tmp_path, tiny_llama, server, **tables))
