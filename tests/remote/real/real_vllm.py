"""The real vLLM for tests: its interpreter, the smallest model that it serves on a CPU, and the settings of a run that starts it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import ConfigError
from headrace.core.protocols import Engine
from headrace.core.types import Completion
from headrace.core.weights import WeightUpdate
from headrace.engine.remote.dialect import Dialect
from headrace.engine.remote.dialects import vllm
from headrace.engine.remote.server_kind import Described
from headrace.engine.servers.installed import look
from headrace.engine.servers.server_process import ServerProcess
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.world.world import FactList
from headrace.run import starting
from headrace.run.config import RunConfig, load_config
from headrace.run.worker.build import open_launcher
from headrace.run.worker.own_server import Surroundings, server_process
from headrace.weight_sync.transport import AnyTransport
from support.tiny_run import tiny_config

PYTHON = os.environ.get("HEADRACE_VLLM_PYTHON") or str(Path(__file__).parents[3] / ".venv-bench/bin/python")


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


LARGE = {
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Heads of 64 dimensions: fewer vLLM does not serve on a CPU. Heads do not fill the hidden size, keys are shared by two heads, and the
vocabulary, that of the tokenizer, is a multiple of nothing that vLLM pads it to."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "hidden_size": 256}),  # its heads fill it, whatever head_dim says
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}
"""Models as people have them: untied; tied with biases; tied with norms of heads; tied with sliding windows. Of mixtures vLLM for CPUs
cannot reload the experts."""


WIDE = 0.1
"""The spread of matrices of whose attention something is seen: of the usual ones, queries and keys change next to nothing."""


def save_model(directory: Path, tokenizer: Path, kind: str = "qwen2", head: int = 64, spread: float = 0.02) -> Path:
    """Saves a random model of this kind. Whatever is zero or one in a new model, biases and norms, has other values. `head`: the dimensions of
    a head; `spread`: the standard deviation of matrices."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    shutil.copytree(tokenizer, directory, dirs_exist_ok=True)
    torch.manual_seed(0)
    name, settings = KINDS[kind]
    vocabulary = len(AutoTokenizer.from_pretrained(directory))
    config = AutoConfig.for_model(
        name, vocab_size=vocabulary, **{**LARGE, **settings, "head_dim": head, "initializer_range": spread}
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return directory


def server_of(
    config: RunConfig, model: Path, logs: Path, transport: AnyTransport, sleeps: bool = False
) -> ServerProcess:
    """The server of a run, as the run makes it."""
    facts, clock = FactList(), time.monotonic
    telemetry = Telemetry(facts.record, clock, Waits(facts.record, clock, 1000.0, 2000.0))
    around = Surroundings(model_dir=model, transport=transport, logs=logs, telemetry=telemetry, sleeps=sleeps)
    return server_process(config.engine, starting.needs_of_server(config, model), around)


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


@asynccontextmanager
async def started(config: dict[str, Any], model: Path, directory: Path, facts: FactList) -> AsyncIterator[Engine]:
    """The engine of a run, without the run."""
    clock, read = asyncio.get_running_loop().time, load_config(config)
    begun = starting.start_engine(
        read,
        model_dir=model,
        launcher=open_launcher(directory),
        transport=starting.transport_of(read, directory),
        logs=directory,
        telemetry=Telemetry(facts.record, clock, Waits(facts.record, clock, 1000.0, 2000.0)),
    )
    try:
        await begun.launch()
        await begun.finish({}, 0)
        yield begun.engine
    finally:
        await begun.engine.close()


def speaks(monkeypatch: pytest.MonkeyPatch, make: Callable[[Described], Dialect]) -> None:
    """Has runs talk to vLLM by this dialect."""
    monkeypatch.setattr(vllm, "SERVER", dataclasses.replace(vllm.SERVER, dialect=make))


def changed(model: Path, to: Path, seed: int = 1) -> Path:
    """The same model with other weights. A tied head is in the file once more, as in a version of a run: vLLM's reload goes by names."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    shutil.copytree(model, to)
    torch.manual_seed(seed)
    other = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    other.save_pretrained(to)
    weights = load_file(to / "model.safetensors")
    head = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()} if "lm_head.weight" not in weights else {}
    save_file(weights | head, to / "model.safetensors", {"format": "pt"})
    return to


def updates(models: Sequence[Path]) -> list[WeightUpdate]:
    return [
        WeightUpdate(version=v, kind="full", fingerprint=f"f{v}", nbytes=0, seconds=0.0, where={"path": str(path)})
        for v, path in enumerate(models)
    ]


def reference(model: Path, prompt: Sequence[int], completion: Completion) -> list[float]:
    """What Hugging Face's own forward pass says of the tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    tokens = torch.tensor([[*prompt, *completion.tokens]])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(tokens).logits[0]
    told = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return told[torch.arange(len(completion.tokens)), tokens[0, len(prompt) :]].tolist()


def when(true: Callable[[], bool], act: Callable[[], object], every: float = 0.002) -> None:
    deadline = time.monotonic() + 600
    while not true():
        if time.monotonic() > deadline:
            return
        time.sleep(every)
    act()
