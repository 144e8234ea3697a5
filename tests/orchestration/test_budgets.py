"""What may go wrong before a run pauses: its windows by themselves, and the run that they stop."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from headrace.core.batches import Failure
from headrace.core.errors import RunPaused, TrainingError
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn
from headrace.episodes.rollout import RolloutConfig
from headrace.facts.facts import Fact, FirstFailure, GroupEnded, StepTrained, Warned, Withdrawn
from headrace.loop.checkpoints import load_controller
from headrace.loop.ledger import Rolled
from headrace.loop.run_limits import FAILING, Budgets
from headrace.loop.staleness import StalenessConfig
from headrace.loop.world import virtual_time
from headrace.settings.process_config import WatchConfig
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.fake_scorer import FakeScorer
from support.fake_world import FakeWorld

TABLE = {str(2 * number): 1.0 for number in range(10_000)}


def half_of_them(prompt: Prompt, episode: Episode) -> float:
    """A table that lacks every other prompt, as a user's would."""
    return TABLE[prompt.id.rpartition("/")[2]] + random.Random(repr(episode.last.tokens)).random()


# -- the windows by themselves ----------------------------------------------------------------------------------------------

KEY_ERROR = Failure(
    "reward_raised", "KeyError: '7' (r.py:3)", "Traceback (your frames):\n  File \"r.py\"\nKeyError: '7'"
)
OUTAGE = Failure("engine_error", "connection lost")


class Spending:
    """Budgets that are given groups by hand."""

    def __init__(self, group_size: int = 8, **watch: Any) -> None:
        self.facts: list[Fact] = []
        self.budgets = Budgets(WatchConfig(**watch), 20, self.facts.append, lambda: 0.0)
        self.group_size, self.tickets = group_size, 0

    def group(self, failed: int = 0, failure: Failure = KEY_ERROR, reason: str = "") -> None:
        self.tickets += 1
        one = Scored(Episode((Turn((1,), Completion((1,), (0.0,), (), "stop")),)), 1.0, {})
        rolled = Rolled(
            ticket=self.tickets,
            prompt=Prompt(f"p{self.tickets}", "", (1,)),
            scored=(one,) * (self.group_size - failed),
            failures=(failure,) * failed,
        )
        outcome = "dropped" if reason else "ready" if rolled.scored else "failed"
        self.budgets.spend(rolled, rolled.ended(0.0, outcome, reason or ("" if rolled.scored else failure.reason)))  # type: ignore[arg-type]

    def until_pause(self, share: float, most: int, seed: int) -> int:
        """Prompts until it pauses, where so many of them fail whole; `most` where it does not."""
        chance = random.Random(seed)
        for count in range(1, most + 1):
            try:
                self.group(self.group_size * (chance.random() < share))
            except RunPaused:
                return count
        return most

    def said(self) -> list[str]:
        return [fact.message for fact in self.facts if isinstance(fact, Warned)]


@pytest.mark.parametrize("group_size", [1, 2, 8, 16])
@pytest.mark.parametrize("share", [0.45, 0.48, 0.5])
def test_what_fails_on_about_half_of_the_prompts_never_slips_through(group_size: int, share: float) -> None:
    counts = [Spending(group_size).until_pause(share, 2000, seed) for seed in range(50)]
    assert max(counts) < 600 and sorted(counts)[25] <= 32, counts


@pytest.mark.slow
@pytest.mark.parametrize("group_size", [4, 8, 16])
def test_what_fails_seldom_does_not_pause_a_long_run_by_chance(group_size: int) -> None:
    assert [Spending(group_size).until_pause(0.05, 4000, seed) for seed in range(8)] == [4000] * 8
    rare = [Spending(group_size).until_pause(0.1, 1000, seed) for seed in range(20)]
    assert sum(count < 1000 for count in rare) <= 3, rare


def test_seven_prompts_are_no_share_and_the_eighth_is() -> None:
    spending = Spending()
    for _ in range(7):
        spending.group(8)
    with pytest.raises(RunPaused, match=r"64 of the last 64 rollouts failed \(100 %: KeyError 64\)") as caught:
        spending.group(8)
    assert "r.py:3" in str(caught.value) and caught.value.__notes__ == [KEY_ERROR.traceback]


def test_a_break_in_a_run_that_went_well_is_noticed_within_its_long_memory() -> None:
    spending = Spending()
    for _ in range(500):
        spending.group()
    with pytest.raises(RunPaused):
        for _ in range(16):
            spending.group(8)


