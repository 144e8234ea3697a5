"""Draws the picture of end_to_end.py with the Python of .venv-trl: `end_to_end_curves.py curves.json PICTURE.png`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(source: Path, to: Path) -> None:
    told = json.loads(source.read_text())
    systems = list(dict.fromkeys(curve["system"] for curve in told["curves"]))
    figure, axes = plt.subplots(figsize=(9, 4), dpi=110)
    labelled = set()
    for curve in told["curves"]:
        points, system = curve["points"], curve["system"]
        axes.errorbar(
            [point["seconds"] / 60 for point in points],
            [point["reward"] for point in points],
            [point["sem"] for point in points],
            color=f"C{systems.index(system)}",
            marker="o",
            markersize=3,
            capsize=2,
            linewidth=1.2,
            label=None if system in labelled else system,
        )
        labelled.add(system)
    axes.axhline(told["target"], color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="minutes of training", ylabel="held-out reward", ylim=(0, 1), xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(to)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
