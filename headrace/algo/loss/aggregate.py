"""Aggregation of per-token losses to one number: the weight of each loss token, fixed before the first microbatch runs.

C9: the denominator is that of the whole optimizer step. With these weights the losses of microbatches simply add up, so
no split of the step can change its gradient. (A mean of the means of microbatches depends on the split: TRL #7206.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

AggregationFunction = Callable[[Sequence[int], int], list[float]]
"""(loss tokens of every row of the step, length constant) -> the weight of each loss token of that row.

A row without loss tokens is in no denominator.
"""


def token_mean(counts: Sequence[int], constant: int) -> list[float]:
    """Every token weighs the same: sum / all loss tokens (DAPO)."""
    tokens = max(sum(counts), 1)
    return [1 / tokens for _ in counts]


def seq_mean_token_mean(counts: Sequence[int], constant: int) -> list[float]:
    """Every sequence weighs the same: mean over sequences of the mean over their tokens (GRPO as published)."""
    rows = _rows(counts)
    return [1 / (rows * max(count, 1)) for count in counts]


def seq_mean_token_sum(counts: Sequence[int], constant: int) -> list[float]:
    """Mean over sequences of the sum over their tokens: the policy gradient of REINFORCE and RLOO."""
    return [1 / _rows(counts) for _ in counts]


def token_sum(counts: Sequence[int], constant: int) -> list[float]:
    """Sum / (constant × sequences) (Dr.GRPO, arXiv 2503.20783): the length of a completion does not enter."""
    assert constant > 0, "filled in by AlgoConfig.with_length"
    return [1 / (_rows(counts) * constant) for _ in counts]


def pair_mean(counts: Sequence[int], constant: int) -> list[float]:
    """Every pair of rollouts weighs the same: the loss of pairs is divided by the pairs of the whole step where it is made
    (`trainer/step/preferring.py`), so that nothing is left to divide here."""
    return [1.0 for _ in counts]


def _rows(counts: Sequence[int]) -> int:
    return max(sum(count > 0 for count in counts), 1)


AGGREGATIONS: dict[str, AggregationFunction] = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "token_sum": token_sum,
    "pair_mean": pair_mean,
}
