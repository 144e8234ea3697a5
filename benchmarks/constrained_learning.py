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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import headrace
from headrace.durable.journal import ReadyRecord, read_journal
from headrace.facts.records import StepRow, read_metrics

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
    """Prints a row for each arm, means over its runs and their spread, and draws the curves."""
    print(
        "| arm | runs | valid, first third | last third | reward, first 3 steps | last 5 | ratio, first 3 | last 5 | KL, first 3 | last 5 | clipped, first 3 |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    found = {}
    for arm in ARMS:
        places = sorted(directory.glob(f"{arm}-*"))
        runs = [[fact for fact in read_metrics(run) if isinstance(fact, StepRow)] for run in places]
        if runs:
            found[arm] = runs
            print(f"| {arm} | {len(runs)} | {' | '.join([*_validity(places), *_numbers(runs)])} |")
    curves(found, directory / "curves.png")


def _validity(places: list[Path]) -> list[str]:
    """The share of completions that have the form, in the first and the last third of the groups that were trained (without contrast, none is)."""
    shares: list[list[float]] = [[], []]
    for run in places:
        groups = {record.group.ticket: record.group for record in read_journal(run) if isinstance(record, ReadyRecord)}
        valid = [
            statistics.mean(bool(_said(rollout.episode.last.text)) for rollout in groups[ticket].scored)
            for ticket in sorted(groups)
            if groups[ticket].scored
        ]
        third = max(1, len(valid) // 3)
        shares[0].append(statistics.mean(valid[:third]))
        shares[1].append(statistics.mean(valid[-third:]))
    return [_spread(share) for share in shares]


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def _numbers(runs: list[list[StepRow]]) -> list[str]:
    first, last = slice(0, 3), slice(-5, None)

    def of(read: Callable[[StepRow], float], part: slice) -> str:
        return _spread([statistics.mean(read(step) for step in run[part]) for run in runs])

    reads: list[Callable[[StepRow], float]] = [
        lambda step: step.reward_drawn,
        lambda step: step.report.ratio_mean,
        lambda step: step.report.kl,
    ]
    clipped = of(lambda step: step.report.clip_fraction, first)
    return [*(of(read, part) for read in reads for part in (first, last)), clipped]


def curves(found: dict[str, list[list[StepRow]]], to: Path) -> None:
    """Draws reward and KL by step, a thin line for each run and a thick one for their mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), dpi=100)
    for number, (arm, runs) in enumerate(found.items()):
        for axes, read in ((left, lambda step: step.reward_drawn), (right, lambda step: step.report.kl)):
            lines = [[read(step) for step in run] for run in runs]
            for line in lines:
                axes.plot(range(1, len(line) + 1), line, color=f"C{number}", linewidth=0.6, alpha=0.6)
            mean = [statistics.mean(step) for step in zip(*lines, strict=False)]
            axes.plot(range(1, len(mean) + 1), mean, color=f"C{number}", label=arm)
    left.set(xlabel="step", title="reward of what was drawn")
    right.set(xlabel="step", title="KL(sampler ‖ trainer) at lag 0, nats")
    left.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(to)


if __name__ == "__main__":
    main()
