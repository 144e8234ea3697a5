"""What follows from the plan alone: random numbers, requests, and the batch of a step."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.types import Prompt
from headrace.durable.journal import read_steps
from headrace.episodes.rollout import RolloutConfig
from headrace.episodes.rollout_session import TurnAsked
from headrace.loop.loop_plan import LoopPlan
from headrace.loop.staleness import StalenessConfig
from headrace.loop.world import virtual_time
from headrace.testing.fake_engine import FakeEngine
from support.fake_world import FakeWorld

PROMPT = Prompt("p", "?", (1, 2))


def plan(seed: int = 0, **rollout: Any) -> LoopPlan:
    return LoopPlan(
        steps=9,
        staleness=StalenessConfig(),
        rollout=RolloutConfig(**rollout),
        seed=seed,
        max_skipped_steps=3,
        checkpoint_every=0,
        evaluate_every=0,
    )


@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 40), size=st.integers(1, 4))
def test_no_two_turns_and_no_two_environments_of_a_run_draw_the_same_numbers(seed: int, size: int) -> None:
    """Rollouts with equal numbers would be one rollout many times: no contrast where there is some, and none of it new."""

    def seeds(of: LoopPlan) -> list[int]:
        turns = itertools.product(range(5), range(size), range(3))
        asked = [of.request(t, PROMPT, TurnAsked(rollout, turn, (1,))) for t, rollout, turn in turns]
        worlds = [one for ticket in range(5) for one in of.environment_seeds(ticket, PROMPT)]
        assert len(worlds) == 5 * size
        return [request.sampling.seed for request in asked] + worlds

    found = seeds(plan(seed, group_size=size))
    assert len(set(found)) == len(found)
    assert found == seeds(plan(seed, group_size=size)), "a resumed run draws the same"
    assert not set(found) & set(seeds(plan(seed + 1, group_size=size)))


def test_a_prompt_with_a_size_of_its_own_has_as_many_environments() -> None:
    larger = Prompt("p", "?", (1, 2), rollouts=7)
    assert len(plan(group_size=2).environment_seeds(3, larger)) == 7
    assert plan(group_size=2).environment_seeds(3, PROMPT) == plan(group_size=2).environment_seeds(3, larger)[:2]


@pytest.mark.parametrize("overdue", ["wait", "trim"])
def test_the_batch_that_is_made_again_is_the_one_that_was_trained(tmp_path: Path, overdue: Any) -> None:
    """The journal has the groups as they were finished: tokens that were too old at their step leave the loss again (C1)."""
    world = FakeWorld(
        tmp_path,
        StalenessConfig(groups_per_step=2, max_lag=1, overdue=overdue, in_flight=0 if overdue == "wait" else 12),
        rollout=RolloutConfig(group_size=2, max_tokens=8, temperature=0.7, patience=200),
        engine=FakeEngine(0.2, length=lambda rng: 1 + int(7 * rng.random() ** 3)),
    )
    virtual_time.run(world.run())
    trained, again = world.trainer.batches, []
    for step in read_steps(tmp_path):
        batch = world.plan.batch_again(step, world.parts.algorithm)
        again.append(batch)
    assert again == trained and len(again) == world.steps
    assert {(batch.temperature, batch.steps, batch.adapter) for batch in trained} == {(0.7, world.steps, "")}
    cut = [row for batch in trained for row in batch.rows if not all(row.mask)]
    assert bool(cut) == (overdue == "trim"), "choose other settings: nothing was cut off"
    for batch in again:
        for row in batch.rows:
            assert all(batch.step - v <= 1 for v, kept in zip(row.versions, row.mask, strict=True) if kept)
    south = dataclasses.replace(world.plan, adapter="south")
    assert south.batch(3, (), world.parts.algorithm).adapter == "south"