def test_the_warning_comes_once_until_it_was_mended_meanwhile() -> None:
    spending = Spending()
    for _ in range(20):
        spending.group()
    spending.group(3)
    assert spending.said() == []  # 3 of 64 are below 5 %
    spending.group(4)
    (warning,) = spending.said()
    assert warning.startswith("7 of the last 64 rollouts failed (11 %: KeyError 7)")
    spending.group(4)
    assert len(spending.said()) == 1
    for _ in range(10):
        spending.group()
    assert [fact.key for fact in spending.facts if isinstance(fact, Withdrawn)] == [FAILING]
    spending.group(4)
    assert len(spending.said()) == 2


def test_the_first_of_each_kind_is_told_once_with_its_traceback() -> None:
    spending = Spending()
    for _ in range(3):
        spending.group(1)
        spending.group(1, Failure("reward_timeout", "no answer"))
    told = [fact for fact in spending.facts if isinstance(fact, FirstFailure)]
    assert [(one.kind, one.traceback, one.prompt_id) for one in told] == [
        ("KeyError", KEY_ERROR.traceback, "p1"),
        ("reward_timeout", "", "p2"),
    ]


def test_outages_faults_and_groups_without_contrast_have_budgets_of_their_own() -> None:
    spending = Spending(outages=5)
    for _ in range(30):  # none of the three is 5, 8 or 20 in a row
        for _ in range(4):
            spending.group(8, OUTAGE)
        spending.group(reason="no_contrast")
        spending.group()
    assert spending.said() == [], "an outage is no fault of the reward"
    for _ in range(4):
        spending.group(8, OUTAGE)
    spending.group(7, OUTAGE)  # one rollout succeeded
    for _ in range(4):
        spending.group(8, OUTAGE)
    with pytest.raises(RunPaused, match=r"5 groups in a row had no rollout.*engine_error \(connection lost\)"):
        spending.group(8, OUTAGE)

    spending = Spending(outages=5)
    for number in range(19):
        spending.group(reason="no_contrast")
        if number % 3 == 0:
            spending.group(8, OUTAGE)  # does not count towards the 20, nor begin them anew
    with pytest.raises(TrainingError, match="20 groups in a row could not be trained.*no_contrast"):
        spending.group(reason="no_contrast")


# -- a run --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("groups", "group_size"), [(2, 2), (4, 4), (8, 8), (3, 16), (16, 2)])
def test_a_reward_that_fails_on_half_of_the_prompts_stops_the_run_within_two_steps(
    tmp_path: Path, groups: int, group_size: int
) -> None:
    world = FakeWorld(
        tmp_path,
        StalenessConfig(groups_per_step=groups, max_lag=1),
        steps=50,
        scorer=FakeScorer(reward=half_of_them),
        rollout=RolloutConfig(group_size, 8, patience=200),
    )
    with pytest.raises(RunPaused, match=r"paused: .* rollouts failed .*KeyError.*test_budgets.py") as caught:
        virtual_time.run(world.run())
    assert len(world.facts.of(StepTrained)) <= 2
    (traceback,) = caught.value.__notes__
    assert traceback.splitlines()[-1].startswith("KeyError: '") and "return TABLE[" in traceback
    assert "fake.py" not in traceback, "the user's frames alone"
    (first,) = world.facts.of(FirstFailure)
    assert first.traceback == traceback

    step = load_controller(world.checkpoints.all()[-1]).step
    assert step == world.trainer.version
    mended = FakeWorld(
        tmp_path,
        StalenessConfig(groups_per_step=groups, max_lag=1),
        steps=6,
        trainer=world.trainer,
        rollout=RolloutConfig(group_size, 8, patience=200),
    )
    virtual_time.run(mended.run(resume=True))
    assert mended.trainer.version == 6
    counted = mended.buffer.accounting()
    assert counted.balance() == 0 and counted.failed["reward_raised"] > 0
    assert counted.trained == 6 * groups


def test_an_engine_that_answers_nobody_pauses_the_run(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path, engine=FakeEngine(failure_rate=1.0), watch=WatchConfig(outages=12))
    with pytest.raises(RunPaused, match="12 groups in a row had no rollout"):
        virtual_time.run(world.run())
    assert {fact.reason for fact in world.facts.of(GroupEnded)} == {"engine_error"}
