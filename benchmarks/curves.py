"""Draws learning curves of several runs in one picture, with a table.

    pip install matplotlib && python benchmarks/curves.py RUN [RUN ...] --to curves.png

The curves are the mean reward of all rollouts per optimizer step (trained or not), smoothed over five steps, and the
held-out reward before and after with its standard error. With --by-name runs are called by their directories, and those whose names
differ only in the number at the end (native-0, native-1) have one colour.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from headrace.facts.facts import Evaluated, RunEnded, RunStarted
from headrace.facts.records import StepRow, read_metrics

SMOOTH = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--by-name", action="store_true")
    parser.add_argument("--to", type=Path, default=Path("curves.png"))
    arguments = parser.parse_args()
    figure, axes = plt.subplots(figsize=(9, 4), dpi=110)
    print(
        "| seed | held-out before | held-out after | ratio | trained groups | dropped | max lag | minutes |\n|---|---|---|---|---|---|---|---|"
    )
    colours: dict[str, str] = {}
    for run in arguments.runs:
        facts = read_metrics(run)
        started = next(fact for fact in facts if isinstance(fact, RunStarted))
        ended = [fact for fact in facts if isinstance(fact, RunEnded)][-1]
        steps = [fact for fact in facts if isinstance(fact, StepRow)]
        evals = [fact for fact in facts if isinstance(fact, Evaluated)]
        rewards = [step.reward_drawn for step in steps]
        smooth = [statistics.mean(rewards[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(rewards))]
        name = run.name if arguments.by_name else f"seed {started.seed}"
        colour = colours.setdefault(name.rstrip("0123456789") if arguments.by_name else name, f"C{len(colours)}")
        dashes = ("-", "--", ":")[started.seed % 3] if arguments.by_name else "-"
        axes.plot(
            [step.report.version for step in steps],
            smooth,
            dashes,
            color=colour,
            label=f"{name}, all rollouts drawn",
        )
        held = (
            [evaluation.step for evaluation in evals],
            [evaluation.reward_mean for evaluation in evals],
            [evaluation.reward_sem for evaluation in evals],
        )
        axes.errorbar(held[0], held[1], held[2], fmt="o", color=colour, capsize=3)
        before, after = evals[0], evals[-1]
        print(
            f"| {name} | {before.reward_mean:.3f} ± {before.reward_sem:.3f} | {after.reward_mean:.3f} ± {after.reward_sem:.3f} "
            f"| {after.reward_mean / before.reward_mean:.1f} | {ended.accounting.trained} | {sum(ended.accounting.dropped.values())} "
            f"| {max(lag for step in steps for lag in step.lags)} | {ended.t / 60:.1f} |"
        )
    axes.set(
        xlabel="optimizer step",
        ylabel="mean reward",
        ylim=(0, 1),
        title="Demo task: points are held-out prompts, ± standard error",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(arguments.to)


if __name__ == "__main__":
    main()
