"""How much faster is an asynchronous run than a synchronous one, where tools take a few seconds and now and then a minute?

    python benchmarks/long_tail.py [--lags 0 1 4] [--steps 16] [--mean 2.0] [--config recipes/demo/demo.toml]

A rollout has three turns of at most eight tokens and two calls between them, which wait: Pareto-distributed (alpha 1.5), at most a minute, the same
waits in every run. The reward has contrast in every group, and the learning rate is close to zero, so that all runs do the same work. Who waits
for a tool needs no core, so the machine's load matters little. Printed are seconds per step, without those in which the pipeline fills, and the
ratio to the synchronous run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import headrace
from headrace.facts.records import StepRow, read_metrics

FILL = 4
"""Steps at the start that are not counted."""

ENVIRONMENT = """
import asyncio
import random


async def play(agent, prompt, **columns):
    chance = random.Random(agent.seed)
    for turn in range(3):
        await agent.chat(prompt if turn == 0 else "And now?")
        if turn < 2:
            await asyncio.sleep(min(60.0, MEAN / 3 * chance.paretovariate(1.5)))
    return chance.random()
"""
"""A Pareto variable with alpha 1.5 has a mean of three times its least value."""


@dataclass(frozen=True)
class Measured:
    max_lag: int
    seconds: float
    longest: float
    lag: float


def measure(config: Path, directory: Path, max_lag: int, steps: int) -> Measured:
    sets = [
        f"name=lag{max_lag}",
        f"out='{directory}'",
        f"environment.function='{directory / 'waits.py'}:play'",
        "environment.max_turns=3",
        "reward.functions=[]",
        "rollout.group_size=4",
        "rollout.max_tokens=8",
        "staleness.groups_per_step=4",
        f"staleness.max_lag={max_lag}",
        "train.minutes=0",
        f"train.steps={steps}",
        "train.warmup_steps=0",
        "train.learning_rate=1e-9",
        "engine.context_length=256",
        "eval.prompts=0",
        "eval.every=0",
        "checkpoint.every=0",
        "observe.terminal=off",
    ]
    result = headrace.train(config, sets=sets)
    rows = [fact for fact in read_metrics(result.directory) if isinstance(fact, StepRow)][FILL - 1 :]
    took = [after.t - before.t for before, after in pairwise(rows)]
    lags = [(lag, tokens) for row in rows[1:] for lag, tokens in row.lags.items()]
    mean = sum(lag * tokens for lag, tokens in lags) / sum(tokens for _, tokens in lags)
    return Measured(max_lag, statistics.mean(took), max(took), mean)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, default=Path("recipes/demo/demo.toml"))
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--mean", type=float, default=2.0, help="seconds of a call, before the longest are cut off")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "waits.py").write_text(ENVIRONMENT.replace("MEAN", str(args.mean)))
        found = [measure(args.config, directory, lag, args.steps) for lag in args.lags]
    print("| max_lag | s a step | of the synchronous step | longest step, s | mean lag |")
    print("|---|---|---|---|---|")
    for one in found:
        ratio = one.seconds / found[0].seconds
        print(f"| {one.max_lag} | {one.seconds:.1f} | {ratio:.2f} | {one.longest:.1f} | {one.lag:.2f} |")


if __name__ == "__main__":
    main()
