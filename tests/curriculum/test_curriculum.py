"""Which prompt is drawn next: each rule with literal values, what every outcome teaches, and that a choice can be repeated."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from headrace.core.errors import ConfigError
from headrace.core.types import Prompt
from headrace.durable.journal import AnyRecord, GoneRecord, LiveRecord, ReadyRecord
from headrace.loop.curriculum import (
    Belief,
    Chooser,
    CurriculumState,
    Level,
    RewardScale,
    TaskOrder,
    contrast,
    key_of,
    observed,
    open_curriculum,
    sampled_chance,
)
from headrace.loop.curriculum_config import CurriculumConfig
from headrace.run.config import check
from headrace.testing.fake_task import FakeTask
from headrace.testing.faultsim.case import Case
from headrace.testing.faultsim.faults import Fault
from headrace.testing.faultsim.lives import trial
from headrace.testing.makers import completion, group, row, scored
from support.few import few

POOLS = CurriculumConfig(kind="pools", candidates=4, rest=10, wait=4)
CONTRAST = CurriculumConfig(kind="contrast", candidates=4)


class Cycle:
    """Protocol `Task`: prompts 0 to n - 1, again and again."""

    def __init__(self, count: int) -> None:
        self._count, self._next = count, 0

    def draw(self) -> Prompt:
        self._next += 1
        return Prompt(f"train/{self._next - 1}", "", ((self._next - 1) % self._count,))

    def held_out(self, count: int) -> list[Prompt]:
        return []

    def state(self) -> dict[str, Any]:
        return {"next": self._next}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._next = state["next"]


def flat(ticket: int, reward: float, size: int = 4) -> GoneRecord:
    return GoneRecord(0.0, ticket, "dropped", "no_contrast", (), (reward,) * size)


def mixed(ticket: int, rewards: Sequence[float] = (0, 1, 1, 0)) -> ReadyRecord:
    parts = [scored(completion([5]), float(reward)) for reward in rewards]
    return ReadyRecord(0.0, msgspec.structs.replace(group(ticket, row([5])), scored=tuple(parts)))


def number(drawn: tuple[Prompt, Any]) -> int:
    return drawn[0].tokens[0]


# -- uniform ----------------------------------------------------------------------------------------------------------


def test_without_a_curriculum_the_order_is_the_tasks_own():
    alone, source = FakeTask(3), open_curriculum(FakeTask(3), CurriculumConfig(), 8)
    assert isinstance(source, TaskOrder) and source.state() is None
    for ticket in range(20):
        assert source.draw(ticket) == (alone.draw(), None)
        source.count(flat(ticket, 0.0))
    assert source.task.state() == alone.state() == {"next": 20}


def test_journals_and_checkpoints_of_earlier_versions_are_read():
    line = b'{"kind":"Gone","t":1.5,"ticket":3,"outcome":"dropped","reason":"no_contrast","failures":[]}'
    assert msgspec.json.decode(line, type=GoneRecord).rewards == ()
    source = open_curriculum(Cycle(5), CONTRAST, 4)
    source.restore({"next": 7}, None)  # a checkpoint of a run that did not choose
    assert source.task.state() == {"next": 7} and number(source.draw(9)) in range(5)


# -- pools ------------------------------------------------------------------------------------------------------------


def test_a_solved_prompt_rests_and_comes_back_for_twice_as_long():
    source = Chooser(Cycle(2), POOLS, 4)
    source.draw(0), source.count(flat(0, 1.0))  # 0 is solved: rests until draw 1 + 10
    source.draw(1), source.count(mixed(1))
    drawn = []
    for ticket in range(2, 34):
        drawn.append(number(source.draw(ticket)))
        source.count(mixed(ticket) if drawn[-1] else flat(ticket, 1.0))
    assert [ticket for ticket, one in enumerate(drawn, 2) if one == 0] == [11, 32], "after 10 draws, then after 20"


def test_a_hopeless_prompt_waits_and_one_with_contrast_is_free_again():
    source = Chooser(Cycle(2), POOLS, 4)
    source.draw(0), source.count(flat(0, 0.0))
    source.draw(1), source.count(mixed(1))
    drawn = []
    for ticket in range(2, 12):
        drawn.append(number(source.draw(ticket)))
        source.count(mixed(ticket))
    assert drawn[:3] == [1, 1, 1] and drawn[3] == 0, "waits for 4 draws"
    assert drawn[4:] == [1, 0, 1, 0, 1, 0], "no streak is left"


def test_when_all_candidates_rest_the_one_whose_rest_ends_first_is_drawn():
    source = Chooser(Cycle(3), POOLS, 4)
    for ticket, reward in enumerate((1.0, 0.0, 1.0)):
        source.draw(ticket)
        source.count(flat(ticket, reward))
    prompt, choice = source.draw(3)
    assert prompt.tokens == (1,) and choice and choice.pool == "hopeless"
    assert choice.looked == {"solved": 3, "hopeless": 1} and choice.drawn == 2 and choice.known == 3


def test_a_prompt_in_flight_is_passed_over():
    for config in (POOLS, CONTRAST):
        source = Chooser(Cycle(4), config, 4)
        assert {number(source.draw(ticket)) for ticket in range(4)} == {0, 1, 2, 3}
        source.count(GoneRecord(0.0, 2, "dropped", "interrupted"))
        free = next(key for key in range(4) if key_of(Prompt("", "", (key,))) not in source._flying.values())
        assert number(source.draw(4)) == free, "the only one whose group has ended"


# -- contrast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.97, 1.0])
def test_the_chance_of_contrast_is_that_of_all_outcomes_counted(rate: float):
    outcomes = itertools.product([0, 1], repeat=4)
    counted = sum(
        rate ** sum(outcome) * (1 - rate) ** (4 - sum(outcome)) for outcome in outcomes if len(set(outcome)) > 1
    )
    assert contrast(rate, 4) == pytest.approx(counted)


def integral(logit: float, doubt: float, of: Callable[[float], float]) -> float:
    """The expectation over a normal logit, as a sum of many small steps: the independent reference."""
    spread, steps = math.sqrt(doubt), [step / 100 for step in range(-800, 801)]
    weights = [math.exp(-step * step / 2) for step in steps]
    return sum(w * of(logit + spread * step) for w, step in zip(weights, steps, strict=True)) / sum(weights)


@pytest.mark.parametrize(("ease", "doubt"), [(0.0, 4.0), (2.5, 0.5), (-3.0, 1.0), (6.0, 4.0)])
def test_draws_of_the_chance_have_the_mean_of_the_integral_over_the_doubt(ease: float, doubt: float):
    found = integral(ease - 1.0, doubt, lambda one: contrast(1 / (1 + math.exp(-one)), 8))
    belief, chance = Belief(pool="mixed", ease=ease, doubt=doubt), random.Random(0)
    draws = [
        sampled_chance(belief, Level(-1.0, 9), now=0, half_life=256, size=8, by_group=False, chance=chance)
        for _ in range(4000)
    ]
    assert sum(draws) / len(draws) == pytest.approx(found, abs=0.02)


@pytest.mark.parametrize(("solved", "logit", "doubt"), [(4, 0.0, 4.0), (8, 0.0, 4.0), (0, 3.0, 1.0), (7, 1.0, 0.3)])
def test_an_observation_moves_the_logit_to_its_most_probable_value(solved: int, logit: float, doubt: float):
    """The reference: the largest value on a fine grid, and the curvature there by differences."""

    def density(x: float) -> float:
        return (
            -solved * math.log1p(math.exp(-x)) - (8 - solved) * math.log1p(math.exp(x)) - (x - logit) ** 2 / (2 * doubt)
        )

    found, variance = observed(logit, doubt, solved, 8)
    best = max((step / 1000 for step in range(-9000, 9001)), key=density)
    assert found == pytest.approx(best, abs=2e-3)
    bend = (density(best + 1e-3) - 2 * density(best) + density(best - 1e-3)) / 1e-6
    assert variance == pytest.approx(-1 / bend, rel=1e-2)


def test_doubt_grows_while_a_prompt_is_not_drawn_and_never_beyond_that_of_a_new_one():
    belief = Belief(at=10, doubt=0.5)
    assert [belief.doubt_at(now, 256) for now in (10, 42, 10_000)] == [0.5, 0.5 + 8.0 * 32 / 256, 4.0]


def worth_of(source: Chooser, prompt: Prompt, first: int) -> float:
    """The mean of what many draws hold of the chance of a prompt."""
    return sum(source._rank(prompt, ticket, set()).worth for ticket in range(first, first + 400)) / 400


def test_what_prompts_show_is_known_of_all():
    """All were hopeless once. Then all but the last become easy, and the last is worth a look again, though nobody has looked."""
    source, last = Chooser(Cycle(12), CONTRAST, 4), Prompt("", "", (11,))
    for ticket in range(12):
        source.draw(ticket), source.count(flat(ticket, 0.0))
    before, level = worth_of(source, last, 12), source._level
    for ticket in range(12, 23):
        source._flying[ticket] = key_of(Prompt("", "", (ticket - 12,)))
        source.count(flat(ticket, 1.0))
    assert source._level.logit > level.logit + 2 and source._level.seen == 23
    assert worth_of(source, last, 12) > before + 0.2


def played(source: Chooser, rates: Mapping[int, float], draws: int, seed: int = 0) -> tuple[list[int], float]:
    """Plays groups of four rollouts that are solved at these rates. Returns what was drawn, and the share of flat groups."""
    chance, drawn, flats = random.Random(seed), [], 0
    for ticket in range(draws):
        drawn.append(number(source.draw(ticket)))
        rewards = [float(chance.random() < rates[drawn[-1]]) for _ in range(4)]
        flats += len(set(rewards)) == 1
        source.count(flat(ticket, rewards[0]) if len(set(rewards)) == 1 else mixed(ticket, rewards))
    return drawn, flats / draws


@pytest.mark.parametrize("config", [CONTRAST, CurriculumConfig(kind="pools", candidates=12, rest=64, wait=64)])
def test_prompts_with_contrast_are_drawn_more_often_and_all_are_tried(config: CurriculumConfig):
    rates = {key: (0.0, 1.0, 0.5, 0.99)[key % 4] for key in range(12)}
    drawn, flats = played(Chooser(Cycle(12), config, 4), rates, 240)
    uniform = sum(1 - contrast(rate, 4) for rate in rates.values()) / 12
    assert uniform > 0.75 and flats < 0.5
    assert set(drawn) == set(rates), "none is given up"
    assert min(Counter(drawn)[key] for key in (2, 6, 10)) > 30


def test_no_prompt_of_an_epoch_is_passed_over_before_it_was_tried():
    source = Chooser(Cycle(10), CONTRAST, 4)
    assert sorted(number(source.draw(ticket)) for ticket in range(10)) == list(range(10))


def test_rewards_that_differ_on_one_side_of_the_middle_have_contrast_that_is_counted():
    """All rollouts are solved, by rewards of 0.9 and 1.0: by the rate alone the prompt would have none."""
    source = Chooser(Cycle(1), CONTRAST, 4)
    source.draw(0), source.count(mixed(0, (0, 0, 1, 1)))
    for ticket in range(1, 7):
        source.draw(ticket)
        source.count(mixed(ticket, (0.9, 0.9, 1.0, 1.0)))
    (belief,) = source._beliefs.values()
    assert belief.flat == 0 and belief.fine == pytest.approx(6, abs=0.1)
    assert worth_of(source, Prompt("", "", (0,)), 7) > 0.85
    plain, chance = msgspec.structs.replace(belief, fine=0.0), random.Random(0)
    draws = [
        sampled_chance(plain, source._level, now=7, half_life=256, size=4, by_group=False, chance=chance)
        for _ in range(400)
    ]
    assert sum(draws) / 400 < 0.6


def test_contrast_with_another_cause_than_the_rewards_is_counted_by_groups():
    source = Chooser(Cycle(2), CONTRAST, 4)
    source.draw(0)
    source.count(mixed(0, (1, 1, 1, 1)))  # a length penalty
    assert source._scale.deceives
    assert worth_of(source, Prompt("", "", (0,)), 1) == pytest.approx(2 / 3, abs=0.05), "the mean of Beta(2, 1)"


# -- every outcome ----------------------------------------------------------------------------------------------------

NOTHING: list[AnyRecord] = [
    GoneRecord(0.0, 0, "dropped", "overdue"),
    GoneRecord(0.0, 0, "dropped", "interrupted"),
    GoneRecord(0.0, 0, "dropped", "settings_changed"),
    GoneRecord(0.0, 0, "failed", "engine_error"),
    LiveRecord(0.0, 1, "fake"),
]


@pytest.mark.parametrize("record", NOTHING)
def test_a_cancelled_group_and_an_outage_teach_nothing(record: AnyRecord):
    source = Chooser(Cycle(3), POOLS, 4)
    source.draw(0)
    source.count(record)
    (belief,) = source._beliefs.values()
    assert belief == Belief(drawn=1)
    assert bool(source._flying) == isinstance(record, LiveRecord)


@pytest.mark.parametrize("reason", ["prompt_too_long", "reward_raised", "overlong"])
def test_a_prompt_that_fails_waits_and_loses_its_optimism(reason: str):
    source = Chooser(Cycle(3), POOLS, 4)
    source.draw(0)
    source.count(GoneRecord(0.0, 0, "dropped" if reason == "overlong" else "failed", reason))
    (belief,) = source._beliefs.values()
    assert belief == Belief(pool="failed", at=1, flat=1.0, streak=1, due=5, drawn=1)
    chance = random.Random(0)
    draws = [
        sampled_chance(belief, Level(), now=1, half_life=256, size=4, by_group=False, chance=chance) for _ in range(500)
    ]
    assert sum(draws) / 500 == pytest.approx(1 / 3, abs=0.03), "the mean of Beta(1, 2)"


def test_a_group_that_was_ready_and_is_dropped_later_is_counted_once():
    source = Chooser(Cycle(3), POOLS, 4)
    source.draw(0)
    source.count(mixed(0))
    before = source.state()
    source.count(GoneRecord(0.0, 0, "dropped", "overdue"))
    assert source.state() == before


def test_the_memory_is_bounded_and_forgets_what_was_not_drawn_for_longest():
    source = Chooser(FakeTask(), CurriculumConfig(kind="pools", candidates=2, remembered=5), 4)
    keys = []
    for ticket in range(50):
        keys.append(key_of(source.draw(ticket)[0]))
        source.count(flat(ticket, 0.0))
        assert len(source._beliefs) <= 5 and not source._flying
    assert list(source._beliefs) == list(dict.fromkeys(reversed(keys)))[:5][::-1]


# -- repeated ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [POOLS, CONTRAST])
def test_from_its_saved_state_it_chooses_on_as_it_would_have(config: CurriculumConfig):
    rates = {key: key / 6 for key in range(7)}
    source = Chooser(Cycle(7), config, 4)
    played(source, rates, 40)
    source.draw(40)  # in flight while it is saved
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(source.state()), type=CurriculumState)
    again = Chooser(Cycle(7), config, 4)
    again.restore(source.task.state(), state)
    for ticket in range(41, 90):
        assert source.draw(ticket) == again.draw(ticket)
        for one in (source, again):
            one.count(flat(ticket - 1, 0.0) if ticket % 3 else mixed(ticket - 1))


@pytest.mark.parametrize("same", [True, False])
def test_a_resume_with_other_rewards_knows_nothing_of_any_prompt(same: bool):
    """Rewards below those of before would make every prompt a hopeless one for the rest of the run."""
    source = Chooser(Cycle(3), POOLS, 4)
    for ticket in range(3):
        source.draw(ticket)
        source.count(flat(ticket, 1.0) if ticket < 2 else mixed(ticket, (0.0, 0.0, 1.0, 1.0)))
    source.draw(3)
    again = Chooser(Cycle(3), POOLS, 4)
    again.restore(source.task.state(), source.state(), same_rewards=same)
    assert again._flying == source._flying and again._next == source._next
    assert bool(again._beliefs) == same and (again._scale == RewardScale()) == (not same)
    again.count(flat(3, -5.0))
    again.draw(4)
    again.count(flat(4, -4.0))
    assert [belief.pool for belief in again._beliefs.values()][-1] == ("hopeless" if same else "solved")


@pytest.mark.parametrize("kind", ["pools", "contrast"])
@pytest.mark.parametrize("at", few([30, 60, 90, 130], keep=2))
def test_killed_and_resumed_a_run_draws_what_its_journal_says(kind: Any, at: int):
    """`testing/faultsim/chosen_anew.py` reads the journal from its first record, without a checkpoint, and compares every draw."""
    faults = (Fault("kill", 0, at), Fault("kill", 1, at // 2), Fault("kill", 2, at))
    history = trial(Case(at, groups=2, max_lag=1, steps=5, checkpoint_every=2, curriculum=kind, faults=faults))
    assert history.killed >= 2 and sorted(history.trained) == list(range(5))


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"candidates": 8}, 'curriculum.candidates means nothing to curriculum.kind = "uniform"'),
        ({"kind": "pools", "half_life": 9}, 'curriculum.half_life means nothing to curriculum.kind = "pools"'),
        ({"kind": "pools", "least_chance": 0.4}, 'curriculum.least_chance means nothing to curriculum.kind = "pools"'),
        ({"kind": "contrast", "rest": 9}, 'curriculum.rest means nothing to curriculum.kind = "contrast"'),
    ],
)
def test_settings_of_another_kind_are_refused(settings: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        CurriculumConfig(**settings)


def test_an_algorithm_that_needs_no_contrast_is_refused():
    from headrace.run.config import load_config

    run = {"model": {"path": "m"}, "task": {"kind": "jsonl", "path": "rows"}, "curriculum": {"kind": "pools"}}
    with pytest.raises(ConfigError, match="learns from groups without it as well; set curriculum.kind"):
        load_config({**run, "algo": {"name": "reinforce"}})
    assert not [one for one in check(load_config(run)) if "curriculum" in one]
