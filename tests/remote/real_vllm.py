"""The real vLLM for tests: its interpreter, the smallest model that it serves on a CPU, and the settings of a run that starts it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_run import tiny_config

from headrace.engine.servers.installed import look
from headrace.errors import ConfigError

PYTHON = os.environ.get("HEADRACE_VLLM_PYTHON") or str(Path(__file__).parents[2] / ".venv-bench/bin/python")


def _has_vllm() -> bool:
    try:
        return not look("vllm", PYTHON).missing
    except ConfigError:
        return False


MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not _has_vllm(), reason=f"no vLLM in {PYTHON}: make bench-setup, or name one in HEADRACE_VLLM_PYTHON"
    ),
]


def save_llama(directory: Path, tokenizer: Path) -> Path:
    """Its heads have 64 dimensions: fewer vLLM does not serve on a CPU."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    shutil.copytree(tokenizer, directory, dirs_exist_ok=True)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(directory)),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def config_for(directory: Path, model: Path, **tables: Any) -> dict[str, Any]:
    engine = {
        "kind": "vllm",
        "python": PYTHON,
        "server_args": ["--enforce-eager"],  # compiling takes longer than the run
        "dtype": "float32",
        "kv_gib": 0.1,
        "context_length": 128,
        "patience": 600.0,
    }
    usual = {
        "engine": engine,
        "rollout": {"group_size": 4, "max_tokens": 64},
        "train": {"steps": 5, "learning_rate": 1e-3},
        "watch": {"identity_every": 1, "stop_after": 3600.0},
    }
    return tiny_config(directory, model, **{**usual, **tables})


def when(true: Callable[[], bool], act: Callable[[], object], every: float = 0.002) -> None:
    deadline = time.monotonic() + 600
    while not true():
        if time.monotonic() > deadline:
            return
        time.sleep(every)
    act()
