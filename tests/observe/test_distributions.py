"""Distributions over the steps of a run: lengths as percentiles, and a heat map of the rewards of groups."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict

import numpy as np
import pytest

from headrace.facts.facts import GroupEnded, StepTrained
from headrace.facts.number_tables import GroupTable, Numbers
from headrace.facts.records import StepRow, summarise
from headrace.facts.run_state import RunState
from headrace.views.report.distributions import heat_map, lengths_over_time, solve_rates_over_time
from support.fact_stream import FactStream


def ended(ticket: int, rewards: tuple[float, ...], reason: str = "") -> GroupEnded:
    outcome = "failed" if reason == "reward_raised" else "dropped" if reason else "ready"
    return GroupEnded(1.0, ticket, "p", outcome, reason, "", rewards, (4,) * len(rewards))  # type: ignore[arg-type]


def told(*groups: tuple[int, tuple[float, ...], str], trained: dict[int, list[int]]) -> np.ndarray:
    table = GroupTable()
    for ticket, rewards, reason in groups:
        table.end(ended(ticket, rewards, reason))
    for step, tickets in trained.items():
        table.train(tickets, step)
    return table.rows.view


def test_each_group_counts_once_for_its_step_and_its_number_of_hits() -> None:
    """By hand: two steps. The dropped group 2, without a hit, was drawn among those of step 1; the failed one counts nowhere."""
    rows = told(
        (0, (1.0, 0.0, 0.0, 0.0), ""),
        (1, (1.0, 1.0, 0.0, 1.0), ""),
        (2, (0.0, 0.0, 0.0, 0.0), "no_contrast"),
        (3, (1.0, 1.0, 1.0, 0.0), ""),
        (4, (), "reward_raised"),
        (5, (1.0, 1.0, 1.0, 1.0), "no_contrast"),
        trained={1: [0, 1], 2: [3]},
    )
    found = heat_map(rows)
    assert found and found.unit == "hits of a group of 4" and found.counts.tolist() == [3, 2]
    assert found.shares == pytest.approx(np.array([[1, 1, 0, 1, 0], [0, 0, 0, 1.5, 1.5]]) / 3)
    assert [name for _, _, name in found.rows] == ["0 hits", "1 hit", "2 hits", "3 hits", "4 hits"]
    assert heat_map(rows[:3]) is None, "one step is no course"


@pytest.mark.parametrize(
    ("rewards", "unit", "rows"),
    [
        ((0.0,) * 32, "share of hits in a group", 12),
        ((0.25, -1.0), "mean reward of a group", 10),
    ],
)
def test_large_groups_and_other_rewards_have_rows_by_share(rewards: tuple[float, ...], unit: str, rows: int) -> None:
    found = heat_map(told((0, rewards, ""), (1, tuple(reward + 1 for reward in rewards), ""), trained={1: [0], 2: [1]}))
    assert found and (found.unit, len(found.rows)) == (unit, rows)
    assert found.shares[0, 0] == found.shares[1, -1] == 1.0 and found.shares.sum() == 2.0


def test_parts_of_a_reward_are_no_hits_and_smaller_groups_are_told() -> None:
    partly = told((0, (0.0, 0.5, 1.0, 0.0), ""), (1, (0.0, 0.0, 1.0, 0.0), ""), trained={1: [0], 2: [1]})
    assert (found := heat_map(partly)) and found.unit == "mean reward of a group"
    smaller = told((0, (0.0, 1.0, 1.0), ""), (1, (0.0, 0.0, 1.0, 0.0), ""), trained={1: [0], 2: [1]})
    assert (found := heat_map(smaller)) and found.unit == "hits of a group of 4, or so large a share of a smaller one"


def test_a_long_run_has_no_more_columns_than_fit_and_loses_no_group() -> None:
    state, numbers, seen = RunState(), Numbers(), defaultdict[int, list[int]](list)
    for told_fact in FactStream(steps=250, troubles=False).facts():
        fact = summarise(told_fact) if isinstance(told_fact, StepTrained) else told_fact
        if isinstance(fact, StepRow):
            seen[fact.report.version] = list(fact.lengths)
        state.fold(fact)  # type: ignore[arg-type]
        numbers.take(fact, state)  # type: ignore[arg-type]
    found = heat_map(numbers.groups.rows.view)
    rated = Counter(row["outcome"] for row in numbers.groups.rows.view if np.isfinite(row["mean"]))
    assert found and len(found.counts) == 84 and found.steps.tolist()[:2] == [0.5, 3.5] and found.steps[-1] == 250.5
    assert found.counts.sum() == sum(rated.values())
    steps, middle = numbers.columns.series("length/p50")
    assert middle.tolist() == [statistics.median(seen[step]) for step in steps.tolist()]
    assert (
        "median" in lengths_over_time(numbers.columns)
        and len(solve_rates_over_time(numbers.groups.rows.view)) < 200_000
    )
