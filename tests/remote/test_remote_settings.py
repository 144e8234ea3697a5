"""Settings of engines behind HTTP: what one needs, and what is none of theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.engine_problems import engine_problems
from headrace.episodes.scoring.teacher.config import TeacherConfig
from headrace.run.config import load_config
from headrace.run.learning_problems import teacher_engine

URL = "http://127.0.0.1:8000"
SERVER = EngineConfig(kind="headrace", urls=(URL,))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (EngineConfig(urls=(URL,)), "engine.urls is about servers"),
        (EngineConfig(patience=5.0), "engine.patience is about servers"),
        (EngineConfig(python="p"), "engine.python is about servers"),
        (replace(SERVER, python="p"), "engine.urls names one that is running"),
        (replace(SERVER, server_args=("--x",)), "engine.server_args is about a server that the run starts"),
        (EngineConfig(kind="vllm", token_file="t"), "a run makes a token for the one that it starts"),
        (EngineConfig(kind="vllm", prefill_chunk=64), "give vLLM's own options in engine.server_args"),
        (EngineConfig(kind="vllm", swap="recompute"), 'with engine.kind = "vllm" caches are always recomputed'),
        (replace(SERVER, kind="sglang", swap="recompute"), 'with engine.kind = "sglang" caches are always recomputed'),
        (EngineConfig(kind="sglang", kv_gib=1.0), "give SGLang's own options in engine.server_args"),
        (replace(SERVER, kind="sglang", python="p"), "engine.urls names one that is running"),
        (replace(SERVER, urls=(URL, f"{URL}/")), "more than once; name each server once"),
        (replace(SERVER, urls=("127.0.0.1:8000",)), "is not the address of a server"),
        (replace(SERVER, urls=("http://127.0.0.1:8000/v1",)), "is not the address of a server"),
        (replace(SERVER, urls=("http://me:secret@host:1",)), "is not the address of a server"),
        (replace(SERVER, kv_gib=4.0), "headrace serve --set engine.kv_gib=..."),
        (replace(SERVER, path="hf"), "engine.path is the server's business"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_remedy(config: EngineConfig, words: str) -> None:
    (problem,) = engine_problems(config)
    assert words in problem


def test_what_fits_is_taken_and_kinds_that_are_not_there_are_not() -> None:
    assert not [*engine_problems(EngineConfig()), *engine_problems(SERVER)]
    assert not [*engine_problems(replace(SERVER, dtype="float32", exact=True, context_length=99))]
    assert not [*engine_problems(replace(SERVER, kind="vllm")), *engine_problems(replace(SERVER, kind="sglang"))]
    started = EngineConfig(kind="vllm", python="p", server_args=("--x",), kv_gib=1.0, max_running=3, cores=(1,))
    assert not list(engine_problems(started))
    assert not list(engine_problems(replace(started, kind="headrace", swap="recompute", path="hf")))
    assert not list(engine_problems(EngineConfig(kind="sglang", python="p", max_running=3, max_adapters=1)))
    with pytest.raises(ValueError, match="not one of the engines there are: native, headrace, vllm, sglang"):
        EngineConfig(kind="nobody")


def test_teachers_beside_a_server_run_here(tmp_path) -> None:
    tree = {
        "model": {"path": str(tmp_path)},
        "task": {"kind": "jsonl", "path": "rows.jsonl"},
        "reward": {"function": "reward.py:f"},
        "engine": {"kind": "headrace", "urls": [URL], "context_length": 77, "token_file": "token"},
    }
    config = load_config(tree)
    assert config.engine.token_file.startswith("/") and config.engine.token_file.endswith("/token")
    own = teacher_engine(config.engine, TeacherConfig(name="t", path="x"))
    assert (own.kind, own.urls, own.context_length) == ("native", (), 77)
    with pytest.raises(ConfigError, match="engine.token_file is about a server that is running"):
        load_config(tree, ["engine.urls=[]"])
    tree["engine"] = {"kind": "vllm", "python": "~/vllm/bin/python"}
    assert load_config(tree).engine.python == str(Path.home() / "vllm/bin/python")
    assert load_config(tree, ["engine.python=python3.12"]).engine.python == "python3.12"
