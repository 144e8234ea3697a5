"""Writes what a run has measured into the table of its recipe's README, and draws its curve beside it:
`python docs/make_recipe.py RUN RECIPE [--note TEXT]`.

Everything but the note is read from the run's own metrics: the note says what else used the machine, or where more can be read. The commit is
that of this checkout, so write the record before anything else is changed.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import make_curves

from headrace.facts.facts import Evaluated, ProcessesUsed, RunEnded, RunStarted
from headrace.facts.records import METRICS, MetricsFact, read_metrics

RECIPES = Path(__file__).parent.parent / "recipes"
PICTURE = "![The curve of this run](curve.svg)"
TABLE = re.compile(rf"^\| \| \|\n\|---\|---\|\n(\|.*\n)+(\n{re.escape(PICTURE)}\n)?", flags=re.MULTILINE)
GIB = 2**30


def rows(facts: Sequence[MetricsFact], when: str) -> dict[str, str]:
    """The rows of the table. Raises ValueError for a run that did not finish or that measured nothing held out."""
    starts = [one for one in facts if isinstance(one, RunStarted)]
    ends = [one for one in facts if isinstance(one, RunEnded)]
    found = [one for one in facts if isinstance(one, Evaluated) and not one.name and one.prompts]
    if len(starts) != 1 or not ends or ends[-1].reason != "finished":
        raise ValueError("a record is of one run that began and finished in one go")
    if len(found) < 2 or (found[0].phase, found[-1].phase) != ("before", "after"):
        raise ValueError("a record needs the held-out reward before and after training: set eval.prompts")
    start, (before, *_, after) = starts[0], found
    return {
        "learned": _learned(before, after, start.seed),
        "time": _time(ends[-1], start.groups_per_step),
        "memory": _memory(facts),
        "record": f"{when}, {start.machine['threads']} threads of {start.machine['cpu']}",
    }


def _learned(before: Evaluated, after: Evaluated, seed: int) -> str:
    change = f"{before.reward_mean:.3f} ± {before.reward_sem:.3f} → {after.reward_mean:.3f} ± {after.reward_sem:.3f}"
    error = math.hypot(before.reward_sem, after.reward_sem)
    sure = after.reward_mean - before.reward_mean > 2 * error
    doubt = "" if sure else ": within two standard errors, so this run does not prove that it learned"
    return f"held-out reward {change} ({after.prompts} prompts, seed {seed}){doubt}"


def _time(end: RunEnded, groups: int) -> str:
    minutes, seconds = divmod(round(end.t), 60)
    size = f"{groups} group{'s' if groups > 1 else ''}"
    return f"{minutes}:{seconds:02d} for {end.step} steps of {size}, with loading and measuring"


def _memory(facts: Sequence[MetricsFact]) -> str:
    used = [sum(one.memory for one in fact.processes.values()) for fact in facts if isinstance(fact, ProcessesUsed)]
    return (
        f"{max(used) / GIB:.1f} GiB in all processes; pages that they share count in each" if used else "not measured"
    )


def written(readme: str, table: dict[str, str]) -> str:
    """Returns the README with this table in place of its own. Raises ValueError if it has none."""
    lines = "".join(f"| {name} | {text} |\n" for name, text in table.items())
    changed, count = TABLE.subn(lambda _: f"| | |\n|---|---|\n{lines}\n{PICTURE}\n", readme)
    if count != 1:
        raise ValueError(f"a README has one table with two columns and no headings; this one has {count}")
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("recipe", choices=sorted(folder.name for folder in RECIPES.iterdir() if folder.is_dir()))
    parser.add_argument("--note", default="", help="is added to the record")
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=RECIPES, capture_output=True, text=True, check=True
    ).stdout.strip()
    day = datetime.fromtimestamp((arguments.run / METRICS).stat().st_mtime, UTC).date()
    table = rows(read_metrics(arguments.run), f"{day}, commit {commit}")
    table["record"] += f"; {arguments.note}" if arguments.note else ""
    folder = RECIPES / arguments.recipe
    readme = folder / "README.md"
    readme.write_text(written(readme.read_text(encoding="utf-8"), table), encoding="utf-8")
    curve = make_curves.picture([(arguments.recipe, *make_curves.curve(arguments.run))])
    (folder / "curve.svg").write_text(curve, encoding="utf-8")
    print("\n".join(f"{name}: {text}" for name, text in table.items()))


if __name__ == "__main__":
    main()
