"""Whole runs with `engine.kind = "sglang"`: the tiny model, the real trainer here, and in a process of its own a server that speaks as
SGLang documents it, over headrace's engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.core.errors import ConfigError, IdentityError
from headrace.facts.facts import WorkerLost
from support.server_processes import checked_run, config_for, serving, sglang
from support.tiny_run import at_steps, of, until_noted


@pytest.mark.slow
@pytest.mark.parametrize("tables", [{"rollout": {"top_p": 0.95}}, {"lora": {"rank": 4}}])
def test_a_run_trains_and_a_server_that_is_killed_costs_nothing(
    tables: dict[str, Any], tiny_llama: Path, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "tiny"
    with serving(sglang(tiny_llama)) as server:

        def kill_and_start_again() -> None:
            server.kill()
            server.start()
            until_noted(run, WorkerLost)

        config = config_for(tmp_path, tiny_llama, server, **tables)
        killer = at_steps(config, {2: kill_and_start_again})
        result = headrace.train(config)
        killer.join()
    assert result.step == 6
    checked_run(run, 6)
    assert len(of(run, WorkerLost)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trial", "words"), [(True, "a trial update"), (False, "does not compute the policy that is trained")]
)
@pytest.mark.parametrize(("fault", "lora"), [("adapter_ignored", {"rank": 4}), ("weights_ignored", {})])
def test_trial_and_probe_stop_a_run_whose_server_did_not_load(
    fault: str, lora: dict[str, Any], trial: bool, words: str, tiny_llama: Path, tmp_path: Path
) -> None:
    with serving(sglang(tiny_llama, fault)) as server:
        train, watch = {"steps": 3, "learning_rate": 0.5}, {"identity_every": 1, "trial": trial}
        with pytest.raises(IdentityError, match=words):
            headrace.train(config_for(tmp_path, tiny_llama, server, lora=lora, train=train, watch=watch))


@pytest.mark.slow
def test_what_cannot_be_is_refused_before_the_trainer_starts(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(sglang(tiny_llama)) as server:
        for tables, words in (
            ({"engine": {"dtype": "bfloat16"}}, 'set engine.dtype = "float32"'),
            ({"rollout": {"stop": ["x"]}}, "remove rollout.stop"),
            ({"partial": {"mode": "stream"}}, 'set partial.mode = "inflight"'),
            ({"engine": {"urls": []}}, "has no sglang: install it"),
        ):
            with pytest.raises(ConfigError, match=re.escape(words)):
                headrace.train(config_for(tmp_path, tiny_llama, server, **tables))
