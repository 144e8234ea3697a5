"""Whole runs with `engine.kind = "vllm"`: the tiny model, the real trainer here, and in a process of its own a server that speaks as
vLLM 0.32 does, over headrace's engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.core.errors import ConfigError, IdentityError
from headrace.facts.facts import WorkerLost
from support.server_processes import checked_run, config_for, serving, vllm
from support.tiny_run import at_steps, of, until_noted


@pytest.mark.whole
def test_a_run_trains_and_a_server_that_is_killed_costs_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(vllm(tiny_llama)) as server:
        run = tmp_path / "runs" / "tiny"

        def kill_and_start_again() -> None:
            server.kill()
            server.start()
            until_noted(run, WorkerLost)

        config = config_for(tmp_path, tiny_llama, server)
        killer = at_steps(config, {2: kill_and_start_again})
        result = headrace.train(config)
        killer.join()
    assert result.step == 6
    checked_run(run, 6)
    assert len(of(run, WorkerLost)) == 1


def test_an_adapter_is_trained(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(vllm(tiny_llama)) as server:
        config = config_for(tmp_path, tiny_llama, server, lora={"rank": 4}, train={"steps": 3, "learning_rate": 1e-2})
        assert headrace.train(config).step == 3
    checked_run(tmp_path / "runs" / "tiny", 3)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "encoding"), [("tcp", "full"), ("tcp", "delta"), ("http", "delta")])
def test_weights_are_fetched(kind: str, encoding: str, tiny_llama: Path, tmp_path: Path) -> None:
    """By headrace's transfer engine in vLLM, and by a new process of it too."""
    with serving(vllm(tiny_llama, fetches=True)) as server:
        run = tmp_path / "runs" / "tiny"

        def kill_and_start_again() -> None:
            server.kill()
            server.start()
            until_noted(run, WorkerLost)

        ways = {"weight_sync": {"kind": kind, "encoding": encoding}, "watch": {"identity_every": 1}}
        config = config_for(tmp_path, tiny_llama, server, **ways)
        killer = at_steps(config, {2: kill_and_start_again})
        result = headrace.train(config)
        killer.join()
    assert result.step == 6
    checked_run(run, 6)
    assert len(of(run, WorkerLost)) == 1


@pytest.mark.slow
def test_adapters_are_fetched(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(vllm(tiny_llama, fetches=True)) as server:
        tables = {"lora": {"rank": 4}, "train": {"steps": 3, "learning_rate": 1e-2}, "weight_sync": {"kind": "tcp"}}
        assert headrace.train(config_for(tmp_path, tiny_llama, server, **tables)).step == 3
    checked_run(tmp_path / "runs" / "tiny", 3)


def test_a_vllm_without_the_transfer_engine_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(vllm(tiny_llama)) as server, pytest.raises(ConfigError, match="install headrace in its environment"):
        headrace.train(config_for(tmp_path, tiny_llama, server, weight_sync={"kind": "tcp"}))


PROBED = "does not compute the policy that is trained. Its server has not applied"
TRIED = "were not there: it would train one policy and sample from another. Its server has not applied"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "lora", "trial", "words"),
    [
        (["adapter_ignored"], {"rank": 4}, False, PROBED),
        (["adapter_ignored"], {"rank": 4}, True, TRIED),
        (["weights_ignored", "no_checker"], {}, False, PROBED),
        (["weights_ignored", "no_checker"], {}, True, TRIED),
        (["weights_ignored"], {}, False, "it has not applied the whole update"),
        (["norm_ignored"], {}, False, "5 of 10 checksums of its weights are not those of the files"),
    ],
)
def test_a_run_ends_whose_server_did_not_load_all(
    faults: list[str], lora: dict[str, Any], trial: bool, words: str, tiny_llama: Path, tmp_path: Path
) -> None:
    with serving(vllm(tiny_llama, *faults)) as server:
        train = {"steps": 3, "learning_rate": 0.5}
        watch = {"identity_every": 1, "trial": trial}
        with pytest.raises(IdentityError, match=re.escape(words)):
            headrace.train(config_for(tmp_path, tiny_llama, server, lora=lora, train=train, watch=watch))


@pytest.mark.slow
def test_what_cannot_be_is_refused_before_the_trainer_starts(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(vllm(tiny_llama)) as server:
        for tables, words in (
            ({"engine": {"dtype": "bfloat16"}}, 'set engine.dtype = "float32"'),
            ({"engine": {"context_length": 128}}, "vllm serve --max-model-len 129"),
            ({"rollout": {"stop": ["x"]}}, "remove rollout.stop"),
            ({"partial": {"mode": "stream"}}, 'set partial.mode = "inflight"'),
        ):
            with pytest.raises(ConfigError, match=re.escape(words)):
                headrace.train(config_for(tmp_path, tiny_llama, server, **tables))
