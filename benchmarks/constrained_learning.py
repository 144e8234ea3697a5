"""What a model learns on a task that is answered as JSON: free, held to the schema and trained over the recorded sets, and held to it but
trained as if it had been free (the sets dropped).

    python benchmarks/constrained_learning.py runs/constrained --seeds 0 1 2 --steps 14
    python benchmarks/constrained_learning.py runs/constrained --table

The model is SmolLM2-135M-Instruct, the task sums and differences of two digits; the answer is {"operation": ..., "answer": ...}.
Training is synchronous (max_lag 0): a ratio other than one is an error of the log-probs, and no lag.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

import headrace

SCHEMA = {
    "type": "object",
    "properties": {
        "operation": {"enum": ["addition", "subtraction"]},
        "answer": {"type": "integer", "minimum": -9, "maximum": 18},
    },
    "required": ["operation", "answer"],
    "additionalProperties": False,
}
ARMS: dict[str, dict[str, Any]] = {
    "free": {},
    "constrained": {"constraint": {"json_schema": SCHEMA}},
    "dropped": {"constraint": {"json_schema": SCHEMA}, "keep_mask": False},
}
ASKED = 'Calculate {}. Reply with JSON only: {{"operation": "addition" or "subtraction", "answer": number}}'


def rows() -> list[dict[str, Any]]:
    pairs = [(a, sign, b) for a in range(10) for b in range(10) for sign in "+-"]
    random.Random(0).shuffle(pairs)
    return [
        {
            "prompt": ASKED.format(f"{a} {sign} {b}"),
            "operation": "addition" if sign == "+" else "subtraction",
            "result": a + b if sign == "+" else a - b,
        }
        for a, sign, b in pairs
    ]


def _said(text: str) -> dict[str, Any]:
    try:
        said = json.loads(text)
    except ValueError:
        return {}
    return said if isinstance(said, dict) and set(said) == {"operation", "answer"} else {}


def correct(
    prompts: list[str], completions: list[str], result: list[int], operation: list[str], **_: Any
) -> list[float]:
    """One half for the right operation, one half for the right number; nothing for what is not JSON of that form."""
    said = [_said(text) for text in completions]
    return [
        0.5 * (one.get("operation") == kind) + 0.5 * (one.get("answer") == number)
        for one, number, kind in zip(said, result, operation, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("to", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--table", action="store_true", help="only print what the runs there have measured")
    arguments = parser.parse_args()
    for seed in () if arguments.table else arguments.seeds:
        for arm in arguments.arms:
            train(arguments.to / f"{arm}-{seed}", arm, seed, arguments.steps)
    table(arguments.to)


def train(directory: Path, arm: str, seed: int, steps: int) -> None:
    config = {
        "seed": seed,
        "model": {"path": "smollm2-135m-instruct"},
        "rollout": {"group_size": 8, "max_tokens": 32, **ARMS[arm]},
        "algo": {"name": "grpo"},
        "train": {"steps": steps, "learning_rate": 2e-5, "warmup_steps": 3},
        "engine": {"kv_gib": 0.5, "context_length": 128},
        "staleness": {"groups_per_step": 3, "max_lag": 0},
        "checkpoint": {"every": 0},
        "eval": {"prompts": 0},
        "out": str(directory.parent),
        "name": directory.name,
    }
    headrace.train(config, reward=correct, dataset=rows())


def table(directory: Path) -> None:
    """Prints a row for each arm: means over seeds, and over the last five steps where a run learns."""
    from headrace.observe.records import StepRow, read_metrics

    print(
        "| arm | runs | reward, first 3 steps | last 5 | mean ratio, first 3 | last 5 | KL (k3), first 3 | last 5 | clipped |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for arm in ARMS:
        runs = [
            [fact for fact in read_metrics(run) if isinstance(fact, StepRow)]
            for run in sorted(directory.glob(f"{arm}-*"))
        ]
        if runs:
            print(f"| {arm} | {len(runs)} | {' | '.join(_numbers(runs))} |")


def _numbers(runs: list[list[Any]]) -> list[str]:
    def of(read: Any, part: slice) -> str:
        means = [statistics.mean(read(step) for step in run[part]) for run in runs]
        spread = statistics.stdev(means) if len(means) > 1 else 0.0
        return f"{statistics.mean(means):.3f} ± {spread:.3f}"

    first, last = slice(0, 3), slice(-5, None)
    reads = [lambda step: step.reward_drawn, lambda step: step.report.ratio_mean, lambda step: step.report.kl]
    return [
        *(of(read, part) for read in reads for part in (first, last)),
        of(lambda step: step.report.clip_fraction, slice(None)),
    ]


if __name__ == "__main__":
    main()
