"""The verdict of a run and its six rows: of runs that learn, that are of no use, that broke, and that are too young; and their limits, which
are those of the advice and of docs/healthy.md.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.reports import CriticNumbers, EngineStats, LoadReport, TrainReport
from headrace.core.weights import WeightUpdate
from headrace.facts import health as facts_health
from headrace.facts.facts import (
    Accounting,
    CheckpointSaved,
    EngineSample,
    Evaluated,
    GroupEnded,
    HeldOutLook,
    IdentityChecked,
    RunEnded,
    RunStarted,
    TicketDrawn,
    WeightsLive,
    WorkerLost,
)
from headrace.facts.health import ADVISED, Figure, Health, Standing, health, then_and_now
from headrace.facts.index_file import thinned
from headrace.facts.number_tables import Numbers, title_of
from headrace.facts.records import StepRow
from headrace.facts.run_state import RunState
from headrace.facts.thresholds import LIMITS, Mark
from headrace.facts.verdicts import advices
from headrace.run.config import RunConfig, load_config

PAGE = Path(__file__).parents[2] / "docs" / "healthy.md"
DIED = Standing("died while training and left no message: it was killed, or the machine went down", "bad")
GROUPS, SIZE = 4, 4


class Told:
    """A run of `steps` steps of 4 groups of 4 rollouts; every number can be set as a function of the step, from 0."""

    def __init__(self, steps: int = 40, planned: int = 40, **numbers: Any) -> None:
        self.steps, self.planned, self.numbers = steps, planned, numbers
        self.ticket = 0

    def of(self, name: str, step: int, usual: Any) -> Any:
        value = self.numbers.get(name, usual)
        return value(step) if callable(value) else value

    def facts(self) -> Iterable[Any]:
        yield RunStarted(0.0, "tiny", "a model", 0, self.planned, GROUPS, SIZE, 2 * GROUPS, 1, 1, {}, max_tokens=48)
        yield self.evaluation("before", 0)
        for step in range(self.steps):
            yield from self.step(step)
        if self.steps == self.planned:
            yield self.evaluation("after", self.steps)

    def evaluation(self, phase: str, step: int) -> Evaluated:
        mean = self.of("held_out", step, 0.2 + 0.4 * min(1.0, step / 40))
        return Evaluated(10.0 * step, phase, step, 16, mean, 0.03, 9.0, asked=16)  # type: ignore[arg-type]

    def critic(self, step: int) -> CriticNumbers | None:
        explained = self.of("explained", step, None)
        if explained is None:
            return None
        return CriticNumbers(
            value_loss=0.25, value_mean=0.4, return_mean=0.5, explained_variance=explained, advantage_std=0.5
        )

    def step(self, step: int) -> Iterable[Any]:
        t, ready = 10.0 * (step + 1), []
        for _ in range(GROUPS):
            ticket, self.ticket = self.ticket, self.ticket + 1
            yield TicketDrawn(t - 9, ticket, f"p{ticket}")
            reason = self.of("reason", ticket, "")
            outcome = "ready" if not reason else "failed" if reason == "reward_raised" else "dropped"
            failed = {reason: SIZE} if outcome == "failed" else {}
            rewards = (
                () if failed else tuple(self.of("equal", ticket, 0.0) if reason else float(i % 2) for i in range(SIZE))
            )
            cut = self.of("cut", ticket, 0)
            yield GroupEnded(
                t - 1, ticket, f"p{ticket}", outcome, reason, "", rewards, (48,) * len(rewards), cut, failed
            )
            ready += [ticket] if outcome == "ready" else []
        yield EngineSample(t - 1, EngineStats(busy_seconds=9 * (step + 1), sampled_tokens=100 * step, steps=step + 1))
        report = TrainReport(
            step=step,
            version=step + 1,
            loss_tokens=100,
            seconds=2.0,
            entropy=self.of("entropy", step, 1.0),
            grad_norm=self.of("grad_norm", step, 0.5),
            kl=self.of("kl", step, 0.002),
            skipped=self.of("skipped", step, ""),
            critic=self.critic(step),
        )
        drawn = self.of("drawn", step, 0.2 + 0.4 * step / 40 + 0.02 * (-1) ** step)
        yield StepRow(t, report, {self.of("lag", step, 1): 100}, drawn, 0.1, drawn, 1.0, tuple(ready), {}, (9,) * 16, 0)
        update = WeightUpdate(version=step + 1, kind="full", fingerprint="f", nbytes=100, seconds=0.1)
        yield WeightsLive(t, update, LoadReport(step + 1, 0.1, 0.001))
        yield IdentityChecked(t, step + 1, 0.001, 0.01, 0.15, self.of("identity", step, True))


def folded(facts: Iterable[Any]) -> tuple[RunState, Numbers]:
    state, numbers = RunState(), Numbers()
    for fact in facts:
        state.fold(fact)
        numbers.take(fact, state)
    return state, numbers


ALIVE = Standing("training", "good")


def judged(facts: Iterable[Any], standing: Standing | None = ALIVE) -> Health:
    state, numbers = folded(facts)
    return health(state, numbers.columns, standing)


def figure(found: Health, row: str, name: str) -> Figure:
    (this,) = [one for one in found.rows if one.key == row]
    return next(one for one in this.figures if one.name == name)


def marks(found: Health) -> dict[str, Mark]:
    return {row.key: row.mark for row in found.rows}


# --- the verdict --------------------------------------------------------------------------------------------------------


def test_a_run_that_learns_has_six_ticks_and_says_by_how_much() -> None:
    found = judged(Told().facts())
    assert set(marks(found).values()) == {"good"} and (found.kind, found.mark, found.remedy) == ("learning", "good", "")
    assert found.sentence == "Learning: held out 0.200 → 0.600 ± 0.030 at step 40."
    drawn = figure(found, "learns", "drawn")
    assert drawn.window == "last 10 steps" and len(drawn.curve) == 20 and drawn.curve[-1] > drawn.curve[0]


def test_a_run_that_is_cut_off_says_so_first_and_what_to_raise() -> None:
    found = judged(Told(cut=4, held_out=0.0, drawn=0.0).facts())
    assert (found.kind, found.mark, found.remedy) == ("not learning", "bad", "raise rollout.max_tokens")
    assert found.sentence == "Not learning: 100 % of completions are cut off at 48 tokens."
    assert marks(found)["learnable"] == "bad" and figure(found, "learnable", "cut off").window == "last 128 rollouts"
    young = judged(Told(steps=3, cut=4).facts())
    assert young.kind == "not learning" and young.sentence.startswith("Not learning: 100 %"), "not only after ten steps"
    gains = judged(Told(cut=4).facts())
    assert gains.sentence.startswith("100 % of completions are cut off") and gains.mark == "bad", "whatever it learns"


def test_a_run_without_contrast_says_so_first() -> None:
    found = judged(Told(reason="no_contrast", held_out=0.0).facts())
    assert (found.kind, found.mark) == ("not learning", "bad")
    assert (
        found.sentence.startswith("Not learning: none of the last 128 completions earned a reward")
        and "task.examples" in found.remedy
    )
    found = judged(Told(reason="no_contrast", held_out=0.0, equal=1.0).facts())
    assert found.sentence.startswith("Not learning: 100 % of groups have no contrast") and "prompts" in found.remedy
    solved = judged(Told(reason=lambda ticket: "no_contrast" if ticket > 100 else "", equal=1.0).facts())
    assert solved.sentence.startswith("Learned: held out 0.200 → 0.600") and "no contrast" in solved.sentence
    assert (solved.kind, solved.mark) == ("learned", "warn") and "prompts" in solved.remedy
    fallen = judged(Told(reason=lambda ticket: "no_contrast" if ticket > 100 else "", equal=0.0).facts())
    assert (fallen.kind, fallen.mark) == ("learning", "bad") and fallen.sentence.startswith("None of the last")


def test_a_dead_run_says_so_and_how_to_go_on() -> None:
    facts = [*Told(steps=20).facts(), CheckpointSaved(201.0, 20, "checkpoints/step-000020", 0.2)]
    found = judged(facts, DIED)
    assert found.kind == "broken" and found.sentence == f"Broken: the run {DIED.words}."
    assert found.remedy == "mend the cause, then headrace train --resume" and marks(found)["moves"] == "bad"
    useless = judged(Told(steps=20, cut=4).facts(), DIED)
    assert useless.sentence.startswith("Broken: 100 % of completions are cut off") and "died while" in useless.sentence
    nobody_knows = judged(Told(steps=20).facts(), None)
    assert figure(nobody_knows, "moves", "state").text == "no end is recorded" and nobody_knows.kind != "broken"


@pytest.mark.parametrize(
    ("reason", "mark", "said"),
    [
        ("finished", "good", "finished"),
        ("interrupted", "good", "interrupted"),
        ("paused: 64 groups in a row had no rollout", "bad", "the run is paused: 64 groups"),
        ("the disk is full.", "bad", "the run stopped: the disk is full."),
    ],
)
def test_an_end_with_an_error_is_no_tick(reason: str, mark: Mark, said: str) -> None:
    ended = RunEnded(401.0, reason, 40, Accounting(160, 160), 0.1, 0.2)
    found = judged([*Told().facts(), ended], None)
    assert marks(found)["moves"] == mark
    assert ".." not in found.sentence
    assert said in (found.sentence if mark == "bad" else figure(found, "moves", "state").text)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"kl": lambda step: 0.002 if step < 20 else 2.0}, "engine and trainer differ by 2 nats a token"),
        ({"grad_norm": lambda step: 0.5 if step < 20 else 100.0}, "the gradient is 200 times its usual size"),
        ({"grad_norm": lambda step: 0.5 if step < 39 else math.nan}, "the gradient is nan times its usual size"),
        ({"skipped": lambda step: "nonfinite_gradient" if step > 25 else ""}, "14 of the last 20 steps changed no weight"),
    ],
)  # fmt: skip
def test_a_run_that_diverges_is_broken(numbers: dict[str, Any], said: str) -> None:
    found = judged(Told(**numbers).facts())
    assert found.kind == "broken" and found.mark == "bad" and said in found.sentence and "learning_rate" in found.remedy
    assert marks(found)["stable"] == "bad"


def test_a_policy_that_repeats_itself_is_marked_unless_it_has_learned() -> None:
    still = Told(entropy=lambda step: 1.0 if step < 10 else 0.001, held_out=0.2, drawn=0.2)
    found = judged(still.facts())
    assert marks(found)["stable"] == "warn" and "the entropy has fallen from 1 to 0.001" in found.sentence
    assert marks(judged(Told(entropy=lambda step: 1.0 if step < 10 else 0.001).facts()))["stable"] == "good"


def test_a_critic_that_explains_nothing_is_marked_once_it_is_warm_unless_the_run_learns() -> None:
    still: dict[str, Any] = {"held_out": 0.2, "drawn": 0.2}
    found = judged(Told(explained=0.01, **still).facts())
    assert marks(found)["stable"] == "warn" and "values explain 0.010 of the variance" in found.sentence
    assert "algo.critic.learning_rate" in found.remedy and figure(found, "stable", "values").text == "0.010 explained"
    assert "value loss 0.25" in figure(found, "stable", "values").window
    assert "and mislead" in judged(Told(explained=-0.5, **still).facts()).sentence
    for told in (
        Told(explained=0.01),
        Told(explained=0.4, **still),
        Told(explained=0.01, steps=39, planned=39, **still),
        Told(explained=lambda step: 0.01 if step < 20 else 0.0, **still),
    ):
        assert marks(judged(told.facts()))["stable"] == "good", (
            "it learns, or explains, or is young, or all returns are one"
        )
    assert not [one for one in judged(Told().facts()).rows[3].figures if one.name == "values"], "without a critic"


def test_what_cannot_be_believed_is_broken() -> None:
    for numbers, said in (({"lag": 3}, "older than the bound"), ({"identity": False}, "does not serve the weights")):
        found = judged(Told(**numbers).facts())
        assert found.kind == "broken" and said in found.sentence and marks(found)["tokens"] == "bad"
    lost = RunEnded(401.0, "finished", 40, Accounting(170, 160), 0.1, 0.2)
    found = judged([*Told().facts(), lost], None)
    assert (
        found.kind == "broken" and "10 tickets without an outcome" in found.sentence and marks(found)["lost"] == "bad"
    )


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (Told(steps=0, planned=9), "0 rollouts of 32 have ended"),
        (Told(steps=1), "the reward is judged from 10 steps on, this is step 1"),
        (Told(steps=9), "the reward is judged from 10 steps on, this is step 9"),
        (Told(steps=6, planned=6, held_out=0.2), "held out 0.200 → 0.200"),
        (
            Told(steps=1, planned=1, held_out=lambda step: 0.3 if step else 0.2),
            "held out 0.200 → 0.300 ± 0.030 at step 1, within 4 standard errors",
        ),
    ],
)
def test_a_run_that_is_too_young_is_not_judged(told: Told, said: str) -> None:
    found = judged(told.facts())
    assert found.kind == "too early to say" and said in found.sentence and found.mark != "good"
    assert marks(found)["learns"] == "unknown"


def test_a_reward_that_rises_alone_is_no_learning() -> None:
    found = judged(Told(held_out=0.2).facts())
    assert (found.kind, found.mark) == ("not learning", "warn") and "although the drawn reward rises" in found.sentence
    worse = judged(Told(held_out=lambda step: 0.2 if step else 0.6).facts())
    assert (worse.kind, worse.mark) == ("not learning", "bad") and "inspect" in worse.remedy
    unmeasured = judged([fact for fact in Told().facts() if not isinstance(fact, Evaluated)])
    assert unmeasured.kind == "learning" and unmeasured.mark == "warn" and "eval.prompts" in unmeasured.remedy
    flat = judged([fact for fact in Told(drawn=0.4).facts() if not isinstance(fact, Evaluated)])
    assert flat.kind == "not learning" and "has not changed" in flat.sentence


def test_a_death_of_long_ago_is_counted_and_not_marked() -> None:
    for at, mark in ((5.0, "good"), (395.0, "warn")):
        found = judged([*Told().facts(), WorkerLost(at, "engine", "was killed by signal 9", 1)])
        assert (figure(found, "lost", "deaths").text, marks(found)["lost"]) == ("1", mark)


# --- one table of limits ------------------------------------------------------------------------------------------------


REASONS = st.sampled_from(["", "no_contrast", "overdue", "reward_raised"])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(REASONS, st.integers(0, SIZE)), min_size=8, max_size=60))
def test_no_advice_stands_beside_a_tick(groups: list[tuple[str, int]]) -> None:
    """Whatever ends: each advice has its number in the second row, which is marked, and its remedy is one that the row or verdict gives."""
    told = Told(
        steps=len(groups) // GROUPS,
        reason=lambda ticket: groups[ticket][0],
        cut=lambda ticket: 0 if groups[ticket][0] == "reward_raised" else groups[ticket][1],
    )
    state, numbers = folded(told.facts())
    found, given_ = health(state, numbers.columns), advices(state)
    if given_:
        assert marks(found)["learnable"] in ("warn", "bad") and found.mark != "good" and found.remedy
        numbered = {ADVISED.get(advice.name, advice.name) for advice in given_}
        assert numbered <= {one.name for one in found.rows[1].figures if one.trouble}
    else:
        assert marks(found)["learnable"] in ("good", "unknown")


def test_the_page_names_the_limits_of_the_table() -> None:
    rows = dict(re.findall(r"^\| `([a-z_]+/[a-z_]+)`[^|]*\| ([^|]+) \|", PAGE.read_text(), flags=re.MULTILINE))
    for name, limit in LIMITS.items():
        numbers = [float(found) for found in re.findall(r"\d+(?:\.\d+)?", rows[name])]
        assert numbers == [limit.warn, *([limit.bad] if math.isfinite(limit.bad) else [])], name


def test_every_setting_that_a_remedy_names_is_one() -> None:
    sections = {field.name: field for field in dataclasses.fields(RunConfig)}
    named = set(re.findall(r"\b([a-z]+)\.([a-z_]+)\b", " ".join(_strings(facts_health))))
    settings_named = {(section, name) for section, name in named if section in sections and section != "metrics"}
    assert {("rollout", "max_tokens"), ("staleness", "max_lag"), ("train", "learning_rate")} - settings_named == {
        ("rollout", "max_tokens")
    }, "that one is the advice's"
    default = load_config({"model": {"path": "x"}, "task": {"kind": "reasoning_gym", "name": "chain_sum"}})
    for section, name in settings_named:
        assert hasattr(getattr(default, section), name), f"{section}.{name}"


def _strings(module: ModuleType) -> Iterator[str]:
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_a_run_that_is_read_from_its_digest_is_judged_alike() -> None:
    for numbers in ({}, {"cut": 4}, {"kl": lambda step: 0.002 if step < 300 else 2.0}, {"held_out": 0.2, "drawn": 0.4}):
        state, columns = folded(Told(steps=320, planned=320, **numbers).facts())
        whole, part = (health(one, columns.columns, ALIVE) for one in (state, thinned(state)))
        assert (whole.kind, whole.mark) == (part.kind, part.mark) and marks(whole) == marks(part)


# --- one prompt, then and now -------------------------------------------------------------------------------------------


def test_further_evaluation_sets_have_their_numbers_and_no_part_in_the_verdict() -> None:
    """The set `hard` falls, was measured twice at step 0 by a run that was killed in between, and changes nothing but its own number."""

    def told(phase: str, step: int, mean: float) -> Evaluated:
        return Evaluated(1.0, phase, step, 8, mean, 0.02, 9.0, asked=9, name="hard", beside=True)  # type: ignore[arg-type]

    plain = list(Told().facts())
    first = replace(plain[1], name="sums")
    facts = [
        plain[0],
        told("before", 0, 0.7),
        told("before", 0, 0.5),
        first,
        *plain[2:-1],
        told("after", 40, 0.1),
        replace(plain[-1], name="sums"),
    ]
    state, numbers = folded(facts)
    assert [evaluation.reward_mean for evaluation in state.sets["hard"]] == [0.5, 0.1] and len(state.evals) == 2
    found = health(state, numbers.columns, ALIVE)
    assert (found.kind, found.sentence) == (judged(plain).kind, judged(plain).sentence)
    assert figure(found, "learns", "hard")[1:3] == ("0.500 → 0.100 ± 0.020", "8 of 9 prompts, 1 failed: , step 40")
    assert figure(found, "learns", "sums").text == figure(judged(plain), "learns", "held out").text
    step, values = numbers.columns.series("held_out/hard/reward")
    assert (step.tolist(), values.tolist()) == ([0, 40], [0.5, 0.1])
    assert title_of("held_out/hard/reward") == "Held-out reward, mean (hard)"


def test_one_prompt_then_and_now_is_scored_in_both() -> None:
    def look(prompt: str, *rewards: float) -> HeldOutLook:
        return HeldOutLook(prompt, f"what is {prompt}?", f"answer to {prompt}", rewards)

    first, last = (Evaluated(0.0, "before", at, 2, 0.1, 0.1, 9.0) for at in (0, 8))
    both = (
        replace(first, looks=(look("a"), look("b", 0.0, 1.0))),
        replace(last, looks=(look("a", 1.0), look("b", 1.0, 1.0))),
    )
    found = then_and_now(both)
    assert found and (found.prompt, found.then.rewards, found.now and found.now.rewards) == (
        "what is b?",
        (0.0, 1.0),
        (1.0, 1.0),
    )
    assert (found.then_step, found.now_step) == (0, 8)
    alone = then_and_now(both[:1])
    assert alone and alone.now is None and alone.then.prompt_id == "b"
    assert then_and_now([first, last]) is None, "runs of before recorded none"
