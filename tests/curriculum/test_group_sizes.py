"""Groups that grow where contrast is rare: their size by an independent integral, before the first rollout, and through kills."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from msgspec.structs import replace
from test_curriculum import Cycle, flat, integral, mixed

from headrace.core.errors import PoisonedRequest
from headrace.core.reports import EngineStats
from headrace.core.types import Prompt
from headrace.durable.journal import GoneRecord
from headrace.episodes.rollout import ForksConfig, RolloutConfig
from headrace.facts.facts import GroupEnded
from headrace.facts.group_numbers import Fates
from headrace.facts.waits import Waits
from headrace.loop.curriculum import Belief, Chooser, Level, contrast, expected_chance, key_of, open_curriculum
from headrace.loop.curriculum_config import CurriculumConfig
from headrace.loop.loop_plan import LoopPlan
from headrace.loop.own_groups import OwnGroups
from headrace.loop.staleness import StalenessConfig
from headrace.run.config import check, load_config
from headrace.run.hosts.bus_messages import GroupSizes
from headrace.run.hosts.bus_run import BusGroups
from headrace.settings.process_config import EvalConfig
from headrace.testing.faultsim.case import Case
from headrace.testing.faultsim.faults import Fault
from headrace.testing.faultsim.lives import trial

GROWS = CurriculumConfig(kind="contrast", candidates=4, least_chance=0.7, largest_group=30)


def rate(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


@pytest.mark.parametrize("size", [8, 32])
@pytest.mark.parametrize(("ease", "doubt"), [(0.0, 4.0), (2.5, 0.5), (-3.0, 1.0), (6.0, 4.0)])
def test_the_expected_chance_is_the_integral_over_the_doubt(ease: float, doubt: float, size: int) -> None:
    belief = Belief(at=5, ease=ease, doubt=doubt, drawn=1)
    found = expected_chance(belief, Level(-1.0, 9), now=5, half_life=256, size=size)
    assert found == pytest.approx(integral(ease - 1.0, doubt, lambda one: contrast(rate(one), size)), abs=0.005)


def test_rewards_that_differ_on_one_side_of_the_middle_raise_it() -> None:
    solved = Belief(at=5, ease=9.0, doubt=0.1, drawn=4, mixed=3.0, fine=3.0)
    now: dict[str, Any] = {"now": 5, "half_life": 256, "size": 4}
    assert expected_chance(replace(solved, fine=0.0), Level(), **now) < 0.01
    assert expected_chance(solved, Level(), **now) == pytest.approx(0.75, abs=0.01), "three of three, and one at first"


@pytest.mark.parametrize(("ease", "size"), [(0.0, 4), (1.4, 8), (2.3, 16), (5.0, 16), (-2.3, 16)])
def test_a_group_has_the_fewest_rollouts_that_are_expected_to_differ(ease: float, size: int) -> None:
    source = Chooser(Cycle(1), GROWS, 4)
    key = key_of(Prompt("", "", (0,)))
    source._beliefs[key] = belief = Belief(pool="mixed", ease=ease, doubt=0.2, drawn=3)
    prompt, _ = source.draw(0)
    chances = {n: integral(ease, belief.doubt, lambda one, n=n: contrast(rate(one), n)) for n in (4, 8, 16)}
    assert prompt.rollouts == size == next((n for n, chance in chances.items() if chance >= 0.7), 16), (
        "30 is no doubling of 4"
    )


def test_it_follows_from_earlier_groups_alone() -> None:
    source = Chooser(Cycle(1), GROWS, 4)
    sizes = []
    for ticket in range(12):
        sizes.append(source.draw(ticket)[0].rollouts)
        source.count(flat(ticket, 1.0, sizes[-1]) if ticket else mixed(ticket))
    assert sizes[:2] == [8, 4] and sizes[-1] == 16, "unknown; mixed; solved again and again"
    assert sizes[1:] == sorted(sizes[1:])


def test_where_nothing_says_that_more_rollouts_would_differ_a_group_stays_small() -> None:
    failed, deceived = Chooser(Cycle(1), GROWS, 4), Chooser(Cycle(1), GROWS, 4)
    for ticket in range(6):
        failed.draw(ticket), failed.count(GoneRecord(0.0, ticket, "failed", "reward_raised"))
        deceived.draw(ticket)
        rewards = (1.0,) * 4 if ticket else (0.0, 1.0)  # which did not count as contrast
        deceived.count(GoneRecord(0.0, ticket, "dropped", "no_contrast", rewards=rewards))
    assert failed.draw(6)[0].rollouts == deceived.draw(6)[0].rollouts == 4


def test_without_the_setting_no_prompt_has_a_size_of_its_own() -> None:
    for kind in ("uniform", "pools", "contrast"):
        assert open_curriculum(Cycle(3), CurriculumConfig(kind=kind), 4).draw(0)[0].rollouts == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("at", [30, 60, 90, 130])
def test_killed_runs_go_on_in_groups_of_the_size_that_they_had(at: int) -> None:
    """The simulation compares every draw with the journal's, every group's outcome with that of its size, and every token with those before."""
    faults = (Fault("kill", 0, at), Fault("kill", 1, at // 2), Fault("kill", 2, at))
    history = trial(Case(at, steps=5, checkpoint_every=2, curriculum="contrast", grows=True, faults=faults))
    sizes = {outcome.rollouts for outcome in history.outcomes}
    ended = [outcome for outcome in history.outcomes if outcome.outcome == "ready"]
    assert history.killed >= 2 and 4 in sizes <= {2, 4}
    assert all(len(one.rewards) + sum(one.failures.values()) == one.rollouts for one in ended)


def test_a_group_that_hosts_gave_up_has_failed_with_all_its_rollouts() -> None:
    class Desk:
        newest, stats = 0, EngineStats()

        async def ask(self, key: str, errand: Any) -> Any:
            raise PoisonedRequest("3 hosts died with it")

    groups = BusGroups(Desk(), "a", Waits(lambda fact: None, lambda: 0.0, 1e5, 1e6), GroupSizes(4, 1))  # type: ignore[arg-type]
    for rollouts, expected in ((0, 4), (16, 16)):
        prompt = Prompt("p", "", (1,), rollouts=rollouts)
        assert len(asyncio.run(groups.trained(0, prompt, lambda episodes: None)).failures) == expected


def test_a_prompt_that_is_too_long_fails_all_its_rollouts() -> None:
    plan = LoopPlan(
        steps=1,
        staleness=StalenessConfig(),
        rollout=RolloutConfig(group_size=4),
        seed=0,
        max_skipped_steps=1,
        checkpoint_every=0,
        evaluate_every=0,
    )
    others = dict.fromkeys(("interrupts", "environment", "scorer", "evaluated_by", "notebook", "decode", "waits"))
    groups = OwnGroups(plan=plan, evaluation=EvalConfig(), context_length=8, **others)  # type: ignore[arg-type]
    group = asyncio.run(groups.trained(0, Prompt("p", "", (1,) * 9, rollouts=16), lambda episodes: None))
    assert [failure.reason for failure in group.failures] == ["prompt_too_long"] * 16


def test_alternatives_are_counted_with_the_size_of_their_group() -> None:
    settings = RolloutConfig(group_size=4, forks=ForksConfig(alternatives=2))
    assert settings.all_of(Prompt("p", "", (1,))) == 12
    assert settings.all_of(Prompt("p", "", (1,), rollouts=16)) == 48


def test_the_length_of_a_cancelled_group_is_by_its_own_rollouts() -> None:
    fates = Fates()
    fates.end(GroupEnded(0.0, 0, "p", "dropped", "overdue", lost_tokens=160, rollouts=16), group_size=4)
    assert fates.of("overdue").lengths.mean == 10


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"curriculum": {"kind": "pools", "largest_group": 16}}, 'means nothing to curriculum.kind = "pools"'),
        ({"curriculum": {"kind": "contrast", "largest_group": 15}}, "lets no group grow"),
        (
            {"curriculum": {"kind": "contrast", "largest_group": 16}, "environment": {"kind": "atropos"}},
            "environments of Atropos post groups of one size",
        ),
        (
            {
                "curriculum": {"kind": "contrast", "largest_group": 32},
                "reward": {
                    "judges": [
                        {"name": "j", "url": "http://j", "model": "m", "criterion": "c", "mode": "rank"},
                    ]
                },
            },
            "ranks at most 26 completions, and a group has 32",
        ),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(tables: dict[str, Any], words: str) -> None:
    run: dict[str, Any] = {"model": {"path": "m"}, "task": {"kind": "jsonl", "path": "rows"}, **tables}
    try:
        said = check(load_config(run))
    except ValueError as error:
        said = [str(error)]
    assert any(words in one for one in said), said
