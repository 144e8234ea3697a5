"""Rewards standardised over all groups of a prompt (DCPO): against the authors' recursion, in the order of the journal, over kills."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.algo.advantages import GroupRewards, group_norm, smoothed
from headrace.algo.config import AlgoConfig
from headrace.algo.training_rows import algorithm_of
from headrace.core.batches import RewardsBefore
from headrace.core.errors import ConfigError
from headrace.core.types import Prompt
from headrace.durable.journal import DrawnRecord, GoneRecord, ReadyRecord, read_journal
from headrace.loop.world import virtual_time
from headrace.run.config import load_config
from headrace.testing.fake_scorer import FakeScorer
from headrace.testing.fake_task import FakeTask
from headrace.testing.fake_trainer import FakeTrainer
from support.fake_world import FakeWorld


def by_the_authors(groups: list[list[float]]) -> list[np.ndarray]:
    """`compute_dcpo_outcome_advantage` and `get_mean_std` of lime-RL/DCPO for groups of one size, group by group."""
    old_mean = old_std = 0.0
    found = []
    for old_times, group in enumerate(groups):
        rewards, times = np.array(group), old_times + 1
        new_mean, new_std = rewards.mean(), rewards.std(ddof=1)
        if old_times == 0:
            mean, std = new_mean, new_std
        else:
            mean = (old_mean * old_times + new_mean) / times
            std = np.sqrt(
                (old_times * old_std**2 + new_std**2 + old_times / times * (new_mean - old_mean) ** 2) / times
            )
        new = (rewards - new_mean) / new_std if new_std > 1e-9 else 0 * rewards
        total = (rewards - mean) / std if std > 1e-9 else 0 * rewards
        one, other = total / times + (1 - 1 / times) * new, new / times + (1 - 1 / times) * total
        found.append(np.where(abs(one) < abs(other), one, other))
        old_mean, old_std = mean, std
    return found


rewards = st.sampled_from([0.0, 1.0, 0.5, -1.0])


@given(st.integers(2, 5).flatmap(lambda size: st.lists(st.lists(rewards, min_size=size, max_size=size), min_size=1)))
def test_each_group_has_the_authors_advantages(groups):
    before = RewardsBefore()
    for group, expected in zip(groups, by_the_authors(groups), strict=True):
        found = smoothed(GroupRewards(tuple(group), before=before))
        np.testing.assert_allclose(np.abs(found), np.abs(expected), rtol=1e-5, atol=1e-5)
        apart = abs(np.array(found) - expected) > 1e-4  # two of one size and opposite signs: either is the smaller
        assert not apart.any() or np.allclose(np.array(found)[apart], -expected[apart], atol=1e-4)
        before = before.after(group)


@given(st.lists(st.lists(st.floats(-3, 3), min_size=2, max_size=6), min_size=1, max_size=5))
def test_what_was_given_before_is_mean_and_variance_over_groups_of_any_size(groups):
    before = RewardsBefore()
    for group in groups:
        before = before.after(group)
    flat = [reward for group in groups for reward in group]
    mean = np.mean(flat)
    weighted = [len(group) * (np.var(group, ddof=1) + (np.mean(group) - mean) ** 2) for group in groups]
    assert (before.groups, before.rollouts) == (len(groups), len(flat))
    assert before.mean == pytest.approx(mean) and before.variance == pytest.approx(sum(weighted) / len(flat))


def test_a_first_group_is_group_norm_and_a_later_one_without_contrast_is_trained():
    first = GroupRewards((1.0, 0.0, 0.0, 0.0))
    assert smoothed(first) == pytest.approx(group_norm(first))
    before = RewardsBefore().after(first.rewards)
    equal = smoothed(GroupRewards((1.0, 1.0, 1.0, 1.0), before=before))
    assert len(set(equal)) == 1 and 0 < equal[0] < 1
    assert smoothed(GroupRewards((1.0, 1.0), before=RewardsBefore().after((1.0, 1.0)))) == [0.0, 0.0]
    assert smoothed(GroupRewards((1.0,), before=before)) == [0.0]


class FewPrompts(FakeTask):
    """Five prompts, again and again."""

    def draw(self) -> Prompt:
        self._next += 1
        return self._prompt("train", (self._next - 1) % 5)


def world(directory: Path, **more: Any) -> FakeWorld:
    scorer = FakeScorer(reward=lambda prompt, episode: float(episode.last.tokens[0] % 3 == 0))
    parts = {"task": FewPrompts(), "scorer": scorer, "trainer": FakeTrainer(seconds_per_step=0.5)}
    return FakeWorld(directory, steps=30, algo=AlgoConfig("dcpo"), checkpoint_every=4, **parts, **more)


@pytest.mark.parametrize("kills", [(), (5.0,), (4.0, 4.0)])
def test_every_group_knows_what_its_prompt_was_given_before_it_over_kills(tmp_path: Path, kills: tuple[float, ...]):
    """Against a second count, from the journal alone."""
    for number, when in enumerate((*kills, None)):
        stop = {} if when is None else {"interrupt_after": when}
        last = world(tmp_path)
        virtual_time.run(last.run(resume=number > 0, **stop))
    given: defaultdict[str, list[tuple[float, ...]]] = defaultdict(list)
    flying: dict[int, str] = {}
    algorithm = algorithm_of(AlgoConfig("dcpo"), 8)
    deepest = told = 0
    for record in read_journal(tmp_path):
        match record:
            case DrawnRecord():
                flying[record.ticket] = record.prompt.id
            case ReadyRecord(group=group):
                earlier = given[flying.pop(group.ticket)]
                expected = RewardsBefore()
                for rewards in earlier:
                    expected = expected.after(rewards)
                assert group.before == expected
                made = algorithm.rows(group.prompt, group.scored, group.before)
                assert [row.advantages for row in made] == [row.advantages for row in group.rows]
                own = tuple(one.reward for one in group.scored)
                told += len(set(own)) == 1
                deepest = max(deepest, len(earlier))
                earlier.append(own)
            case GoneRecord() if record.ticket in flying:
                prompt = flying.pop(record.ticket)
                if len(record.rewards) > 1:
                    given[prompt].append(record.rewards)
    assert last.trainer.version == 30
    assert deepest > 5 and told, "groups of equal rewards are trained, by what their prompts were given before"


def test_rewards_that_mean_something_else_are_forgotten(tmp_path: Path):
    virtual_time.run(world(tmp_path, mark="a").run(interrupt_after=5.0))
    last = world(tmp_path, mark="b")
    virtual_time.run(last.run(resume=True))
    groups = list(itertools.chain.from_iterable(batch.groups for batch in last.trainer.batches))
    depths = [group.before.groups for group in sorted(groups, key=lambda one: one.ticket) if group.before]
    assert depths[0] == 0 and depths[-1] > 5, "they begin anew"


MINIMAL = {"model": {"path": "m"}, "task": {"kind": "jsonl", "path": "rows.jsonl"}, "reward": {"function": "a.py:f"}}


@pytest.mark.parametrize(
    ("settings", "words", "remedy"),
    [
        (["algo.length_penalty=0.1"], "set algo.length_penalty = 0", ["algo.length_penalty=0"]),
        (["algo.kl.coef=0.1", "algo.kl.place=reward"], 'set algo.kl.place = "loss"', ["algo.kl.place=loss"]),
        (["algo.subset.kind=shortest"], 'set algo.subset.kind = "none"', ["algo.subset.kind=none"]),
        (["algo.credit=turn"], "compares turns, and algo.advantage = smoothed whole rollouts", ["algo.credit=rollout"]),
        (
            ["rollout.forks.alternatives=1", "environment.function=e.py:play"],
            "dcpo takes a rollout as a whole",
            ["rollout.forks.alternatives=0"],
        ),
    ],
)
def test_rewards_that_no_prompt_was_given_are_refused(settings: list[str], words: str, remedy: list[str]):
    with pytest.raises(ConfigError) as refused:
        load_config(MINIMAL, ["algo.name=dcpo", *settings])
    assert words in str(refused.value)
    load_config(MINIMAL, ["algo.name=dcpo", *settings, *remedy])


def test_only_an_advantage_that_asks_for_it_has_a_memory(tmp_path: Path):
    assert AlgoConfig("dcpo").remembers and not AlgoConfig("dcpo", advantage="group_norm").remembers
    plain = FakeWorld(tmp_path, task=FewPrompts())
    virtual_time.run(plain.run())
    assert all(group.before is None for batch in plain.trainer.batches for group in batch.groups)
    assert not plain.buffer.state().rewards and math.isclose(RewardsBefore().after((1.0, 0.0)).variance, 0.5)
