"""Do the models of this year learn through the native engine? A hybrid, a latent-attention mixture with replayed experts, and one with sinks (docs/results.md).

Random models of four layers and the reward of `toy_recipes.py`: the share of one letter. Every version is probed for the trainer's own log-probs.

    python benchmarks/toy_models.py qwen3_next deepseek_v3 gpt_oss --seeds 0 1 --to curve.svg
"""

from __future__ import annotations

import argparse
import runpy
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import headrace
from headrace.facts.facts import IdentityChecked, RunStarted
from headrace.facts.records import StepRow, read_metrics
from headrace.testing.small_models import small_config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from conftest import CHARACTERS, SPECIAL, save_tokenizer

from support.tiny_run import tiny_config

ROOT = Path(__file__).resolve().parent.parent
STEPS = 30
ENDS = (slice(4), slice(-4, None))
"""The steps whose mean rewards are compared."""
REPLAYED = ("deepseek_v3",)


def make_model(directory: Path, model_type: str) -> Path:
    directory.mkdir()
    save_tokenizer(directory)
    torch.manual_seed(0)
    config = small_config(model_type)
    config.vocab_size = len(SPECIAL) + len(CHARACTERS)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def run(place: Path, model: Path, seed: int, replayed: bool) -> tuple[Path, list[Any]]:
    """The run's directory, and its steps."""
    place.mkdir()
    steps: list[Any] = []
    settings = tiny_config(
        place,
        model,
        seed=seed,
        name=place.name,
        rollout={"keep_routing": replayed},
        train={"steps": STEPS, "learning_rate": 3e-3},
        watch={"identity_every": 1},
        checkpoint={"every": 0},
    )
    return headrace.train(settings, on_step=steps.append).directory, steps


def row(model_type: str, found: list[tuple[Path, list[Any]]]) -> str:
    ends = [", ".join(f"{fmean(one.reward for one in steps[part]):.2f}" for _, steps in found) for part in ENDS]
    facts = [fact for directory, _ in found for fact in read_metrics(directory)]
    probes = [fact for fact in facts if isinstance(fact, IdentityChecked)]
    assert probes and all(probe.ok for probe in probes)
    path = next(fact.where["engine"] for fact in facts if isinstance(fact, RunStarted)).split(", ")[-1]
    reports = [fact.report for fact in facts if isinstance(fact, StepRow)]
    worst = max(probe.max_abs_diff for probe in probes)
    missing = sum(report.missing_routes for report in reports) if model_type in REPLAYED else "-"
    return f"| {model_type} | {path} | {' | '.join(ends)} | {len(probes)}, {worst:.0e} | {missing} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--to", type=Path, help="a chart of the first seed")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        print("| model | engine | first 4 steps | last 4 | versions probed, largest Δ log-prob | routes missing |")
        print("|---|---|---|---|---|---|")
        runs = []
        for model_type in told.models:
            model = make_model(Path(name) / f"model-{model_type}", model_type)
            places = {seed: Path(name) / f"{model_type}-{seed}" for seed in told.seeds}
            found = [run(place, model, seed, model_type in REPLAYED) for seed, place in places.items()]
            runs.append(str(found[0][0]))
            print(row(model_type, found), flush=True)
        if told.to:
            sys.argv = ["make_curves.py", *runs, "--to", str(told.to)]
            runpy.run_path(str(ROOT / "docs" / "make_curves.py"), run_name="__main__")


if __name__ == "__main__":
    main()
