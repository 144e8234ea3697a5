"""Numbers by optimizer step: one series for each name of `sinks/scalars.py`, and what the page asks of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from headrace.facts.index.growing import Growing

STEP, MINUTES, TOKENS = "step", "minutes", "tokens"
"""Axes that every series can be drawn over: steps done, minutes since the start, tokens trained."""
RARE = ("held_out/", "identity/")
"""Numbers that are measured now and then, each from many rollouts or tokens: a mean over several would be of different policies."""


class Curve(NamedTuple):
    """A series as it is drawn; all are [n]. Where several steps share a point, `y` is their mean, `low` and `high` their range."""

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    merged: int
    """Steps that a point stands for, at most."""


class StepColumns:
    """Every number of a run by its name, in order of time."""

    def __init__(self) -> None:
        self._series: dict[str, tuple[Growing, Growing]] = {}

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            steps, known = self._of(name)
            known.append(value)
            steps.append(step)

    def extend(self, name: str, steps: np.ndarray, values: np.ndarray) -> None:
        """Adds several values [n] of one number."""
        known_steps, known = self._of(name)
        known.extend(values)
        known_steps.extend(steps)

    def _of(self, name: str) -> tuple[Growing, Growing]:
        if name not in self._series:
            self._series[name] = Growing(np.int32), Growing(np.float64)
        return self._series[name]

    @property
    def names(self) -> list[str]:
        """The names of the numbers, without those of the axes."""
        return sorted(name for name in self._series if name not in (MINUTES, TOKENS))

    def items(self) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
        """Yields steps and values, as they were added."""
        for name, (steps, values) in list(self._series.items()):
            yield name, (steps.view, values.view)

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps [n], which rise, and values [n]; empty if there is no such number. A step that a resumed run did again counts
        with its last value."""
        if name not in self._series:
            return np.zeros(0, np.int32), np.zeros(0)
        steps, values = self._series[name][0].view, self._series[name][1].view
        count = min(len(steps), len(values))
        steps, values = steps[:count], values[:count]
        if np.all(steps[1:] > steps[:-1]):
            return steps, values
        order = np.argsort(steps, kind="stable")
        last = np.append(steps[order][1:] != steps[order][:-1], True)
        return steps[order][last], values[order][last]

    def last(self, name: str) -> float | None:
        values = self.series(name)[1]
        return float(values[-1]) if len(values) else None

    def drawn(
        self,
        name: str,
        over: str,
        *,
        window: int = 1,
        within: tuple[float, float] = (-np.inf, np.inf),
        points: int = 1000,
    ) -> Curve:
        """Returns a series over an axis or another number. `window`: values of which each point shows the mean, itself and those before
        it; measurements (RARE) are never smoothed. `within`: the range of x. `points`: how many to return at most; neighbours are merged."""
        steps, y = self.series(name)
        x, here = self._over(steps, over)
        x, y = x[here], trailing_mean(y, 1 if name.startswith(RARE) else window)[here]
        if over not in (STEP, MINUTES, TOKENS):
            order = np.argsort(x, kind="stable")
            x, y = x[order], y[order]
        inside = (x >= within[0]) & (x <= within[1])
        return merged(x[inside], y[inside], points)

    def _over(self, steps: np.ndarray, over: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns x [n] for each step, and where it is known [n]."""
        if over == STEP:
            return steps.astype(np.float64), np.ones(len(steps), bool)
        known, values = self.series(over)
        if not len(known):
            return np.zeros(len(steps)), np.zeros(len(steps), bool)
        if over in (MINUTES, TOKENS):
            return np.interp(steps, known, values), np.ones(len(steps), bool)
        place = np.minimum(np.searchsorted(known, steps), len(known) - 1)
        return values[place], known[place] == steps


def trailing_mean(y: np.ndarray, window: int) -> np.ndarray:
    """Returns the mean of each value and of up to `window - 1` values before it, [n]."""
    if window <= 1 or not len(y):
        return y
    total = np.concatenate([[0.0], np.cumsum(y)])
    ends = np.arange(1, len(y) + 1)
    starts = np.maximum(0, ends - window)
    return (total[ends] - total[starts]) / (ends - starts)


def merged(x: np.ndarray, y: np.ndarray, points: int) -> Curve:
    """Merges neighbours so that at most `points` remain."""
    per = -(-len(x) // max(1, points))
    if per <= 1:
        return Curve(x, y, y, y, 1)
    starts = np.arange(0, len(x), per)
    counts = np.diff(np.append(starts, len(x)))
    low, high = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
    return Curve(np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts, low, high, per)
