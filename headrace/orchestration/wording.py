"""A run in words: its headline, and what runs where."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.config import RunConfig
from headrace.native.cores import usable_cores


def headline(config: RunConfig) -> str:
    model, task = Path(config.model.path).name, config.task
    prompts = task.name or Path(task.path).name or task.rows.partition(" ")[2].strip("()")  # `100 rows`
    return f"{model} · {prompts} · {config.algo.name} · max lag {config.staleness.max_lag}"


_DTYPES = {"auto": "bfloat16 where the hardware has it"}


def where(config: RunConfig, path: str) -> dict[str, str]:
    """What runs where, in words."""
    return {
        "controller": "this process",
        "engine": f"own process, {_place(config.engine.device, config.engine.cores)}, {config.engine.serving_dtype}, {path}",
        "trainer": f"own process, {_place(config.train.device, config.train.cores)}, {config.train.dtype if config.train.dtype != 'auto' else 'bfloat16 where the hardware has it'}",
        "weights": "shared memory: base once, then adapters"
        if config.lora.served_name
        else "shared memory, two packed buffers",
        "scorer": f"{config.reward.workers} workers",
        **{f"teacher {one.name}": f"own process, {one.asked}, by {one.mode}" for one in config.teachers},
    }


def _place(device: str, cores: Sequence[int]) -> str:
    cpu = f"CPU cores {', '.join(map(str, cores))}" if cores else f"all {usable_cores()} CPU cores, shared"
    return {"cpu": cpu, "cuda": "cuda", "auto": f"cuda if there is one, else {cpu}"}[device]
