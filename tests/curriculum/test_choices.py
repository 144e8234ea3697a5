"""The bias of a curriculum is measured from its facts, and every view shows it."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.core.reports import PromptChoice
from headrace.durable.spelling import encode
from headrace.facts.facts import Fact, GroupEnded, PromptChosen, RunStarted, TicketDrawn
from headrace.facts.group_numbers import Choices
from headrace.facts.number_tables import _choice_scalars
from headrace.facts.records import Resume, decode_metrics
from headrace.facts.run_state import RunState
from headrace.facts.verdicts import advices, all_verdicts, prompts
from headrace.views.report.data import load
from headrace.views.report.page import page
from headrace.views.screen.console import Console
from headrace.views.screen.live import frame
from headrace.views.screen.summary import summary

STARTED = RunStarted(0.0, "tiny", "a model · a task", 0, 100, 4, 4, 8, 1, 1, {}, max_tokens=48)


def chosen(ticket: int, pool: str, looked: dict[str, int], drawn: int = 1, mean: float = math.nan) -> PromptChosen:
    one = PromptChoice(pool=pool, looked=looked, drawn=drawn, known=3, mean=mean, offered=0.8)
    return PromptChosen(float(ticket), ticket, one)


def ended(ticket: int, pool_is_flat: bool) -> GroupEnded:
    outcome, reason, rewards = ("dropped", "no_contrast", (1.0,) * 4) if pool_is_flat else ("ready", "", (0.0, 1.0) * 2)
    return GroupEnded(float(ticket), ticket, f"train/{ticket}", outcome, reason, "", rewards, (3,) * 4)  # type: ignore[arg-type]


FACTS: list[Fact] = [
    STARTED,
    *(
        fact
        for ticket, (pool, drawn, flat) in enumerate(
            [("new", 1, True), ("new", 1, False), ("mixed", 2, False), ("mixed", 3, True), ("mixed", 4, False)]
        )
        for fact in (
            TicketDrawn(float(ticket), ticket, f"train/{ticket}"),
            chosen(ticket, pool, {"new": 1, "mixed": 1, "solved": 2}, drawn, 0.5 if pool == "mixed" else math.nan),
            ended(ticket, flat),
        )
    ),
]


def state_of(facts: list[Fact]) -> RunState:
    state = RunState()
    for fact in facts:
        state.fold(fact)  # type: ignore[arg-type]
    return state


def test_the_numbers_by_hand():
    one = state_of(FACTS).choices
    assert (one.draws, one.known, one.most) == (5, 3, 4)
    assert one.drawn == {"new": 2, "mixed": 3} and one.offered == {"new": 5, "mixed": 5, "solved": 10}
    assert one.flat == {"new": 1, "mixed": 1}
    assert one.distance == pytest.approx((abs(0.4 - 0.25) + abs(0.6 - 0.25) + 0.5) / 2)
    assert one.effective == pytest.approx(5 * 4 / (4 * 3)), "draws of one prompt: 4, 1"
    assert one.rewards == (0.5, pytest.approx(0.8))


def test_uniform_draws_have_no_distance_and_all_prompts_count():
    one, times = Choices(), dict.fromkeys(range(10), 0)
    for ticket in range(1000):
        times[ticket % 10] += 1
        one.choose(chosen(ticket, "mixed", {"mixed": 4}, times[ticket % 10]))
    assert one.distance == 0 and one.effective == pytest.approx(10, rel=0.01)


def test_every_view_shows_it(tmp_path: Path):
    state = state_of(FACTS)
    verdict = prompts(state)
    assert verdict.value == "chosen, 0.50 from uniform" and verdict in all_verdicts(state)
    assert "mixed 60 % (25 %)" in verdict.detail and "as uneven as 2 equally likely prompts, of 3" in verdict.detail
    console = Console(file=io.StringIO(), width=140)
    console.print(summary(state))
    console.print(frame(state))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Prompts" in text and "drawn from" in text and "mixed 60 % (25 %)" in text
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(encode(fact) + b"\n" for fact in FACTS))
    html = page(load(tmp_path))
    assert "Which prompts were chosen" in html and ">mixed</td>" in html
    assert not state_of([STARTED]).choices.draws


def test_facts_survive_the_file_and_are_cut_with_their_tickets():
    fact = FACTS[2]
    again = decode_metrics(encode(fact))
    assert isinstance(again, PromptChosen) and math.isnan(again.choice.mean) and again.choice.offered == 0.8
    resume = Resume(step=0, next_ticket=3)
    assert resume.knows(chosen(2, "new", {})) and not resume.knows(chosen(3, "new", {}))


def test_dashboards_get_distance_and_effective_number():
    state = state_of(FACTS)
    assert _choice_scalars(state.choices) == {"prompts/distance": state.choices.distance, "prompts/effective": 5 / 3}
    assert _choice_scalars(RunState().choices) == {}


def test_a_curriculum_over_prompts_that_never_come_back_is_advised_against():
    facts: list[Fact] = [STARTED]
    for ticket in range(512):
        facts += [chosen(ticket, "new", {"new": 4}), ended(ticket, ticket % 2 == 0)]
    (advice,) = [advice for advice in advices(state_of(facts)) if advice.name == "curriculum"]
    assert "512 of 512 draws were of prompts that had not been drawn before" in advice.sentence
    assert not [one for one in advices(state_of(facts[:-40])) if one.name == "curriculum"], "too few draws"


def test_the_sizes_of_groups_are_counted_and_said_if_they_were_chosen():
    grown = [
        replace(fact, rollouts=16 if fact.ticket else 4) if isinstance(fact, GroupEnded) else fact for fact in FACTS
    ]
    assert state_of(grown).choices.sizes == {4: 1, 16: 4}
    assert "groups of 4 (20 %), 16 (80 %) rollouts" in prompts(state_of(grown)).detail
    assert "rollouts" not in prompts(state_of(FACTS)).detail
