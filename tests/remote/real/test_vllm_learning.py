"""The reward of runs with the real vLLM rises as that of the native engine does: the same tasks, several seeds each."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from real_vllm import MARKS, config_for, save_model

import headrace
from headrace.facts.records import StepRow
from support.tiny_run import of

pytestmark = MARKS

SEEDS, STEPS, ENDS = (0, 1, 2), 25, 5
NATIVE = {"kind": "native", "dtype": "float32", "kv_gib": 0.1, "context_length": 128}


def rewards(directory: Path, model: Path, seed: int, **tables: Any) -> list[float]:
    """Mean reward of the rollouts drawn for each step: the share of the letter e in their texts."""
    directory.mkdir()
    train = {"steps": STEPS, "learning_rate": 2e-3}
    config = config_for(directory, model, rollout={"group_size": 8, "max_tokens": 16}, train=train, seed=seed)
    headrace.train({**config, **tables})
    return [row.reward_drawn for row in of(directory / "runs" / "tiny", StepRow)]


def test_the_reward_rises_as_with_the_native_engine(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path
) -> None:
    model = save_model(tmp_path_factory.mktemp("qwen2-64"), tiny_tokenizer)
    curves: dict[str, list[list[float]]] = {"native": [], "vllm": []}
    for seed in SEEDS:
        curves["native"].append(rewards(tmp_path / f"native-{seed}", model, seed, engine=NATIVE))
        curves["vllm"].append(rewards(tmp_path / f"vllm-{seed}", model, seed))
    for name, runs in curves.items():
        for seed, run in zip(SEEDS, runs, strict=True):
            print(f"| {name} | {seed} |", " | ".join(f"{value:.2f}" for value in run), "|")
    begins, lasts = (
        {name: [statistics.mean(run[part]) for run in runs] for name, runs in curves.items()}
        for part in (slice(0, ENDS), slice(-ENDS, None))
    )
    for name in curves:
        assert min(lasts[name]) > 2 * max(begins[name]), curves
    spread = max(map(statistics.stdev, lasts.values()))
    gap = abs(statistics.mean(lasts["vllm"]) - statistics.mean(lasts["native"]))
    assert gap < 3 * spread + 0.02, curves
