"""The cut of a model into the stages of a pipeline, and which of them a rank holds. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

LOOPS = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zero_bubble": 2}
"""Stages that each rank holds, by schedule."""


def stages_of(rank: int, ranks: int, schedule: str) -> tuple[int, ...]:
    """The stages that the rank of this number in a pipeline holds: they go round the ranks."""
    return tuple(rank + ranks * loop for loop in range(LOOPS[schedule]))


def cut(costs: Sequence[float], stages: int, head: float = 0.0) -> list[range]:
    """The layers of each stage, at least one, so that the most expensive stage costs least; earlier stages have more where there is a choice.

    `costs`: of each layer. `head`: of what follows the last layer. Raises ValueError if there are fewer layers than stages.
    """
    count = len(costs)
    if count < stages:
        raise ValueError(f"{count} layers cannot be cut into {stages} stages")
    sums = [0.0, *accumulate(costs)]
    # best[i]: the lowest cost of the most expensive stage if the last i layers are cut into so many stages, and where the first ends
    best: list[tuple[float, int]] = [(sums[count] - sums[i] + head, count) for i in range(count)]
    tables = [best]
    for more in range(2, stages + 1):
        best = [
            min((max(sums[end] - sums[i], tables[-1][end][0]), -end) for end in range(i + 1, count - more + 2))
            for i in range(count - more + 1)
        ]
        best = [(cost, -end) for cost, end in best]
        tables.append(best)
    found, start = [], 0
    for table in reversed(tables):
        end = table[start][1]
        found.append(range(start, end))
        start = end
    return found
