"""Distributions over the steps of a run: lengths as percentiles, and the rewards of groups as a heat map. Both are drawn from the numbers of all
steps and groups, so that a run of any length costs the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace.facts.number_tables import OUTCOMES, STEP, StepColumns
from headrace.facts.texts import number, percent, plural, reward_text
from headrace.views.report.svg import Chart, extent, figure

POINTS = 200
"""Points of a curve at most."""
ACROSS = 100
"""Columns of a heat map at most."""
MOST_HITS = 16
"""The largest group that has a row for each number of hits."""
ROWS = 10
"""Rows of a heat map otherwise."""
NEAR = 1e-6
"""The rounding of float32 in a mean of hits, for each rollout."""
APART = 0.1
"""Height of the rows of groups without a hit, and with hits alone, where the others are shares of hits."""


def over_time(columns: StepColumns | None, groups: np.ndarray | None) -> Sequence[str]:
    """Returns all of them; none for some steps of a run, of which only the facts are known."""
    if columns is None or groups is None:
        return ()
    return lengths_over_time(columns), solve_rates_over_time(groups)


def lengths_over_time(columns: StepColumns) -> str:
    """Returns the figure of the lengths of trained completions; empty where steps have no percentiles."""
    low, middle, high = (columns.drawn(f"length/p{p}", STEP, points=POINTS) for p in (10, 50, 90))
    if len(middle.x) < 2:
        return ""
    x = middle.x.tolist()
    ends = (min(x) - 0.5, max(x) + 0.5)
    chart = Chart(ends, extent([*low.y.tolist(), *high.y.tolist()], zero=True))
    chart.band(_points(x, low.y), _points(x, high.y), "c5").line(_points(x, middle.y), "c5")
    edges = _edges(x)
    for place, step in enumerate(x):
        texts = [
            f"{name} {number(float(curve.y[place]), 4)}"
            for name, curve in (("p90", high), ("median", middle), ("p10", low))
        ]
        chart.hover(edges[place], edges[place + 1], "\n".join([f"step {step:.0f}", *texts, "tokens"]))
    keys = [("c5", "median, and the band of p10 to p90")]
    note = "tokens of the trained completions" + (
        f"; each point is the mean of {middle.merged} steps" if middle.merged > 1 else ""
    )
    return figure("Completion lengths over the run", chart.html("Lengths over steps"), keys, note)


def _points(x: Sequence[float], y: np.ndarray) -> list[tuple[float, float]]:
    return list(zip(x, y.tolist(), strict=True))


def _edges(x: Sequence[float]) -> list[float]:
    return [x[0] - 0.5, *((a + b) / 2 for a, b in itertools.pairwise(x)), x[-1] + 0.5]


# --- The rewards of groups


class HeatMap(NamedTuple):
    """Shares of the groups of some steps, by their reward."""

    steps: np.ndarray
    """[n + 1] the edges of the columns, in steps."""
    counts: np.ndarray
    """[n] groups of each column."""
    rows: Sequence[tuple[float, float, str]]
    """[m] lower and upper edge of each row, lowest first, and its name."""
    shares: np.ndarray
    """[n, m] of the groups of the column; each column adds up to 1, or to 0 if it has no groups."""
    unit: str


def heat_map(groups: np.ndarray) -> HeatMap | None:
    """Counts groups (rows of `GroupTable`) that have a reward, trained or not. A group that was dropped counts for the step in which those that
    were drawn before it were trained. None if there are fewer than two steps."""
    at = np.maximum(np.maximum.accumulate(groups["step"]), 1) if len(groups) else np.zeros(0)
    known = (groups["outcome"] > 0) & (groups["outcome"] < OUTCOMES.index("failed")) & np.isfinite(groups["mean"])
    known &= groups["size"] > 0
    at, found = at[known], groups[known]
    last = int(at.max(initial=0))
    if last < 2:
        return None
    per = -(-last // ACROSS)
    column = (at - 1) // per
    row, rows, unit = _rows(found)
    count = -(-last // per)
    table = np.zeros((count, len(rows)))
    np.add.at(table, (column, row), 1.0)
    counts = table.sum(axis=1)
    edges = np.minimum(np.arange(count + 1) * per, last) + 0.5
    return HeatMap(edges, counts, rows, table / np.maximum(counts, 1)[:, None], unit)


def _rows(groups: np.ndarray) -> tuple[np.ndarray, list[tuple[float, float, str]], str]:
    """Returns the row [n] of each group, the rows, and what they are of."""
    mean = groups["mean"].astype(np.float64)
    if not _only_hits(groups):
        low, high = float(mean.min()), float(mean.max())
        wide = (high - low) / ROWS or 1.0
        row = np.minimum((mean - low) / wide, ROWS - 1).astype(np.int64)
        edges = [low + i * wide for i in range(ROWS + 1)]
        return (
            row,
            [(a, b, f"{reward_text(a)} to {reward_text(b)}") for a, b in itertools.pairwise(edges)],
            "mean reward of a group",
        )
    most = int(groups["size"].max())
    if most <= MOST_HITS:
        row = np.rint(mean * most).astype(np.int64)
        smaller = ", or so large a share of a smaller one" if (groups["size"] < most).any() else ""
        rows = [(i - 0.5, i + 0.5, plural(i, "hit")) for i in range(most + 1)]
        return row, rows, f"hits of a group of {most}{smaller}"
    row = np.where(mean <= 0, 0, np.where(mean >= 1, ROWS + 1, 1 + np.minimum(mean * ROWS, ROWS - 1).astype(np.int64)))
    between = [(i / ROWS, (i + 1) / ROWS, f"{percent(i / ROWS)} to {percent((i + 1) / ROWS)}") for i in range(ROWS)]
    return row, [(-APART, 0.0, "no hit"), *between, (1.0, 1.0 + APART, "hits alone")], "share of hits in a group"


def _only_hits(groups: np.ndarray) -> bool:
    """Whether rewards are 0 and 1 alone: those of a group that has both may have others between them."""
    ends = np.isin(groups["worst"], (0.0, 1.0)).all() and np.isin(groups["best"], (0.0, 1.0)).all()
    hits = groups["mean"].astype(np.float64) * groups["size"]
    return bool(ends and (np.abs(hits - np.rint(hits)) < NEAR * groups["size"]).all())


def solve_rates_over_time(groups: np.ndarray) -> str:
    """Returns the heat map as a figure; empty where there are too few steps."""
    found = heat_map(groups)
    if found is None:
        return ""
    edges = found.steps.tolist()
    chart = Chart((edges[0], edges[-1]), (found.rows[0][0], found.rows[-1][1]))
    for left, right, shares, count in zip(edges, edges[1:], found.shares.tolist(), found.counts.tolist(), strict=False):
        for (low, high, _), share in zip(found.rows, shares, strict=True):
            if share:
                chart.cell((left, right), (low, high), "c1", math.sqrt(share))
        steps = f"step {left + 0.5:.0f}" if right - left < 1.5 else f"steps {left + 0.5:.0f} to {right - 0.5:.0f}"
        told = [
            f"{name} {percent(share)}"
            for (_, _, name), share in reversed(list(zip(found.rows, shares, strict=True)))
            if share
        ]
        chart.hover(left, right, "\n".join([f"{steps}, {plural(int(count), 'group')}", *told[: MOST_HITS + 1]]))
    note = f"{found.unit}; the stronger the colour, the more of the groups, trained or not. Without a mixture of rewards a group has no gradient."
    return figure("Rewards of groups over the run", chart.html("Heat map of the rewards of groups"), (), note)
