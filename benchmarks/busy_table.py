"""Prints the figures of busy.py as a table, and draws a picture: `busy_table.py FIGURES.json [--to docs/busy.png]` (the
picture needs matplotlib).

*Left* is the counting threads' result beside a load, divided by their result without one. *Used* is a tree's median of
tokens per second beside the load, divided by the best tree's without one and by the share left: 1.00 means that only
the load's own share is lost. Both together are two such shares, each relative to the work alone; their sum may be above
1, since one works while the other waits.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

Rates = list[tuple[float, float]]


class Figures:
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        """`rows`: load, work, tree, and for each round the tokens per second and the counters' result."""
        self._found: dict[tuple[str, str, str], Rates] = {
            (row["load"], row["work"], row["tree"]): row["rates"] for row in rows
        }
        self.trees = list(dict.fromkeys(row["tree"] for row in rows))
        self.works = list(dict.fromkeys(row["work"].split(" of ")[-1] for row in rows))

    @property
    def loads(self) -> list[str]:
        found = {load for load, _, _ in self._found}
        return sorted(found, key=lambda load: -self.left(load, self.works[0])) if "quiet" in found else sorted(found)

    def _parts(self, work: str) -> list[str]:
        return list(dict.fromkeys(part for _, part, _ in self._found if part.split(" of ")[-1] == work))

    def left(self, load: str, work: str) -> float:
        part = self._parts(work)[0]
        return self._counted(load, part) / self._counted("quiet", part)

    def _counted(self, load: str, part: str) -> float:
        return statistics.median(counted for tree in self.trees for _, counted in self._found[load, part, tree])

    def rate(self, load: str, part: str, tree: str) -> float:
        return statistics.median(rate for rate, _ in self._found[load, part, tree])

    def share(self, load: str, work: str, tree: str) -> float:
        """The share of a quiet machine's result."""
        return sum(self.rate(load, part, tree) / self._best(part.split(" of ")[0]) for part in self._parts(work))

    def _best(self, work: str) -> float:
        return max(self.rate("quiet", work, tree) for tree in self.trees)

    def table(self) -> str:
        """Needs the load `quiet`."""
        head = ["load", *(f"{work}: {name}" for work in self.works for name in ("left", *self._named("used")))]
        lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        for load in self.loads:
            cells = [load]
            for work in self.works:
                left = self.left(load, work)
                cells.append(f"{left:.2f}")
                cells += [f"{self.share(load, work, tree) / left:.2f}" for tree in self.trees]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def _named(self, what: str) -> list[str]:
        return [f"{what}, {tree}" if tree else what for tree in self.trees]

    def details(self) -> str:
        rows = [f"{load} {part} {tree}: {self.rate(load, part, tree):.1f} tokens/s" for load, part, tree in self._found]
        return "\n".join(sorted(rows))


def draw(figures: Figures, to: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    picture, axes = plt.subplots(1, len(figures.works), figsize=(9.9, 3.6), sharey=True)
    names = {"engine16": "engine, 16 sequences", "trainer16": "trainer", "both": "engine and trainer at once"}
    for axis, work in zip(axes, figures.works, strict=True):
        axis.plot([0, 1], [0, 1], color="#999999", linewidth=1, label="all that is left")
        axis.plot([0, 1], [0, 0.6], color="#999999", linewidth=1, linestyle="--", label="60 % of it")
        for tree, colour, mark in zip(figures.trees, ("#d95f02", "#1b6ca8", "#444444"), "sov", strict=False):
            points = sorted((figures.left(load, work), figures.share(load, work, tree)) for load in figures.loads)
            axis.plot(
                *zip(*points, strict=True), color=colour, marker=mark, markersize=5, linewidth=1.2, label=tree or "used"
            )
        axis.set(title=names.get(work, work), xlim=(0.2, 1.05), ylim=(0, 1.3))
        axis.set_xlabel("share of the machine that is left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("tokens/s, of a quiet machine's")
    axes[0].legend(frameon=False, fontsize=8, loc="upper left")
    picture.tight_layout()
    picture.savefig(to, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, nargs="+", help="of several runs: their rounds are put together")
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    merged: dict[tuple[str, str, str], dict[str, Any]] = {}
    for path in options.figures:
        for row in json.loads(path.read_text()):
            kept = merged.setdefault((row["load"], row["work"], row["tree"]), {**row, "rates": []})
            kept["rates"] = [*kept["rates"], *row["rates"]]
    figures = Figures(list(merged.values()))
    print(figures.table())
    if options.to:
        draw(figures, options.to)


if __name__ == "__main__":
    main()
