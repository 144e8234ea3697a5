"""Whole runs with `engine.kind = "headrace"`: the tiny model, the real trainer here, the real server in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny_run import of, tiny_config, when_step

import headrace
from headrace.errors import ConfigError, WorkerDied
from headrace.observe.facts import IdentityChecked, RunEnded, WeightsLive, WorkerLost
from headrace.observe.records import StepRow

SETS = {"kv_gib": 0.01, "context_length": 64, "max_running": 16, "dtype": '"float32"'}


class Server:
    def __init__(self, model: Path, cache: Path, *options: str) -> None:
        self._model, self._cache, self._options = model, cache, options
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Returns at once: whoever wants it waits."""
        sets = [word for name, value in SETS.items() for word in ("--set", f"engine.{name}={value}")]
        command = ["serve", str(self._model), "--port", str(self.port), *sets, *self._options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace", *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HEADRACE_CACHE": str(self._cache)},
        )

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def serving(model: Path, cache: Path, *options: str) -> Iterator[Server]:
    server = Server(model, cache, *options)
    try:
        yield server
    finally:
        server.kill()


def config_for(directory: Path, model: Path, server: Server, **tables: Any) -> dict[str, Any]:
    config = tiny_config(directory, model, **tables)
    remote = {"kind": "headrace", "urls": [server.url], "dtype": "float32", "context_length": 64, "patience": 300.0}
    return {**config, "engine": {**remote, **tables.get("engine", {})}}


def checked_run(directory: Path) -> None:
    """What holds of every run."""
    (ended,) = of(directory, RunEnded)
    books = ended.accounting
    assert ended.reason == "finished" and books.balance() == 0, books
    assert all(one.ok for one in of(directory, IdentityChecked)) and of(directory, IdentityChecked)
    for kind in ("full", "adapter"):
        live = [one.update.version for one in of(directory, WeightsLive) if one.update.kind == kind]
        assert live == list(range(len(live)))
    assert not list(directory.rglob("*.safetensors")) or not list(directory.glob("**/tiny-weights"))


def test_a_run_over_http_trains_and_a_server_that_is_killed_costs_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(tiny_llama, tmp_path / "cache") as server:
        config = config_for(tmp_path, tiny_llama, server)
        run = tmp_path / "runs" / "tiny"

        def kill_and_start_again() -> None:
            server.kill()
            server.start()

        killer = when_step(run, 2, kill_and_start_again)
        result = headrace.train(config)
        killer.join()
    assert result.step == 6
    checked_run(run)
    assert len(of(run, StepRow)) == 6 and len(of(run, WorkerLost)) == 1
    assert max(lag for fact in of(run, StepRow) for lag in fact.lags) <= 1


def test_an_adapter_is_trained_over_http(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(tiny_llama, tmp_path / "cache", "--adapters", "1") as server:
        config = config_for(tmp_path, tiny_llama, server, lora={"rank": 4}, train={"steps": 3, "learning_rate": 1e-2})
        result = headrace.train(config)
        assert result.step == 3
        checked_run(tmp_path / "runs" / "tiny")
        again = headrace.train({**config, "name": "again"})  # the server has the adapter of the run before
        assert again.step == 3


def test_what_cannot_be_is_refused_before_the_trainer_starts(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(tiny_llama, tmp_path / "cache") as server:
        for engine, words in (
            ({"dtype": "bfloat16"}, 'set engine.dtype = "float32"'),
            ({"context_length": 128}, "engine.context_length=128"),
        ):
            with pytest.raises(ConfigError, match=re.escape(words)):
                headrace.train(config_for(tmp_path, tiny_llama, server, engine=engine))
        with pytest.raises(ConfigError, match="in parts"):
            headrace.train(config_for(tmp_path, tiny_llama, server, partial={"mode": "stream"}))
    with pytest.raises(WorkerDied, match=r"was away for 1 s \(engine.patience\)"):
        headrace.train(config_for(tmp_path, tiny_llama, server, engine={"patience": 1.0}))
