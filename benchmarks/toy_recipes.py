"""Recipes on a toy task, with fresh and with stale tokens: does a loss learn, and what does lag cost it? (docs/algorithms.md)

A random model of two layers, whose reward is the share of one letter; a run takes some ten seconds of one core.

    python benchmarks/toy_recipes.py grpo ce_gppo vespo --lags 1 4 --seeds 0 1
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import fmean

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headrace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from conftest import CHARACTERS, SPECIAL, save_tokenizer

from support.tiny_run import tiny_config

STEPS, ENDS = 20, 4


def make_model(directory: Path) -> Path:
    directory.mkdir()
    save_tokenizer(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def rewards(place: Path, model: Path, recipe: str, lag: int, seed: int) -> list[float]:
    """The mean reward of each step."""
    place.mkdir()
    found: list[float] = []
    settings = tiny_config(
        place,
        model,
        seed=seed,
        algo={"name": recipe},
        train={"steps": STEPS, "learning_rate": 3e-3},
        staleness={"max_lag": lag},
        checkpoint={"every": 0},
    )
    headrace.train(settings, on_step=lambda step: found.append(step.reward))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--lags", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = make_model(Path(name) / "model")
        print("| `algo.name` | " + " | ".join(f"`max_lag` {lag}" for lag in told.lags) + " |")
        print("|---" * (1 + len(told.lags)) + "|")
        for recipe in told.recipes:
            cells = []
            for lag in told.lags:
                curves = [
                    rewards(Path(name) / f"{recipe}-{lag}-{seed}", model, recipe, lag, seed) for seed in told.seeds
                ]
                cells.append(", ".join(f"{fmean(curve[-ENDS:]):.3f}" for curve in curves))
                begun = ", ".join(f"{fmean(curve[:ENDS]):.3f}" for curve in curves)
                print(f"{recipe}, max_lag {lag}: first {ENDS} steps {begun}", file=sys.stderr)
            print(f"| `{recipe}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
