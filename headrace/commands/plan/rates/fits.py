"""Fits of measurements: least squares without negative coefficients, how alike the rollouts of a prompt are, what prompts share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(Value at 0, slope) of the least squares line; neither is negative."""
    x = np.array([[1.0, at] for at, _ in points])
    a, b = nonnegative(x, np.array([value for _, value in points]))
    return float(a), float(b)


def nonnegative(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[k] coefficients >= 0 that minimise |x c - y|², for [n, k] `x` with few columns: the best of all subsets of them."""
    columns = x.shape[1]
    best, found = np.inf, np.zeros(columns)
    for size in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), size):
            part = np.linalg.lstsq(x[:, chosen], y, rcond=None)[0]
            error = float(((x[:, chosen] @ part - y) ** 2).sum())
            if (part >= 0).all() and error < best * (1 - 1e-12):
                best, found = error, np.zeros(columns)
                found[list(chosen)] = part
    return found


def alike(groups: Sequence[Sequence[float]]) -> float:
    """Intraclass correlation of one-way groups (ICC(1), Shrout and Fleiss, 1979), from 0 to 1; 0 if it cannot be computed."""
    full = [np.asarray(group, float) for group in groups if len(group) > 1]
    if len(full) < 2:
        return 0.0
    size = float(np.mean([len(group) for group in full]))
    grand = np.concatenate(full).mean()
    between = sum(len(group) * (group.mean() - grand) ** 2 for group in full) / (len(full) - 1)
    within = sum(((group - group.mean()) ** 2).sum() for group in full) / sum(len(group) - 1 for group in full)
    total = between + (size - 1) * within
    return float(min(1.0, max(0.0, (between - within) / total))) if total > 0 else 0.0


def newly_computed(computed: float, prompts: Sequence[int], together: int) -> float:
    """The share of prompt tokens that is computed where `together` prompts follow new weights. `computed`: tokens computed for all of
    `prompts`, given by their lengths, under the same weights. Prompts of a task often share a beginning, which is computed once under
    each version: the fewer prompts a version has, the larger a share that is."""
    count, whole = len(prompts), float(sum(prompts))
    if count < 2:
        return 1.0
    shared = min(whole / count, max(0.0, (whole - computed) / (count - 1)))
    return 1 - shared * (together - 1) / together * count / whole


def rotated(values: Sequence[T], sizes: Sequence[int]) -> Iterator[Sequence[T]]:
    """Yields as many values as each size says, each time those that follow, from the first again after the last."""
    start = 0
    for size in sizes:
        yield [values[(start + i) % len(values)] for i in range(size)]
        start += size
