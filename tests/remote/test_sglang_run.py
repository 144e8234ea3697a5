"""Whole runs with `engine.kind = "sglang"`: the tiny model, the real trainer here, and in a process of its own a server that speaks as
SGLang documents it, over headrace's engine."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sglang_server
from tiny_run import of, tiny_config, when_step

import headrace
from headrace.engine.servers.server_process import free_port
from headrace.errors import ConfigError, IdentityError
from headrace.observe.facts import IdentityChecked, RunEnded, WorkerLost
from headrace.observe.records import StepRow


class Server:
    def __init__(self, model: Path, *faults: str) -> None:
        port = free_port()
        self._command = [sys.executable, sglang_server.__file__, str(model), str(port), *faults]
        self.url = f"http://127.0.0.1:{port}"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command)

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
    engine = {"kind": "sglang", "urls": [server.url], "dtype": "float32", "context_length": 64, "patience": 300.0}
    return {**config, "engine": {**engine, **tables.get("engine", {})}}


@pytest.mark.parametrize("tables", [{"rollout": {"top_p": 0.95}}, {"lora": {"rank": 4}}])
def test_a_run_trains_and_a_server_that_is_killed_costs_nothing(
    tables: dict[str, Any], tiny_llama: Path, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "tiny"
    with serving(tiny_llama) as server:

        def kill_and_start_again() -> None:
            server.kill()
            server.start()

        killer = when_step(run, 2, kill_and_start_again)
        result = headrace.train(config_for(tmp_path, tiny_llama, server, **tables))
        killer.join()
    (ended,) = of(run, RunEnded)
    rows = of(run, StepRow)
    assert result.step == len(rows) == 6 and ended.reason == "finished"
    assert ended.accounting.balance() == 0, ended.accounting
    assert of(run, IdentityChecked) and all(one.ok for one in of(run, IdentityChecked))
    assert max(lag for row in rows for lag in row.lags) <= 1
    assert len(of(run, WorkerLost)) == 1


@pytest.mark.parametrize(("fault", "lora"), [("adapter_ignored", {"rank": 4}), ("weights_ignored", {})])
def test_the_probe_stops_a_run_whose_server_did_not_load(
    fault: str, lora: dict[str, Any], tiny_llama: Path, tmp_path: Path
) -> None:
    with serving(tiny_llama, fault) as server:
        train, watch = {"steps": 3, "learning_rate": 0.5}, {"identity_every": 1}
        with pytest.raises(IdentityError, match="does not compute the policy that is trained"):
            headrace.train(config_for(tmp_path, tiny_llama, server, lora=lora, train=train, watch=watch))


def test_what_cannot_be_is_refused_before_the_trainer_starts(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(tiny_llama) as server:
        for tables, words in (
            ({"engine": {"dtype": "bfloat16"}}, 'set engine.dtype = "float32"'),
            ({"rollout": {"stop": ["x"]}}, "remove rollout.stop"),
            ({"partial": {"mode": "stream"}}, 'set partial.mode = "inflight"'),
            ({"engine": {"urls": []}}, "a run starts no SGLang server"),
        ):
            with pytest.raises(ConfigError, match=re.escape(words)):
                headrace.train(config_for(tmp_path, tiny_llama, server, **tables))
