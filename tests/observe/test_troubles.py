"""What is wrong with a run is said: shares, failures with tracebacks, advice, held-out prompts that failed, in every view."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.reports import TrainReport
from headrace.core.types import Prompt
from headrace.durable.journal import ReadyRecord
from headrace.durable.spelling import encode
from headrace.facts import records
from headrace.facts.facts import (
    Accounting,
    Evaluated,
    Fact,
    FirstFailure,
    GroupEnded,
    RunEnded,
    RunStarted,
    TicketDrawn,
)
from headrace.facts.group_numbers import Recent
from headrace.facts.number_tables import scalars
from headrace.facts.records import StepRow, answer_of
from headrace.facts.run_state import RunState
from headrace.facts.verdicts import advices, bias, failings, held_out, judged, measured_on, shares
from headrace.processes.health import live_status
from headrace.views.report import write_report
from headrace.views.screen.console import Console
from headrace.views.screen.live import frame
from headrace.views.screen.status_view import lines_of
from headrace.views.screen.summary import summary
from headrace.views.screen.terminal import PlainLines

STARTED = RunStarted(0.0, "tiny", "a model · a task", 0, 100, 4, 4, 8, 1, 1, {}, max_tokens=48)
TRACEBACK = "Traceback (your frames):\n  File \"/rewards.py\", line 12, in score\n    return table[key]\nKeyError: '7'"
FIRST = FirstFailure(1.0, "reward_raised", "KeyError", "score: KeyError: '7' (/rewards.py:12)", TRACEBACK, "rows-7")


def group(ticket: int, outcome: str = "ready", reason: str = "", truncated: int = 0, failed: int = 0) -> GroupEnded:
    """Of four rollouts."""
    failures = {"reward_raised": failed} if failed else {}
    kinds = {"KeyError": failed} if failed else {}
    rewards = tuple(0.0 if reason == "no_contrast" else float(i % 2) for i in range(4 - failed))
    return GroupEnded(
        float(ticket), ticket, f"p{ticket}", outcome, reason, "", rewards, (48,) * len(rewards), truncated, failures, 1.0, 0, kinds
    )  # fmt: skip


def folded(facts: list[Any]) -> RunState:
    state = RunState()
    for fact in [STARTED, *facts]:
        if isinstance(fact, GroupEnded):
            state.fold(TicketDrawn(fact.t, fact.ticket, fact.prompt_id))
        state.fold(fact)
    return state


def step(tickets: tuple[int, ...], t: float = 50.0, wait: float = 1.0) -> StepRow:
    report = TrainReport(step=0, version=1, loss_tokens=100, seconds=0.1)
    return StepRow(t, report, {0: 100}, 0.5, 0.1, 0.5, wait, tickets, {}, (48,), 0)


def cut_off() -> RunState:
    """As in the issue: nearly all is cut off, few groups have contrast."""
    barren = ("dropped", "no_contrast")
    groups = [group(i, *barren, truncated=4) if i % 20 else group(i, truncated=3) for i in range(70)]
    return folded([*groups, step((0, 20, 40, 60), t=80.0, wait=70.0)])


def half_failed() -> RunState:
    groups = [group(i) if i % 2 else group(i, "failed", "reward_raised", failed=4) for i in range(40)]
    before, after = (
        Evaluated(t, phase, at, 4, 1.25, 0.1, 9.0, {"reward_raised": 8}, 1.0, 8, {"KeyError": 8})
        for t, phase, at in ((0.5, "before", 0), (90.0, "after", 9))
    )  # fmt: skip
    return folded([before, FIRST, *groups, step((1, 3, 5, 7)), after])


def printed(what: Any) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(what)
    return " ".join(console.file.getvalue().replace("│", " ").split())  # type: ignore[attr-defined]


# -- numbers ------------------------------------------------------------------------------------------------------------------


def test_a_recent_window_holds_so_many_rollouts_and_no_fewer_prompts() -> None:
    recent = Recent(window=16, prompts=2)
    for ticket in range(10):
        recent.add(group(ticket, "failed", "reward_raised", failed=4) if ticket < 7 else group(ticket, truncated=1))
    assert (recent.groups, recent.rollouts, recent.failed, recent.truncated) == (4, 16, 4, 3)
    assert recent.kinds["KeyError"] == 4 and recent.failed_share == 0.25 and recent.truncated_share == 0.25
    wide = Recent(window=1, prompts=3)
    for ticket in range(5):
        wide.add(group(ticket))
    assert wide.groups == 3


def test_a_group_that_was_ready_and_is_dropped_after_all_is_counted_once() -> None:
    state = folded([group(1, truncated=2), group(2), group(1, "dropped", "overdue", truncated=2)])
    for tally in (state.shares.total, state.shares.recent, state.shares.failing):
        assert (tally.groups, tally.rollouts, tally.truncated, tally.dropped) == (2, 8, 2, 1)
    assert shares(state.shares.total) == ["cut off 25 %", "dropped 50 %"]


def test_outages_do_not_count_in_the_share_that_a_run_is_paused_for() -> None:
    lost = GroupEnded(1.0, 1, "p1", "failed", "engine_error", "", failures={"engine_error": 4})
    state = folded([lost, group(2), group(3, "failed", "reward_raised", failed=4)])
    assert state.shares.total.failed_share == 8 / 12 and state.shares.total.fault_share == 4 / 8
    assert state.shares.failing.failed_share == 4 / 8


# -- advice -------------------------------------------------------------------------------------------------------------------


def test_advice_names_what_keeps_the_trainer_waiting() -> None:
    (one,) = advices(cut_off())
    assert one.name == "cut off"
    assert one.sentence == (
        "98 % of completions are cut off at 48 tokens, and 94 % of groups have no contrast: raise rollout.max_tokens "
        "(the trainer waits 100 % of its time)"
    )


def test_a_run_whose_model_never_earns_a_reward_is_told_to_show_it_how_and_not_to_raise_the_limit() -> None:
    """A limit of 8 tokens for answers of one word, which a model that is asked for one does not give: a longer answer is no better."""
    nothing = [group(i, "dropped", "no_contrast", truncated=3) for i in range(40)]
    first, second = advices(folded(nothing))
    assert first.name == "no reward" and second.name == "cut off"
    assert first.trouble == "none of the last 128 completions earned a reward, and 32 of them were not cut off"
    assert first.remedy == (
        "show solved examples in the prompt (task.examples), begin with a warm start ([warm_start]), or give partial rewards"
    )
    (first, *others) = advices(folded([*nothing, group(41)]))
    assert first.name == "cut off" and not others, "somebody earned one"
    assert advices(folded([group(i, "dropped", "no_contrast", truncated=4) for i in range(40)]))[0].name == "cut off"


def test_advice_on_contrast_alone_and_on_what_is_dropped() -> None:

    def easy() -> list[GroupEnded]:
        return [group(i, *(("dropped", "no_contrast") if i % 4 else ())) for i in range(40)]

    (one,) = advices(folded(easy()))
    assert one.name == "no contrast" and "75 % of groups have no contrast" in one.sentence
    assert "their mean is 0): choose easier prompts" in one.sentence and "rollout.group_size" in one.sentence
    solved = [msgspec.structs.replace(fact, rewards=(1.0,) * 4) if fact.reason else fact for fact in easy()]
    (one,) = advices(folded(solved))
    assert "their mean is 1): choose harder prompts" in one.sentence
    mixed = [fact if number % 3 else solved[number] for number, fact in enumerate(easy())]
    assert "choose easier or harder prompts" in advices(folded(mixed))[0].sentence, "a policy that tries nothing else"
    (one,) = advices(folded([group(i, *(("dropped", "overdue") if i % 2 else ())) for i in range(40)]))
    assert one.name == "dropped" and "50 % of groups are dropped (overdue 20): raise staleness.max_lag" in one.sentence


def test_a_run_that_goes_well_gets_no_advice() -> None:
    assert advices(folded([group(i, truncated=1) for i in range(40)])) == []
    assert advices(folded([group(i, "dropped", "no_contrast", truncated=4) for i in range(3)])) == [], "too few to say"


# -- words --------------------------------------------------------------------------------------------------------------------


def test_failures_stand_beside_the_held_out_number() -> None:
    verdict = held_out(half_failed())
    assert verdict.value == "1.250 → 1.250" and verdict.mood == "bad"
    assert "4 of 8 prompts, 4 failed: KeyError" in verdict.detail
    one = half_failed().evals[0]
    assert measured_on(msgspec.structs.replace(one, prompts=8)) == "8 prompts, 8 rollouts failed: KeyError"
    assert measured_on(Evaluated(1.0, "before", 0, 8, 1.0, 0.1, 9.0)) == "8 prompts", "of an older run"
    only = folded([one])
    assert held_out(only).mood == "bad" and "4 of 8 prompts" in held_out(only).detail


def test_failures_are_a_selection() -> None:
    verdict = bias(half_failed())
    assert verdict.mood == "bad" and verdict.value == "50 % failed"
    assert "KeyError 80 of 160 rollouts" in verdict.detail and "SELECTED" in verdict.detail
    few = folded([group(i, failed=1 if i == 5 else 0) for i in range(20)] + [step((1, 2, 3, 4))])
    assert bias(few).mood == "plain" and bias(few).value == "1 % failed"
    assert bias(folded([group(1), step((1,))])).value == "none"


def test_the_right_answer_and_what_was_extracted() -> None:
    assert answer_of(Prompt("p", "", (), {"question": "?", "answer": 42})) == "42"
    assert answer_of(Prompt("p", "", (), {"Solution": "x", "answer": None})) == "x"
    assert answer_of(Prompt("p", "", (), {"text": "?"})) == ""
    assert judged("14", {"exact": "12"}) == "extracted '12', right answer 14"
    assert judged("", {"a": "", "b": "1"}) == "extracted nothing for a, extracted '1' for b"
    assert judged("", {}) == ""


# -- views --------------------------------------------------------------------------------------------------------------------


def test_every_view_says_what_failed_and_what_to_do(tmp_path: Path) -> None:
    state = half_failed()
    assert [(failing.kind, failing.rollouts) for failing in failings(state)] == [("KeyError", 96)]
    for shown in (printed(frame(state)), printed(summary(state))):
        assert "failed 50 % (KeyError" in shown and "return table[key]" in shown and "correct the reward" in shown, (
            shown
        )
    said = {
        label: ", ".join(part.plain for part in parts)
        for label, parts in lines_of("tiny", live_status.Status("alive", "training", None), state)
    }
    assert (
        "✗, failed 50 %" in said["learnable"]
        and "KeyError, 96 rollouts" in said["failed"]
        and "correct the reward" in said["do"]
    )
    told = live_status.as_dict(live_status.Status("alive", "training", None), state)
    assert told["failures"][0]["traceback"] == TRACEBACK and told["shares"]["total"]["failed"] == 0.5
    assert told["held_out_failed"] == [4, 4] and told["advice"][0][0] == "failed"
    _, numbers = scalars(state.rows[-1], state)
    assert numbers["share/failed"] == 0.5 and numbers["share/truncated"] == 0.0


def test_the_report_shows_the_traceback_and_escapes_it(tmp_path: Path) -> None:
    first = msgspec.structs.replace(FIRST, traceback=TRACEBACK + "<b>")
    facts: list[Fact] = [STARTED, first, *(group(i, "failed", "reward_raised", failed=4) for i in range(20))]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(encode(fact) + b"\n" for fact in facts))
    html = write_report(tmp_path).read_text()
    assert "return table[key]" in html and "KeyError: 80 rollouts failed" in html and "&lt;b&gt;" in html


def test_a_log_says_a_failure_once_advice_once_and_something_while_no_step_comes() -> None:
    lines, state, said = PlainLines(), RunState(), []
    facts = [STARTED, msgspec.structs.replace(FIRST, held_out=True), FIRST]
    facts += [group(i, "dropped", "no_contrast", truncated=4) for i in range(70)]
    for fact in facts:
        if isinstance(fact, GroupEnded):
            state.fold(TicketDrawn(fact.t, fact.ticket, fact.prompt_id))
        state.fold(fact)
        said += lines.of(fact, state)
    failed = [line for line in said if line.startswith("FAILED")]
    assert len(failed) == 1 and failed[0].endswith("\n    KeyError: '7'") and "held-out prompt" in failed[0]
    assert sum(line.startswith("ADVICE cut off: 100 % of completions are cut off at 48 tokens") for line in said) == 1
    waiting = [line for line in said if line.startswith("step 1: 0 of 4 groups ready")]
    assert waiting and "no contrast 100 %" in waiting[-1]


def test_a_pause_is_a_state_of_its_own() -> None:
    ended = RunEnded(9.0, "paused: 31 of the last 64 rollouts failed", 2, Accounting(), 0.0, 0.0)
    found = live_status.judge(folded([ended]), None, alive=False, now=0.0)
    assert found.life == "paused" and not found.ok and found.words.startswith("paused: 31")


# -- files of before ------------------------------------------------------------------------------------------------------------

OLD = [
    {"fact": "RunStarted", "t": 0.0, "name": "old", "headline": "", "seed": 0, "steps": 2, "groups_per_step": 1,
     "group_size": 2, "slots": 2, "window": 1, "max_lag": 1, "where": {}},
    {"fact": "TicketDrawn", "t": 0.1, "ticket": 0, "prompt_id": "p"},
    {"fact": "GroupEnded", "t": 1.0, "ticket": 0, "prompt_id": "p", "outcome": "failed", "reason": "reward_raised",
     "detail": "KeyError", "rewards": [], "lengths": [], "truncated": 0, "failures": {"reward_raised": 2}, "seconds": 1.0},
    {"fact": "Evaluated", "t": 2.0, "phase": "before", "step": 0, "prompts": 3, "reward_mean": 1.0, "reward_sem": 0.1,
     "length_mean": 5.0, "failures": {"reward_raised": 1}, "seconds": 1.0},
]  # fmt: skip


def test_journals_of_before_are_still_read() -> None:
    episode = {
        "turns": [{"context": [1], "completion": {"tokens": [2], "logprobs": [-1.0], "spans": [], "stop": "stop"}}]
    }
    scored = {"episode": episode, "reward": 1.0, "rewards": {"exact": 1.0}, "teachers": [], "references": []}
    failure = {"reason": "reward_raised", "detail": "KeyError: '7' (r.py:3)"}
    prompt = {"id": "p", "text": "?", "tokens": [1], "columns": {}}
    group = {"ticket": 0, "prompt": prompt, "scored": [scored], "rows": [], "failures": [failure]}
    read = msgspec.json.decode(json.dumps({"kind": "Ready", "t": 1.0, "group": group}).encode(), type=ReadyRecord)
    assert read.group.scored[0].extracted == {} and read.group.failures[0].traceback == ""
    assert read.group.failures[0].kind == "reward_raised"


def test_metrics_of_before_are_still_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in OLD))
    state = RunState()
    for fact in records.read_metrics(tmp_path):
        state.fold(fact)
    assert [(failing.kind, failing.rollouts, failing.first) for failing in failings(state)] == [
        ("reward_raised", 3, None)
    ]
    assert state.shares.total.failed_share == 1.0
    assert measured_on(state.evals[0]) == "3 prompts, 1 rollout failed: reward_raised"
    assert "failed" in printed(summary(state))
