"""Whole runs with real processes, by every way of weights: the same weights as through shared memory, resumed and replayed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace import cli
from headrace.core.errors import ConfigError
from headrace.facts.facts import RunEnded, RunStarted, WeightsLive
from headrace.run.config import load_config
from headrace.run.wording import placement
from support.tiny_run import Config, has_step, kill_when, of, tiny_config

WAYS = list(itertools.product(("tcp", "http", "files", "broadcast"), ("full", "delta")))


def config_of(directory: Path, model: Path, kind: str, encoding: str, **tables: Any) -> Config:
    """A run that computes the same at every time: what is published depends on nothing but its settings."""
    directory.mkdir(exist_ok=True)
    return tiny_config(
        directory,
        model,
        **{
            "weight_sync": {"kind": kind, "encoding": encoding},
            "train": {"steps": 4, "learning_rate": 1e-5, "dtype": "float32"},
            "engine": {"dtype": "bfloat16"},
            "staleness": {"groups_per_step": 2, "max_lag": 0},
            **tables,
        },
    )


@pytest.fixture(scope="module")
def published(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The fingerprints of all versions, through shared memory."""
    directory = tmp_path_factory.mktemp("shared")
    headrace.train(config_of(directory, tiny_llama, "auto", "full"))
    return [fact.update.fingerprint for fact in of(directory / "runs" / "tiny", WeightsLive)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "encoding"), WAYS)
def test_every_way_brings_the_same_bits(
    kind: str, encoding: str, published: list[str], tiny_llama: Path, tmp_path: Path
) -> None:
    assert headrace.train(config_of(tmp_path, tiny_llama, kind, encoding)).reason == "finished"
    live = of(tmp_path / "runs" / "tiny", WeightsLive)
    assert [fact.update.fingerprint for fact in live] == published and len(set(published)) == 5
    (started,) = of(tmp_path / "runs" / "tiny", RunStarted)
    assert started.weights and (started.weights.transport, started.weights.encoding) == (kind, encoding)
    travelled = [fact.load.received / fact.update.nbytes for fact in live]
    if encoding == "full":
        assert all(1 <= share < 1.2 for share in travelled), "with the gaps for alignment"
    else:
        assert max(travelled) < 0.5, "the first one is a difference from the weights of the trial, which came whole"
    assert not list((tmp_path / "runs").rglob("*-weights")), "nothing is left behind"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_memory_of_a_gpu_is_refused_at_the_start_without_one(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs trainer and engines on one GPU of this machine"):
        headrace.train(tiny_config(tmp_path, tiny_llama, weight_sync={"kind": "cuda_ipc"}))


@pytest.mark.slow
def test_killed_resumed_and_replayed(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path, tiny_llama, "tcp", "delta", checkpoint={"every": 1})
    config["train"]["steps"] = 500
    directory = tmp_path / "runs" / "tiny"
    kill_when(config, lambda: has_step(directory))
    done = max(fact.update.version for fact in of(directory, WeightsLive))
    config["train"]["steps"] = done + 4
    assert headrace.train(config, resume=directory).reason == "finished"
    ended = of(directory, RunEnded)[-1]
    assert ended.accounting.balance() == 0 and ended.step == done + 4
    assert cli.main(["replay", str(directory), "--step", str(done + 3)]) == 0
    assert "bit for bit" in capsys.readouterr().out


def test_the_dry_run_says_which_way_and_why(tiny_tokenizer: Path, tmp_path: Path) -> None:
    server = {"engine": {"kind": "headrace", "urls": ["http://10.0.0.2:8000"]}}
    cases: list[tuple[Config, str]] = [
        ({}, "shared memory: two packed buffers (trainer and engine are processes of this machine)"),
        (
            {"weight_sync": {"kind": "tcp", "encoding": "delta"}},
            'TCP: deltas, full after 50 (weight_sync.kind = "tcp")',
        ),
        ({"weight_sync": {"kind": "broadcast"}}, 'broadcast: full (weight_sync.kind = "broadcast")'),
        (server, "files: two versions (an engine behind HTTP reads what the trainer writes)"),
        (
            {**server, "weight_sync": {"host": "10.0.0.1"}},
            "TCP: full (the servers fetch from 10.0.0.1 (weight_sync.host))",
        ),
    ]
    for tables, said in cases:
        config = load_config(tiny_config(tmp_path, tiny_tokenizer, **tables) | tables)
        assert placement(config, "")["weights"] == said


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (
            {"weight_sync": {"encoding": "delta"}},
            'through memory that both ends share none do; remove it, or set weight_sync.kind = "tcp"',
        ),
        ({"weight_sync": {"kind": "tcp", "encoding": "delta"}, "lora": {"rank": 4}}, "this run publishes adapters"),
        ({"weight_sync": {"anchor_every": 3}}, 'weight_sync.anchor_every is about weight_sync.encoding = "delta"'),
        ({"weight_sync": {"kind": "cuda_ipc", "encoding": "delta"}}, "through memory that both ends share none do"),
        (
            {"weight_sync": {"kind": "cuda_ipc"}, "engine": {"kind": "vllm", "urls": ["http://10.0.0.2:1"]}},
            "opens memory of this machine's GPU, and http://10.0.0.2:1 is another machine .engine.urls.; leave",
        ),
        (
            {"weight_sync": {"kind": "cuda_ipc"}, "engine": {"kind": "vllm", "replicas": 2, "gpus": [0, 1]}},
            "is for one server, on the trainer's GPU; leave it out, or remove engine.replicas",
        ),
        (
            {"weight_sync": {"kind": "cuda_ipc"}, "engine": {"kind": "vllm", "gpus": [1]}},
            "is for the trainer's GPU, which is 0, and engine.gpus = .1.; leave one of the two out",
        ),
        (
            {"weight_sync": {"kind": "cuda_ipc"}, "engine": {"kind": "headrace"}},
            'does not reach engine.kind = "headrace", which is a server; use weight_sync.kind = "files"',
        ),
        (
            {"weight_sync": {"kind": "broadcast"}, "engine": {"kind": "vllm", "urls": ["http://127.0.0.1:1"]}},
            'does not reach engine.kind = "vllm", which is a server; use weight_sync.kind = "files"',
        ),
        (
            {
                "weight_sync": {"kind": "broadcast"},
                "orchestration": {"kind": "join", "token_file": "t", "cert": "c", "key": "k"},
            },
            'cannot be encrypted, and engines join over TLS .orchestration.cert.; use weight_sync.kind = "tcp"',
        ),
        (
            {"weight_sync": {"kind": "tcp"}, "engine": {"kind": "sglang", "urls": ["http://127.0.0.1:1"]}},
            'does not reach engine.kind = "sglang", which is a server; use weight_sync.kind = "files"',
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(
    tables: dict[str, Any], said: str, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    tables["engine"] = tables.get("engine", {}) | {"dtype": "float32"}
    with pytest.raises(ConfigError, match=said):
        load_config({**tiny_config(tmp_path, tiny_tokenizer, train={}), **tables})
