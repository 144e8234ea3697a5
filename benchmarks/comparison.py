"""Ten recipes on three tasks at three lags, three seeds each: the tables of docs/choosing.md, by one command that goes on where it was stopped.

    python benchmarks/comparison.py                  270 runs, each a line of `comparison.jsonl` beside this file; then the tables
    python benchmarks/comparison.py --tasks GuessTheNumber-v0 --lags 4 1
    python benchmarks/comparison.py --only-print

Tasks: the share of one letter (`toy`), a family of reasoning_gym, and a game of several turns of textarena, which is won within four guesses of a number from 1
to 9 and otherwise gives how near the last guess was (`pip install "headrace[tasks,textarena]"`). Seeds are outermost, so that a stopped comparison is whole with fewer seeds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from toy_recipes import ENDS, READ, ToyRun, make_model, trained

RECIPES = ["tis", "cispo", "decoupled_ppo", "dcpo", "gspo", "dapo", "grpo", "rloo", "dr_grpo", "ppo"]
TASKS: dict[str, dict[str, Any]] = {
    "toy": {"steps": 40},
    "letter_counting": {"steps": 30, "gym": "letter_counting"},
    "GuessTheNumber-v0": {"steps": 20, "game": "GuessTheNumber-v0"},
}


class Cell(NamedTuple):
    task: str
    recipe: str
    lag: int
    seed: int


class Ended(NamedTuple):
    first: float
    """Mean reward of the first steps."""
    last: float
    stopped: float
    """Share of the tokens without a gradient."""
    spread: float
    """Deviation of the gradient's norm in the second half, over its mean."""


def measured(run: ToyRun) -> Ended:
    norms = run.norms[len(run.norms) // 2 :]
    return Ended(fmean(run.rewards[:ENDS]), fmean(run.rewards[-ENDS:]), run.stopped, stdev(norms) / fmean(norms))


def read(path: Path) -> dict[Cell, Ended]:
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {Cell(*line[: len(Cell._fields)]): Ended(*line[len(Cell._fields) :]) for line in lines}


def make(path: Path, cells: Sequence[Cell]) -> None:
    """Makes the runs that the file lacks. A run that was stopped in the middle is made again."""
    known = read(path)
    for cell in cells:
        if cell not in known:
            with tempfile.TemporaryDirectory() as name:
                told = TASKS[cell.task]
                model = make_model(Path(name) / "model", READ if "game" in told else "")
                run = trained(Path(name) / "run", model, cell.recipe, lag=cell.lag, seed=cell.seed, **told)
            if len(run.rewards) < told["steps"]:
                raise SystemExit(f"{cell} was stopped after {len(run.rewards)} steps, and is not kept")
            with path.open("a") as file:
                file.write(json.dumps([*cell, *(round(value, 4) for value in measured(run))]) + "\n")


def with_error(values: Sequence[float]) -> str:
    error = f" ± {stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{error}"


def table(found: dict[Cell, Ended], task: str, recipes: Sequence[str], lags: Sequence[int]) -> str:
    """The rewards at each lag, and how many tokens were stopped and how the gradient varied at the largest."""
    groups: dict[tuple[str, int], list[Ended]] = defaultdict(list)
    for cell, ended in found.items():
        if cell.task == task:
            groups[cell.recipe, cell.lag].append(ended)
    lines = [
        f"| `algo.name` | {' | '.join(f'`max_lag` {lag}' for lag in lags)} | stopped, by lag | spread, by lag |",
        "|---" * (len(lags) + 3) + "|",
    ]
    for recipe in recipes:
        runs = [groups[recipe, lag] for lag in lags]
        rewards = [with_error([run.last for run in cell]) if cell else "" for cell in runs]
        stopped = ", ".join(f"{100 * fmean(run.stopped for run in cell):.1f} %" if cell else "-" for cell in runs)
        spread = ", ".join(f"{fmean(run.spread for run in cell):.2f}" if cell else "-" for cell in runs)
        lines.append(f"| `{recipe}` | {' | '.join(rewards)} | {stopped} | {spread} |")
    first = [ended.first for cell, ended in found.items() if cell.task == task]
    return "\n".join(
        [f"{task}: {len(first)} runs, {fmean(first) if first else 0:.3f} in the first {ENDS} steps", "", *lines]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kept",
        type=Path,
        default=Path(__file__).with_suffix(".jsonl"),
        help="a line for each run; runs that are in it are not made again",
    )
    parser.add_argument("--tasks", choices=[*TASKS], nargs="+", default=[*TASKS])
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only-print", action="store_true")
    told = parser.parse_args()
    cells = [
        Cell(task, recipe, lag, seed)
        for seed in told.seeds
        for task in told.tasks
        for lag in told.lags
        for recipe in told.recipes
    ]
    if not told.only_print:
        make(told.kept, cells)
    found = read(told.kept)
    print("\n\n".join(table(found, task, told.recipes, sorted(told.lags)) for task in told.tasks))


if __name__ == "__main__":
    main()
