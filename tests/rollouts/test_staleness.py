"""What becomes of tokens that are too old: every `staleness.overdue` through the real pipeline, in virtual time."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.core.batches import Group, Row
from headrace.core.types import Prompt, RolloutKey
from headrace.facts.facts import GroupEnded, StepTrained
from headrace.loop.staleness import StalenessConfig, first_version, judge
from headrace.loop.world import virtual_time
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.fake_trainer import FakeTrainer
from support.fake_world import FakeWorld, scheduled_world, schedules


def _kept_lags(world: FakeWorld) -> list[int]:
    return [
        batch.step - version
        for batch in world.trainer.batches
        for row in batch.rows
        for version, kept in zip(row.versions, row.mask, strict=True)
        if kept
    ]


unpaced = st.fixed_dictionaries(
    {
        "overdue": st.sampled_from(["trim", "drop", "cancel"]),
        "order": st.sampled_from(["stalest", "finished"]),
        "in_flight": st.integers(0, 12),
        "stored": st.sampled_from([0, 5, 9]),
    }
)


@settings(max_examples=40)
@given(schedules, unpaced)
def test_no_token_older_than_max_lag_is_trained_however_far_generation_runs_ahead(
    tmp_path_factory: pytest.TempPathFactory, s: dict[str, Any], policy: dict[str, Any]
) -> None:
    world = scheduled_world(tmp_path_factory.mktemp("run"), s)
    world.staleness = StalenessConfig(groups_per_step=s["groups"], max_lag=s["max_lag"], **policy)
    virtual_time.run(world.run())
    assert world.trainer.version == world.steps
    assert 0 <= min(_kept_lags(world)) <= max(_kept_lags(world)) <= s["max_lag"] == world.staleness.lag_bound
    counted = world.buffer.accounting()
    assert counted.balance() == 0 and counted.in_pipeline == 0 and counted.trained == world.steps * s["groups"]
    lost = [fact for fact in world.facts.of(GroupEnded) if fact.reason == "overdue"]
    assert counted.dropped.get("overdue", 0) == len(lost)


def _heavy(tmp: Path, **staleness: Any) -> FakeWorld:
    """One rollout in ten is eight times as long, and the trainer is fast: the long ones are overdue when they are done."""
    config = StalenessConfig(groups_per_step=2, max_lag=1, **staleness)
    heavy = lambda rng: 8 if rng.random() < 0.1 else 1  # noqa: E731
    return FakeWorld(
        tmp,
        config,
        steps=40,
        engine=FakeEngine(seconds_per_token=0.1, load_seconds=0.0, length=heavy),
        trainer=FakeTrainer(seconds_per_step=0.05),
    )


def _mean_length(world: FakeWorld) -> float:
    lengths = [
        len(rollout.episode.last.tokens) for b in world.trainer.batches for g in b.groups for rollout in g.scored
    ]
    return sum(lengths) / len(lengths)


@pytest.mark.slow
def test_discarding_biases_the_run_to_short_completions_and_pacing_does_not(tmp_path: Path) -> None:
    """The mean length that the load has is 1.7."""
    policies: dict[str, dict[str, Any]] = {
        "wait": {}, "trim": {"overdue": "trim"}, "drop": {"overdue": "drop"}, "cancel": {"overdue": "cancel"},
    }  # fmt: skip
    means = {}
    for name, policy in policies.items():
        world = _heavy(tmp_path / name, **policy, **({"in_flight": 12} if policy else {}))
        virtual_time.run(world.run())
        means[name] = _mean_length(world)
    drawn = sum(8 if random.Random(f"0/t{t}/{i}").random() < 0.1 else 1 for t in range(80) for i in range(2)) / 160
    assert means["wait"] == pytest.approx(drawn), "all that was drawn was trained"
    assert means["drop"] < 0.7 * drawn and means["cancel"] < 0.7 * drawn
    assert means["drop"] < means["trim"], "what is trimmed is trained in part"


def test_cancel_ends_in_flight_what_drop_would_throw_away_later(tmp_path: Path) -> None:
    drop, cancel = (_heavy(tmp_path / name, overdue=name, in_flight=12) for name in ("drop", "cancel"))
    for world in (drop, cancel):
        virtual_time.run(world.run())
    assert any(fact.lost_tokens for fact in cancel.facts.of(GroupEnded))
    assert cancel.engine._sampled < drop.engine._sampled


def test_trimmed_tokens_stay_as_context_and_leave_the_loss(tmp_path: Path) -> None:
    world = _heavy(tmp_path, overdue="trim", in_flight=12)
    virtual_time.run(world.run())
    rows = [row for batch in world.trainer.batches for row in batch.rows if not all(row.mask)]
    assert rows, "nothing was trimmed: choose other speeds"
    for row in rows:
        assert len(row.mask) == len(row.tokens) and list(row.mask) == sorted(row.mask), "the oldest tokens come first"
    steps = world.facts.of(StepTrained)
    told = sum(count for fact in steps for count in fact.lags.values())
    assert told == sum(sum(row.mask) for batch in world.trainer.batches for row in batch.rows)


@pytest.mark.slow
def test_the_stalest_group_goes_first_or_the_one_that_was_finished_first(tmp_path: Path) -> None:
    orders = {}
    for order in ("stalest", "finished"):
        config = StalenessConfig(groups_per_step=2, max_lag=6, overdue="trim", order=order, in_flight=16)
        world = FakeWorld(
            tmp_path / order,
            config,
            steps=40,
            engine=FakeEngine(seconds_per_token=0.1, length=lambda rng: rng.choice([1, 8])),
        )
        virtual_time.run(world.run())
        ended = world.facts.of(GroupEnded)
        overdue = {fact.ticket for fact in ended if fact.outcome == "dropped"}
        finished = [fact.ticket for fact in ended if fact.outcome == "ready" and fact.ticket not in overdue]
        orders[order] = [group.ticket for batch in world.trainer.batches for group in batch.groups]
        batches = [[first_version(group) for group in batch.groups] for batch in world.trainer.batches]
        if order == "finished":
            assert orders[order] == finished[: len(orders[order])]
        else:
            # At the end nothing new is admitted, and what is finished is taken as it comes: there is no choice any more.
            assert all(batch == sorted(batch) for batch in batches[:-2])
    assert orders["stalest"] != orders["finished"]


# -- judging one group ------------------------------------------------------------------------------------------------------


def _group(*versions: tuple[int, ...]) -> Group:
    rows = tuple(
        Row((1,), (2,) * len(told), (-1.0,) * len(told), (1.0,) * len(told), (True,) * len(told), told)
        for told in versions
    )
    return Group(0, Prompt("p", "", (1,)), (), rows)


def test_judge_by_hand() -> None:
    group = _group((3, 3, 4), (5, 5))
    trim, drop = (StalenessConfig(groups_per_step=4, max_lag=1, overdue=name) for name in ("trim", "drop"))  # type: ignore[arg-type]
    assert first_version(group) == 3
    assert judge(group, 4, drop) is group and judge(group, 4, trim) is group
    assert judge(group, 5, drop) is None
    trimmed = judge(group, 5, trim)
    assert trimmed is not None and [row.mask for row in trimmed.rows] == [(False, False, True), (True, True)]
    assert judge(group, 7, trim) is None, "nothing is left to train"
    with pytest.raises(AssertionError, match="the proof above is wrong"):
        judge(group, 5, StalenessConfig(groups_per_step=4, max_lag=1))


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=4), st.integers(0, 12))
def test_what_is_judged_twice_is_judged_once(versions: list[list[int]], step: int) -> None:
    """A step that is done again judges what was judged when it was taken."""
    config = StalenessConfig(groups_per_step=1, max_lag=2, overdue="trim")
    once = judge(_group(*(tuple(sorted(told)) for told in versions)), step, config)
    assert once is None or judge(once, step, config) == once


def test_settings_that_do_not_go_together_are_refused_with_the_remedy() -> None:
    for wrong, said in (
        ({"in_flight": 3}, "remove them, or set overdue"),
        ({"overdue": "drop", "window": 2}, "remove it"),
        ({"overdue": "drop", "stored": 3}, "raise it, or set 0"),
        ({"window": 40}, "use a window of at most"),
    ):
        with pytest.raises(ValidationError, match=said):
            StalenessConfig(**wrong)
    paced, free = (
        StalenessConfig(groups_per_step=4, max_lag=2),
        StalenessConfig(groups_per_step=4, max_lag=2, overdue="trim", in_flight=50),
    )
    assert (paced.generating, paced.lag_bound, free.generating, free.lag_bound) == (12, 2, 50, 2)
    assert dataclasses.replace(free, in_flight=0).generating == 12


@pytest.mark.parametrize(
    ("key", "spelled"),
    [
        (RolloutKey(12, 3), "t12/3"),
        (RolloutKey(12, 3, turn=2), "t12/3.2"),
        (RolloutKey(0, 0, adapter="math"), "math:t0/0"),
        (RolloutKey(7, 1, 4, "a:b"), "a:b:t7/1.4"),
    ],
)
def test_a_rollout_s_key_and_its_request_id_are_one(key: RolloutKey, spelled: str) -> None:
    assert str(key) == spelled and RolloutKey.read(spelled) == key


@pytest.mark.parametrize(
    "name", ["score/3", "eval::0/1/2", "t1", "t/1", "t-1/2", "t01/2", "t1/ 2", "t1/2.0", "x1/2", ":t1/2"]
)
def test_other_requests_have_no_rollout_s_key(name: str) -> None:
    assert RolloutKey.read(name) is None
