"""The measurement of held-out prompts: what is asked for, who scores it, and what counts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.batches import Failure
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.episodes.rollout import RolloutConfig
from headrace.episodes.rollout_session import Notebook
from headrace.facts.facts import Evaluated, HeldOutLook, Warned
from headrace.facts.health import then_and_now
from headrace.facts.telemetry import Telemetry
from headrace.facts.verdicts import ends_of, gain_of
from headrace.facts.waits import Waits
from headrace.loop.evaluation import Evaluator, HeldOutSet, Phase, measure_of
from headrace.loop.loop_plan import LoopPlan
from headrace.loop.own_groups import OwnGroups, PlayedGroup, Seen
from headrace.loop.partial import Interrupts, PartialConfig
from headrace.loop.staleness import StalenessConfig
from headrace.loop.world import virtual_time
from headrace.loop.world.world import FactList
from headrace.models.chat import ChatEncoder
from headrace.run.build import build_task
from headrace.run.config import read_config
from headrace.run.contents import contents_of
from headrace.run.evaluation_sets import read_sets
from headrace.run.resume_rules import meaning
from headrace.settings.process_config import EvalConfig
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.fake_environments import scripted
from headrace.testing.fake_scorer import FakeScorer
from support.fake_world import FakeWorld
from support.tiny_run import tiny_config

PROMPTS = [Prompt(f"held-out/{number}", "?", (1, 2, number)) for number in range(3)]
FAILED = Failure("reward_raised", "no")


def telemetry() -> tuple[Telemetry, FactList]:
    facts, clock = FactList(), asyncio.get_running_loop().time
    return Telemetry(facts.record, clock, Waits(facts.record, clock, 1e5, 1e6)), facts


# --- what is asked for ---------------------------------------------------------------------------------------------------


def test_each_measurement_draws_the_same_numbers_as_the_first() -> None:
    """Otherwise before and after would differ by chance too, and not by the weights alone."""
    engine = FakeEngine()
    worlds: list[int] = []

    async def case() -> None:
        told, _ = telemetry()
        plan = LoopPlan(
            steps=1,
            staleness=StalenessConfig(),
            rollout=RolloutConfig(group_size=2, max_tokens=8, temperature=1.3),
            seed=5,
            max_skipped_steps=3,
            checkpoint_every=0,
            evaluate_every=0,
            adapter="south",
        )

        def reply(done: Completion, seed: int) -> Sequence[int]:
            worlds.append(seed)
            return (98,)

        groups = OwnGroups(
            plan=plan,
            evaluation=EvalConfig(samples=2, temperature=0.25),
            interrupts=Interrupts(engine, PartialConfig(), told.waits, told.clock),
            environment=scripted(2, reply=reply, reward=0.0),
            scorer=FakeScorer(reward=lambda prompt, episode: 9.0),  # with penalties
            evaluated_by=FakeScorer(reward=lambda prompt, episode: 1.0),
            notebook=Notebook(),
            decode=str,
            waits=told.waits,
            context_length=1000,
        )
        engine.version = engine.adapters["south"] = 0
        evaluator = Evaluator(HeldOutSet("", groups, PROMPTS), told)
        before, after = await evaluator.measure("before", 0), await evaluator.measure("after", 4)
        assert before and after and before.reward_mean == after.reward_mean == 1.0, "the scorer of evaluations"

    virtual_time.run(case())
    half = len(engine.requests) // 2
    first, second = (
        {request.sampling.seed: request.prompt[:3] for request in part}
        for part in (engine.requests[:half], engine.requests[half:])
    )
    assert half == 3 * 2 * 2, "prompts, samples, turns"
    assert first == second and len(first) == half, "the same numbers for the same prompts, and other ones for each turn"
    assert len({request.id for request in engine.requests}) == 2 * half
    assert sorted(worlds[:6]) == sorted(worlds[6:]) and len(set(worlds)) == 6
    assert {(request.sampling.temperature, request.adapter) for request in engine.requests} == {(0.25, "south")}


# --- what counts ---------------------------------------------------------------------------------------------------------


@dataclass
class Given:
    """A `GroupSource` of rewards for each prompt; None is a rollout that failed."""

    rewards: Sequence[Sequence[float | None]]
    asked: list[tuple[int, int, str]] = field(default_factory=list)

    async def held_out(self, number: int, index: int, prompt: Prompt, seen: Seen) -> PlayedGroup:
        self.asked.append((number, index, prompt.id))
        done = Completion((1, 2), (0.0, 0.0), (VersionSpan(0, 0, 0),), "length")
        episode = Episode((Turn((), done),))
        found = self.rewards[index]
        return PlayedGroup(
            tuple(Scored(episode, one, {}) for one in found if one is not None), (FAILED,) * found.count(None)
        )


def measured(rewards: Sequence[Sequence[float | None]]) -> Evaluated:
    async def case() -> Evaluated:
        told, facts = telemetry()
        prompts = [Prompt(f"held-out/{number}", "?", (1,)) for number in range(len(rewards))]
        groups = Given(rewards)
        evaluator = Evaluator(HeldOutSet("", groups, prompts), told)  # type: ignore[arg-type]
        found = await evaluator.measure("during", 7)
        assert found and facts.of(Evaluated) == [found] and found.step == 7
        assert groups.asked == [(0, index, prompt.id) for index, prompt in enumerate(prompts)]
        return found

    return virtual_time.run(case())


def test_a_prompt_all_of_whose_rollouts_failed_is_in_no_mean() -> None:
    """By hand: the means of the prompts are 1 and 0.5, so that their mean is 0.75, and its standard error 0.25."""
    found = measured([[1.0, 1.0, 1.0, 1.0], [None, None], [0.0, 1.0], [None]])
    assert (found.reward_mean, found.prompts, found.asked, found.failed_prompts) == (0.75, 2, 4, 2)
    assert found.reward_sem == pytest.approx(0.25)
    assert (found.failures, found.kinds) == ({"reward_raised": 3}, {"reward_raised": 3})
    assert (found.length_mean, found.truncated) == (2.0, 6)


def test_further_sets_are_measured_beside_the_held_out_prompts_and_told_before_them() -> None:
    """Where a run has the fact of the held-out prompts, all sets were measured: a run that is killed earlier measures all of them again."""

    async def case() -> None:
        told, facts = telemetry()
        first, greedy = Given([[1.0], [0.0]]), Given([[0.5, 0.5]])
        further = [HeldOutSet("greedy", greedy, PROMPTS[:1], "a"), HeldOutSet("none", Given([[None]]), PROMPTS[:1])]  # type: ignore[arg-type]
        evaluator = Evaluator(HeldOutSet("sums", first, PROMPTS[:2], "b"), told, further)  # type: ignore[arg-type]
        found = await evaluator.measure("during", 3)
        assert found and (found.name, found.beside, found.reward_mean) == ("sums", False, 0.5)
        *others, last = facts.of(Evaluated)
        assert last == found and {(fact.name, fact.beside, fact.step) for fact in others} == {
            ("greedy", True, 3),
            ("none", True, 3),
        }
        assert {fact.name: fact.asked - fact.prompts for fact in others} == {"greedy": 0, "none": 1}
        assert {fact.name: fact.measure for fact in (*others, last)} == {"greedy": "a", "none": "", "sums": "b"}
        numbers = [number for number, _, _ in (*first.asked, *greedy.asked)]
        assert len(set(numbers)) == 2, "requests of two sets have two names"

    virtual_time.run(case())


@pytest.mark.parametrize(
    ("phase", "step", "done", "measured"),
    [
        ("during", 20, 19, ["20", "always"]),
        ("during", 30, 29, ["30", "always"]),
        ("during", 50, 49, ["always"]),
        ("during", 60, 59, ["20", "30", "always"]),
        ("during", 47, 39, ["20", "always"]),
        ("during", 63, 50, ["20", "30", "always"]),  # the evaluation of step 60 was lost with the process
        ("before", 0, -1, ["20", "30", "always"]),
        ("after", 61, -1, ["20", "30", "always"]),
    ],
)
def test_a_set_is_measured_at_its_turn(phase: Phase, step: int, done: int, measured: list[str]) -> None:
    async def case() -> None:
        told, facts = telemetry()
        named = {"20": 20, "30": 30, "always": 0}
        sets = [HeldOutSet(name, Given([[1.0]]), PROMPTS[:1], every=every) for name, every in named.items()]  # type: ignore[arg-type]
        await Evaluator(HeldOutSet("", Given([[1.0]]), PROMPTS[:1]), told, sets).measure(phase, step, done)  # type: ignore[arg-type]
        assert sorted(fact.name for fact in facts.of(Evaluated) if fact.beside) == measured

    virtual_time.run(case())


class Slow(Given):
    async def held_out(self, number: int, index: int, prompt: Prompt, seen: Seen) -> PlayedGroup:
        await asyncio.sleep(100)
        return await super().held_out(number, index, prompt, seen)


def test_measurements_are_told_in_the_order_of_their_steps() -> None:
    """A run that is killed begins at the last one that was told: a set that takes longer than the steps until the next measurement would be left out, and
    the rewards of an older policy be the newest ones of the run."""

    async def case() -> None:
        told, facts = telemetry()
        sets = [HeldOutSet("long", Slow([[1.0]]), PROMPTS[:1], every=4)]  # type: ignore[arg-type]
        evaluator = Evaluator(HeldOutSet("", Given([[1.0]]), PROMPTS[:1]), told, sets)  # type: ignore[arg-type]
        four = asyncio.ensure_future(evaluator.measure("during", 4, 3))
        await asyncio.sleep(10)
        six = asyncio.ensure_future(evaluator.measure("during", 6, 5))
        await asyncio.sleep(80)
        assert not facts.of(Evaluated)
        await asyncio.gather(four, six)
        assert [(fact.step, fact.name) for fact in facts.of(Evaluated)] == [(4, "long"), (4, ""), (6, "")]
        eight = asyncio.ensure_future(evaluator.measure("during", 8, 7))
        ten = asyncio.ensure_future(evaluator.measure("during", 10, 9))
        await asyncio.sleep(10)
        eight.cancel()
        assert await ten is None, "else a run that goes on would take step 8 for measured"
        assert await evaluator.measure("after", 11) and [fact.step for fact in facts.of(Evaluated)[3:]] == [11, 11]

    virtual_time.run(case())


class Versions(Given):
    async def held_out(self, number: int, index: int, prompt: Prompt, seen: Seen) -> PlayedGroup:
        spans = tuple(VersionSpan(start, version, version) for start, version in ((0, 4), (1, 6)))
        done = Completion((1, 2, 3, 4), (0.0,) * 4, spans, "length")
        return PlayedGroup((Scored(Episode((Turn((), done),)), 1.0, {}),))


def test_a_measurement_by_later_weights_than_those_of_its_step_is_told_once() -> None:
    async def case() -> None:
        told, facts = telemetry()
        sets = [HeldOutSet("more", Given([[1.0]]), PROMPTS[:1])]  # type: ignore[arg-type]
        evaluator = Evaluator(HeldOutSet("", Versions([[]]), PROMPTS[:1]), told, sets)  # type: ignore[arg-type]
        for step in (3, 4, 5, 6):
            await evaluator.measure("during", step, step - 1)
        assert [fact.later for fact in facts.of(Evaluated) if not fact.beside] == [1.0, 0.75, 0.75, 0.0]
        assert [fact.later for fact in facts.of(Evaluated) if fact.beside] == [0.0] * 4
        (warned,) = facts.of(Warned)
        assert warned.message.startswith(
            "100% of the tokens of the held-out prompts at step 3 were sampled by later weights"
        )

    virtual_time.run(case())


def test_only_evaluations_that_measured_the_same_are_compared(tmp_path: Path) -> None:
    """A reward of 1 after a resume with another reward function is no gain over the 0.2 of the one before."""

    def measured(phase: Any, reward: float, measure: str = "a") -> Evaluated:
        look = HeldOutLook("p", "?", str(reward), (reward,))
        return Evaluated(0.0, phase, 3, 9, reward, 0.01, 5.0, looks=(look,), measure=measure)

    same = [measured("before", 0.2), measured("during", 0.3), measured("after", 0.4)]
    assert ends_of(same) == (same[0], same[2]) and gain_of(same).startswith("0.200 → 0.400")
    other = [*same[:2], measured("during", 0.9, "b"), measured("after", 1.0, "b")]
    assert ends_of(other) == (None, other[3]) and "→" not in gain_of(other)
    assert [look.then.text for look in [then_and_now(other)] if look] == ["0.9"]
    earlier = [measured("before", 0.2, ""), measured("after", 1.0, "b")]
    assert ends_of(earlier) == tuple(earlier), "of a version that recorded no mark"


class Meant(FakeWorld):
    """A run whose settings say what a reward means."""

    @property
    def _made_by(self) -> dict[str, str]:
        return super()._made_by | {"reward.function": "mine.py:exact"}


def test_a_run_marks_its_measurements(tmp_path: Path) -> None:
    found = []
    for number, kind in enumerate((Meant, FakeWorld)):
        world = kind(tmp_path / str(number), steps=2, evaluate_every=1)
        virtual_time.run(world.run())
        found.append({fact.measure for fact in world.facts.of(Evaluated)})
    assert found == [{measure_of({"reward.function": "mine.py:exact"}, 1.0)}, {""}] and found[0] != {""}


def test_the_mark_of_a_measurement_follows_what_a_reward_means(tmp_path: Path, tiny_tokenizer: Path) -> None:
    tree = tiny_config(tmp_path, tiny_tokenizer)

    def mark(temperature: float = 1.0, **tables: dict[str, Any]) -> str:
        config = read_config({**tree, **{name: {**tree.get(name, {}), **table} for name, table in tables.items()}})
        return measure_of(meaning(config, contents_of(config)), temperature)

    plain = mark()
    assert plain == mark(train={"steps": 9}) == mark(staleness={"max_lag": 0}) == mark(algo={"name": "rloo"}) != ""
    others = [
        mark(0.0),
        mark(rollout={"max_tokens": 9}),
        mark(task={"held_out": 9}),
        mark(rollout={"top_p": 0.9}),
    ]
    others += [mark(reward={"function": f"{tmp_path / 'reward.py'}:share_of_o"})]
    (tmp_path / "reward.py").write_text((tmp_path / "reward.py").read_text().replace('"e"', '"i"'))
    assert len({plain, mark(), *others}) == 7
    assert measure_of({"algo.advantage": "x"}, 1.0) == ""


def test_the_mark_of_an_evaluation_set_follows_its_own_reward(tmp_path: Path, tiny_tokenizer: Path) -> None:
    """A resume may change it, and the reward before training would be compared with one that means something else."""
    (tmp_path / "own.py").write_text("def exact(completions, **columns):\n    return [1.0] * len(completions)\n")
    tree = tiny_config(tmp_path, tiny_tokenizer)
    tables = [{"name": "own", "reward": {"function": f"{tmp_path / 'own.py'}:exact"}}, {"name": "same", "samples": 2}]

    def marks() -> list[str]:
        config = read_config({**tree, "eval": {"prompts": 4, "sets": tables}})
        encoder = ChatEncoder(tiny_tokenizer)
        return [one.measure for one in read_sets(config, encoder, build_task(config.task, encoder, 0))]

    before = marks()
    (tmp_path / "own.py").write_text("def exact(completions, **columns):\n    return [0.5] * len(completions)\n")
    after = marks()
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, True] and all(before)


def test_without_a_reward_there_is_no_mean() -> None:
    found = measured([[None], [None, None]])
    assert math.isnan(found.reward_mean) and math.isnan(found.reward_sem) and math.isnan(found.length_mean)
    assert (found.prompts, found.failed_prompts) == (0, 2)
    assert math.isnan(measured([[0.5, 0.7]]).reward_sem), "one prompt has no spread"


@settings(max_examples=50)
@given(st.lists(st.lists(st.none() | st.floats(-2, 2), min_size=1, max_size=4), min_size=1, max_size=6))
def test_each_prompt_weighs_the_same_and_no_failure_is_a_number(rewards: list[list[float | None]]) -> None:
    means = [
        sum(known) / len(known) for reward in rewards if (known := [value for value in reward if value is not None])
    ]
    found = measured(rewards)
    assert found.prompts == len(means) and sum(found.failures.values()) == sum(reward.count(None) for reward in rewards)
    assert (
        found.reward_mean == pytest.approx(sum(means) / len(means), abs=1e-12)
        if means
        else math.isnan(found.reward_mean)
    )
