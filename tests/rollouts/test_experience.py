"""Good rollouts of earlier groups that are trained again: which ones are kept, over kills, and that the bound on the lag holds for all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from test_smoothed_rewards import MINIMAL, FewPrompts

from headrace.algo.config import AlgoConfig
from headrace.algo.recipe_parts import Experience
from headrace.algo.training_rows import algorithm_of
from headrace.core.batches import Group, Row
from headrace.core.errors import ConfigError
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.durable.journal import DrawnRecord, ReadyRecord, read_journal
from headrace.facts.facts import StepTrained
from headrace.facts.records import summarise
from headrace.facts.run_state import RunState
from headrace.facts.verdicts import experience_words, lag
from headrace.loop.buffer import Buffer, BufferState
from headrace.loop.staleness import StalenessConfig
from headrace.loop.world import virtual_time
from headrace.run.config import load_config
from headrace.testing.fake_scorer import FakeScorer
from headrace.testing.fake_trainer import FakeTrainer
from support.fake_world import FakeWorld

LAG = 1
KEEPS = Experience(rollouts=2, above=0.2, prompts=4)


def reward(prompt: Prompt, episode: Episode) -> float:
    return (episode.last.tokens[0] % 4) / 4


def world(directory: Path, experience: dict[str, Any] | None = None, **more: Any) -> FakeWorld:
    algo = AlgoConfig("grpo", experience=experience or {"rollouts": 2, "above": 0.2, "prompts": 4})
    parts = {"task": FewPrompts(), "scorer": FakeScorer(reward=reward), "trainer": FakeTrainer(seconds_per_step=0.5)}
    staleness = StalenessConfig(groups_per_step=3, max_lag=LAG)
    return FakeWorld(directory, staleness, **{"steps": 30, "algo": algo, "checkpoint_every": 4, **parts, **more})


def second_count(experience: dict[str, list[Scored]], group: Group) -> tuple[Scored, ...]:
    """What a group of this prompt is given, and the memory after it: written down a second time. The prompt of the oldest group is the first."""
    had = experience.pop(group.prompt.text, [])
    both = [rollout for rollout in [*group.scored, *had] if rollout.reward > 0.2]
    best: list[Scored] = []
    while both and len(best) < 2:
        best.append(both.pop(both.index(max(both, key=lambda rollout: rollout.reward))))
    if best:
        experience[group.prompt.text] = best
    if len(experience) > 4:
        experience.pop(next(iter(experience)))
    return tuple(had)


@pytest.mark.parametrize("kills", [(), (5.0,), (4.0, 4.0)])
def test_every_group_has_the_good_rollouts_of_the_groups_before_it_over_kills(tmp_path: Path, kills: tuple[float, ...]):
    for number, when in enumerate((*kills, None)):
        last = world(tmp_path)
        virtual_time.run(last.run(resume=number > 0, **({} if when is None else {"interrupt_after": when})))
    assert last.trainer.version == 30
    # what was kept when a group was scored is that of the records before its own
    experience: dict[str, list[Scored]] = {}
    had, algorithm = 0, algorithm_of(last.algo, 8)
    for record in read_journal(tmp_path):
        if isinstance(record, ReadyRecord):
            group = record.group
            assert group.experience == second_count(experience, group)
            assert algorithm.filled(replace(group, rows=(), again=()), group.rows[0].temperature) == group, "made again"
            had += len(group.experience)
    assert had > 50
    batches = last.trainer.batches
    again = [(batch.step, row) for batch in batches for group in batch.groups for row in group.again]
    fresh = [(batch.step, row) for batch in batches for group in batch.groups for row in group.rows]
    assert all(row.again for _, row in again) and not any(row.again for _, row in fresh)
    assert max(ages(fresh)) <= LAG < max(ages(again)), "the bound is that of all others"


def ages(rows: Sequence[tuple[int, Row]]) -> Counter[int]:
    return Counter(step - version for step, row in rows for version in row.versions)


def test_they_are_counted_apart_from_the_lag(tmp_path: Path):
    """Never among the tokens to which the bound applies, nor among rewards and lengths."""
    whole = world(tmp_path)
    virtual_time.run(whole.run())
    state = RunState()
    facts = [fact for fact in whole.facts.facts if isinstance(fact, StepTrained)]
    for fact in whole.facts.facts:
        state.fold(summarise(fact) if isinstance(fact, StepTrained) else fact)
    batches = whole.trainer.batches
    fresh, again = (
        ages([(batch.step, row) for batch in batches for group in batch.groups for row in getattr(group, name)])
        for name in ("rows", "again")
    )
    assert state.lags == fresh and state.ages == again and again.total() > 50
    rows = [summarise(fact) for fact in facts]
    assert all(
        len(row.lengths) == sum(len(group.scored) for group in fact.groups)
        for row, fact in zip(rows, facts, strict=True)
    )
    state.started = SimpleNamespace(max_lag=LAG)  # type: ignore[assignment]
    words, (verdict, found) = experience_words(state), (lag(state), max(again))
    assert f"at most {found}" in words and words in verdict.detail and verdict.value == f"max {max(fresh)}"
    assert experience_words(RunState()) == ""


@given(st.lists(st.tuples(st.integers(0, 6), st.lists(st.sampled_from([0.0, 0.2, 0.5, 1.0]), min_size=1, max_size=4))))
@settings(max_examples=40)
def test_a_restored_buffer_keeps_what_the_first_one_did(groups: list[tuple[int, list[float]]]):
    """In a checkpoint at any place, and never more than was asked for."""
    made = [group_of(number, prompt, rewards) for number, (prompt, rewards) in enumerate(groups)]
    experience: dict[str, list[Scored]] = {}
    buffer = emptied()
    for number, group in enumerate(made):
        assert buffer.with_earlier(group).experience == second_count(experience, group)
        taken_in(buffer, group)
        if number % 2:
            state, buffer = buffer.state(), emptied()
            assert len(state.experience) <= 4 and all(0 < len(kept) <= 2 for kept in state.experience.values())
            buffer.restore(replace(state, ready=()))
    smaller = emptied(Experience(rollouts=1, above=0.6, prompts=1))
    smaller.restore(replace(buffer.state(), ready=()))
    (kept,) = tuple(smaller.state().experience.values()) or ((),)
    assert all(rollout.reward == 1.0 for rollout in kept) and len(kept) <= 1


def emptied(keeps: Experience = KEEPS) -> Buffer:
    return Buffer(StalenessConfig(groups_per_step=1, max_lag=99), groups_wanted=999, experience=keeps)


def taken_in(buffer: Buffer, group: Group) -> None:
    buffer.count(DrawnRecord(0.0, group.ticket, group.prompt))
    buffer.count(ReadyRecord(0.0, group))


def group_of(ticket: int, prompt: int, rewards: Sequence[float]) -> Group:
    asked = Prompt(f"train/{ticket}", f"question {prompt}", (1, prompt))
    scored = tuple(rollout_of(asked, ticket, place, one) for place, one in enumerate(rewards))
    return Group(ticket, asked, scored, ())


def rollout_of(prompt: Prompt, ticket: int, place: int, given: float) -> Scored:
    done = Completion((ticket, place), (-1.0, -1.0), (VersionSpan(0, ticket, ticket),), "stop")
    return Scored(Episode((Turn(prompt.tokens, done),)), given, {"exact": given})


def test_rollouts_belong_to_the_tokens_that_were_asked():
    """Solved examples before a question may be others each time, and a rollout is trained behind what the policy saw."""
    buffer, group = emptied(), group_of(0, 3, [1.0])
    taken_in(buffer, group)
    other = replace(group, prompt=replace(group.prompt, tokens=(1, 3, 3)))
    assert buffer.with_earlier(group).experience == group.scored and not buffer.with_earlier(other).experience


def test_a_good_earlier_rollout_gives_a_group_contrast_that_none_of_it_solved():
    algorithm, group = algorithm_of(AlgoConfig("grpo"), 8), group_of(4, 1, [0.0, 0.0])
    alone = algorithm.filled(group, 1.0)
    assert algorithm.barren(alone.rows, alone.again) == "no_contrast"
    helped = algorithm.filled(replace(group, experience=group_of(1, 1, [1.0]).scored), 1.0)
    assert algorithm.barren(helped.rows, helped.again) == ""
    assert [row.versions for row in helped.again] == [(1, 1)] and [row.logprobs for row in helped.again] == [
        (-1.0, -1.0)
    ]


@pytest.mark.parametrize("what", ["rewards", "sampling"])
def test_rollouts_that_would_be_others_today_are_forgotten(what: str):
    buffer = emptied()
    taken_in(buffer, group_of(0, 3, [1.0]))
    state: BufferState = replace(buffer.state(), ready=())
    other = emptied()
    other.restore(state, same_rewards=what != "rewards", same_rollouts=False)
    assert state.experience and not other.state().experience


def test_a_resume_with_another_reward_begins_it_anew(tmp_path: Path):
    virtual_time.run(world(tmp_path, mark="a").run(interrupt_after=5.0))
    last = world(tmp_path, mark="b")
    virtual_time.run(last.run(resume=True))
    again = [row for batch in last.trainer.batches for group in batch.groups for row in group.again]
    assert again and min(min(row.versions) for row in again) >= last.restored.step > 0


@pytest.mark.parametrize(
    ("given", "words", "remedied"),
    [
        ({"name": "ppo"}, "algo.advantage = gae", {"name": "grpo"}),
        ({"name": "dcpo"}, "algo.advantage = smoothed", {"name": "dcpo", "advantage": "group_norm"}),
        ({"name": "dpo"}, "algo.loss = dpo", {"name": "grpo"}),
        ({"name": "ce"}, "algo.loss = ce", {"name": "reinforce"}),
        ({"name": "opd"}, "algo.advantage = zero", {"name": "grpo"}),
        ({"name": "pods"}, "algo.subset.kind = max_variance", {"name": "pods", "subset": {"kind": "none"}}),
        ({"name": "luffy"}, "algo.demonstrations.kind = compared", {"name": "chord"}),
        (
            {"experience": {"above": 0.5}},
            "algo.experience.rollouts is above 0",
            {"experience": {"rollouts": 1, "above": 0.5}},
        ),
    ],
)
def test_what_has_no_meaning_beside_them_is_refused(given: dict[str, Any], words: str, remedied: dict[str, Any]):
    experience = {"experience": {"rollouts": 2}}
    with pytest.raises(ValueError, match=words):
        AlgoConfig(**{**experience, **given})
    AlgoConfig(**{**experience, **remedied})
    with pytest.raises(ConfigError):
        load_config(MINIMAL, ["algo.experience.rollouts=-1"])


def test_nothing_is_kept_where_nothing_asks_for_it(tmp_path: Path):
    plain = FakeWorld(tmp_path, task=FewPrompts())
    virtual_time.run(plain.run())
    assert not plain.buffer.state().experience
    assert not any(group.experience or group.again for batch in plain.trainer.batches for group in batch.groups)
