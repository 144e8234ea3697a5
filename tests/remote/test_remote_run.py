"""Whole runs with `engine.kind = "headrace"`: the tiny model, the real trainer here, the real server in a process of its own."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import headrace
from headrace.core.errors import ConfigError, WorkerDied
from headrace.facts.facts import WeightsLive, WorkerLost
from support.server_processes import checked_run, config_for, headrace_server, serving
from support.tiny_run import at_steps, of, until_noted


def test_a_run_over_http_trains_and_a_server_that_is_killed_costs_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with serving(headrace_server(tiny_llama, tmp_path / "cache")) as server, TemporaryDirectory(dir=memory) as shared:
        config = config_for(tmp_path, tiny_llama, server, engine={"shared_dir": shared})
        run = tmp_path / "runs" / "tiny"

        def kill_and_start_again() -> None:
            server.kill()
            server.start()
            until_noted(run, WorkerLost)

        killer = at_steps(config, {2: kill_and_start_again})
        result = headrace.train(config)
        killer.join()
        assert all(update.update.where["path"].startswith(shared) for update in of(run, WeightsLive))
        assert not list(Path(shared).iterdir()), "nothing is left there"
    assert result.step == 6
    checked_run(run, 6)
    assert len(of(run, WorkerLost)) == 1


@pytest.mark.slow
def test_an_adapter_is_trained_over_http(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(headrace_server(tiny_llama, tmp_path / "cache", "--adapters", "1")) as server:
        config = config_for(tmp_path, tiny_llama, server, lora={"rank": 4}, train={"steps": 3, "learning_rate": 1e-2})
        result = headrace.train(config)
        assert result.step == 3
        checked_run(tmp_path / "runs" / "tiny", 3)
        again = headrace.train({**config, "name": "again"})  # the server has the adapter of the run before
        assert again.step == 3


def test_what_cannot_be_is_refused_before_the_trainer_starts(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(headrace_server(tiny_llama, tmp_path / "cache")) as server:
        for engine, words in (
            ({"dtype": "bfloat16"}, 'set engine.dtype = "float32"'),
            ({"context_length": 128}, "engine.context_length=128"),
            ({"shared_dir": str(tmp_path / "nowhere")}, "nowhere is not a directory here"),
        ):
            with pytest.raises(ConfigError, match=re.escape(words)):
                headrace.train(config_for(tmp_path, tiny_llama, server, engine=engine))
        with pytest.raises(ConfigError, match="in parts"):
            headrace.train(config_for(tmp_path, tiny_llama, server, partial={"mode": "stream"}))
    with pytest.raises(WorkerDied, match=r"was away for 1 s \(engine.patience\)"):
        headrace.train(config_for(tmp_path, tiny_llama, server, engine={"patience": 1.0}))
