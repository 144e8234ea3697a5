"""headrace's native engine as a contender of engine.py, in process: `engine_headrace.py MODEL_DIR auto|kernels|fused|hf`."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import torch
from engine_loads import Ask, Load, run_closed_loop
from engine_serve import Done, Run, done, serve

from headrace.core.types import Request, Sampling
from headrace.core.weights import WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import NativeEngine
from headrace.engine.native.runners.skeleton import parameters_from_dir

KV_GIB = 2.0
"""GiB of KV cache for a load that sets no budget: as much as vLLM gets."""


def start(arguments: list[str]) -> Run:
    model_dir, path = Path(arguments[0]), arguments[1]
    parameters = parameters_from_dir(model_dir, torch.bfloat16)
    engines: dict[EngineConfig, NativeEngine] = {}

    def run(load: Load) -> Done:
        config = settings(load, token_nbytes(model_dir), path)
        if config not in engines:
            engines.clear()
            engine = engines[config] = NativeEngine(model_dir, config)
            engine.swap(
                engine.prepare(WeightUpdate(version=0, kind="full", fingerprint="", nbytes=0, seconds=0.0), parameters)
            )
            # The system gives the cache's memory page by page, once in an engine's life. vLLM takes it at its start.
            engine._runner.clear_blocks(np.arange(engine._schedule.blocks.count))
            gc.freeze()  # as a worker does
        return time(engines[config], load)

    return run


def settings(load: Load, per_token: int, path: str) -> EngineConfig:
    gib = load.kv_tokens * per_token / 2**30 if load.kv_tokens else KV_GIB
    return EngineConfig(
        device="cpu",
        dtype="bfloat16",
        kv_gib=gib,
        max_running=load.at_once,
        context_length=load.context,
        path=path,  # type: ignore[arg-type]  # pydantic checks it
    )


def token_nbytes(model_dir: Path) -> int:
    """Returns the bytes of KV cache of one token in bf16, all layers."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers * 2 * config.num_key_value_heads * head * torch.bfloat16.itemsize


def time(engine: NativeEngine, load: Load) -> Done:
    logprobs: list[list[float]] = [[] for _ in load.asks]
    most = 0

    def add(index: int, ask: Ask) -> None:
        sampling = Sampling(max_tokens=ask.tokens, ignore_eos=True, seed=index)
        engine.add(Request(str(index), tuple(ask.prompt), sampling))

    def step() -> int:
        nonlocal most
        output = engine.step()
        for request_id, logprob in zip(output.request_ids, output.logprobs, strict=True):
            logprobs[int(request_id)].append(logprob)
        for finished in output.finished:
            if finished.stop != "length":
                raise RuntimeError(f"request {finished.request_id} ended with {finished.stop}: {finished.error}")
        most = max(most, len(output.request_ids))
        return len(output.finished)

    seconds = run_closed_loop(load, add, step)
    engine.integrity()
    return done(load, seconds, logprobs, path=engine.capabilities.path, most_running=str(most))


if __name__ == "__main__":
    serve(start)
