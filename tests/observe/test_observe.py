"""Recorder, metrics, resume, state, verdicts, terminal and sinks."""

from __future__ import annotations

import io
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from pydantic import ValidationError

from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.reports import EngineStats
from headrace.durable.atomic_files import AppendFile, keep_lines, read_lines, whole_lines
from headrace.durable.spelling import encode
from headrace.facts import run_state, verdicts
from headrace.facts.facts import (
    Accounting,
    Books,
    CheckpointSaved,
    EngineSample,
    Evaluated,
    Fact,
    GroupEnded,
    IdentityChecked,
    RunEnded,
    StepTrained,
    TicketDrawn,
    Warned,
)
from headrace.facts.recorder import Recorder
from headrace.facts.records import Resume, StepRow, kept_of, read_metrics, summarise
from headrace.facts.run_state import RunState
from headrace.facts.run_totals import EngineUse
from headrace.facts.texts import bar, duration, number, sparkline
from headrace.processes.health.live_status import Follower
from headrace.views.config import ObserveConfig, check_installed
from headrace.views.report import write_report
from headrace.views.screen.console import Console
from headrace.views.screen.summary import print_summary, summary
from headrace.views.screen.terminal import Header, LiveTerminal, PlainTerminal
from support.fact_stream import FactStream, standing


def record(run_dir: Path, facts: list[Fact], resume: Resume | None = None) -> RunState:
    recorder = Recorder(run_dir, resume=resume)
    for fact in facts:
        recorder.record(fact)
    recorder.close()
    return recorder.state


def folded(facts: list[Fact]) -> RunState:
    state = RunState()
    for fact in facts:
        state.fold(summarise(fact) if isinstance(fact, StepTrained) else fact)  # type: ignore[arg-type]
    return state


def steps_of(facts: list) -> list[int]:
    return [fact.report.step for fact in facts if isinstance(fact, StepRow)]


def text_of(renderable: object, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


# -- what is written and read back ------------------------------------------------------------------------------------


def test_metrics_give_back_every_fact_in_order_without_tokens(tmp_path: Path) -> None:
    facts = list(FactStream(steps=4).facts())
    record(tmp_path, facts)
    expected = [summarise(fact) if isinstance(fact, StepTrained) else fact for fact in facts]
    assert read_metrics(tmp_path) == expected
    assert b"logprobs" not in (tmp_path / "metrics.jsonl").read_bytes()


def test_non_finite_numbers_survive(tmp_path: Path) -> None:
    fact = next(fact for fact in FactStream(steps=1).facts() if isinstance(fact, StepTrained))
    report = msgspec.structs.replace(fact.report, loss=math.nan, grad_norm=math.inf)
    record(tmp_path, [msgspec.structs.replace(fact, report=report)])
    (metrics,) = read_metrics(tmp_path)
    assert isinstance(metrics, StepRow)
    assert math.isnan(metrics.report.loss) and metrics.report.grad_norm == math.inf


@given(st.floats(), st.text())
def test_any_float_and_any_text_round_trip(value: float, text: str) -> None:
    fact = IdentityChecked(0.0, 1, value, 0.0, 0.1, True), Warned(0.0, text)
    again = [msgspec.json.Decoder(type(one), strict=False).decode(encode(one)) for one in fact]
    assert again[1] == fact[1]
    assert again[0].mean_abs_diff == value or (math.isnan(value) and math.isnan(again[0].mean_abs_diff))


def test_torn_last_line_is_left_out_and_cut_before_the_next_one(tmp_path: Path) -> None:
    record(tmp_path, [Warned(1.0, "one"), Warned(2.0, "two")])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    assert read_metrics(tmp_path) == [Warned(1.0, "one")]
    file = AppendFile(path)
    file.write(encode(Warned(3.0, "three")))
    file.close()
    assert read_metrics(tmp_path) == [Warned(1.0, "one"), Warned(3.0, "three")]


@given(st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), max_size=5), st.binary(max_size=9))
@settings(max_examples=50)
def test_an_append_file_cuts_to_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], rest: bytes
) -> None:
    path = tmp_path_factory.mktemp("torn") / "file"
    path.write_bytes(b"".join(line + b"\n" for line in lines) + rest.replace(b"\n", b""))
    whole = b"".join(line + b"\n" for line in lines)
    assert whole_lines(path) == len(whole) and list(read_lines(path)) == lines
    AppendFile(path).close()
    assert path.read_bytes() == whole


def test_lines_that_cannot_be_read_are_left_out_and_counted(tmp_path: Path) -> None:
    record(tmp_path, [Warned(float(i), "abcdefg"[i]) for i in range(7)])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"b"', b'"b').replace(b'"d"', b'"\xff"'))
    *facts, said = read_metrics(tmp_path)
    assert "".join(fact.message for fact in facts) == "acefg"  # type: ignore[union-attr]
    assert isinstance(said, Warned) and said.t == 6.0
    assert said.message.startswith("2 lines of metrics.jsonl cannot be read and are left out (line 2, 4)")


def test_a_run_with_a_bad_line_goes_on_and_sets_it_aside(tmp_path: Path) -> None:
    """Reading says it each time; a run that goes on writes behind lines that can be read."""
    facts = list(FactStream(steps=4, troubles=False).facts())[:-1]
    record(tmp_path, facts)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    lines[20] = lines[20][:5] + b"\x00" + lines[20][6:]
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert "1 line of metrics.jsonl" in write_report(tmp_path).read_text()
    follower = Follower(tmp_path)
    for _ in range(2):
        follower.look(False, 0.0)
        (said,) = follower.state.warnings
        assert "1 line of metrics.jsonl cannot be read and is left out (line 21)" in said.message
    recorder = Recorder(tmp_path, resume=standing(facts, 4), waits=True)
    assert recorder.unreadable == [21] and recorder.state.step == 4
    recorder.begin()
    recorder.close()
    assert path.read_bytes().splitlines() == lines[:20] + lines[21:]
    assert (tmp_path / "metrics.jsonl.discarded").read_bytes().splitlines() == [lines[20]]


def test_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    recorder = Recorder(tmp_path)
    with pytest.raises(HeadraceError, match=r"metrics\.jsonl: No space left"):
        recorder.record(Warned(0.0, "hello"))
    recorder.close()


@pytest.mark.parametrize("fate", ["was deleted", "has 3 bytes"])
def test_metrics_that_somebody_deletes_or_cuts_are_missed_at_the_next_step(tmp_path: Path, fate: str) -> None:
    """They went to a file without a name, and the report of the run with them."""
    recorder, path = Recorder(tmp_path), tmp_path / "metrics.jsonl"
    recorder.record(Warned(1.0, "one"))
    if fate == "was deleted":
        path.unlink()
    else:
        os.truncate(path, 3)
    step = next(fact for fact in FactStream(steps=1).facts() if isinstance(fact, StepTrained))
    with pytest.raises(HeadraceError, match=rf"metrics\.jsonl {fate}.*resume with --resume"):
        recorder.record(step)
    recorder.close()


def test_disk_that_fills_in_the_middle_of_a_line_leaves_whole_lines(tmp_path: Path) -> None:
    script = """
import resource, signal, sys
from pathlib import Path
from headrace.core.errors import HeadraceError
from headrace.durable.atomic_files import AppendFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = AppendFile(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (25, 25))
file.write(b"a" * 15)
try:
    file.write(b"b" * 15)
except HeadraceError as error:
    print(error)
"""
    path = tmp_path / "file"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True, env=env
    )
    assert "could not write" in done.stdout
    assert path.read_bytes() == b"a" * 15 + b"\n"


def test_a_used_directory_is_refused_without_resume(tmp_path: Path) -> None:
    record(tmp_path, [FactStream().start()])
    with pytest.raises(ConfigError, match="already holds a run"):
        Recorder(tmp_path)


# -- resume -----------------------------------------------------------------------------------------------------------


def test_resume_goes_on_from_the_checkpoint_and_sets_the_rest_aside(tmp_path: Path) -> None:
    stream = FactStream(steps=12, troubles=False)
    facts = list(stream.facts())
    last = next(i for i, fact in enumerate(facts) if isinstance(fact, StepTrained) and fact.report.step == 11)
    written = facts[:last]
    record(tmp_path, written)
    saved = next(i for i, fact in enumerate(facts) if isinstance(fact, CheckpointSaved) and fact.step == 10)
    state = record(tmp_path, [stream.start(resumed_at=10)], standing(facts[:saved], 10))
    assert steps_of(read_metrics(tmp_path)) == list(range(10))
    assert state.step == 10 and len(state.sessions) == 2
    aside = list(read_lines(tmp_path / "metrics.jsonl.discarded"))
    kept = list(read_lines(tmp_path / "metrics.jsonl"))[:-1]
    assert sorted(kept + aside) == sorted(encode(summarise(f) if isinstance(f, StepTrained) else f) for f in written)


def test_what_happened_while_the_checkpoint_was_written_is_not_in_it(tmp_path: Path) -> None:
    before, during, after = (TicketDrawn(t, ticket, f"p{ticket}") for t, ticket in ((1.0, 0), (5.5, 1), (7.0, 2)))
    saved = CheckpointSaved(6.0, 3, "step-000003", 1.0)
    record(tmp_path, [before, during, saved, after])
    record(tmp_path, [], standing([before], 3))
    assert read_metrics(tmp_path) == [before, saved]


def test_a_kill_while_facts_are_set_aside_loses_none(tmp_path: Path) -> None:
    """The fact of the checkpoint was written over the first one that goes, and what is behind was not cut off yet."""
    before, saved = TicketDrawn(1.0, 0, "p0"), CheckpointSaved(6.0, 3, "step-000003", 1.0)
    during = [TicketDrawn(5.0 + ticket / 10, ticket, f"p{ticket}") for ticket in range(1, 9)]
    record(tmp_path, [before, *during, saved, *during])
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    record(tmp_path, [], standing([before], 3))
    kept = path.read_bytes()
    assert kept == encode(before) + b"\n" + encode(saved) + b"\n"
    path.write_bytes(kept + whole[len(kept) :])
    record(tmp_path, [], standing([before], 3))
    assert path.read_bytes() == kept
    aside = list(read_lines(tmp_path / "metrics.jsonl.discarded"))
    assert {encode(fact) for fact in during} <= set(aside)


@given(st.lists(st.tuples(st.binary(max_size=9).filter(lambda line: b"\n" not in line), st.booleans()), max_size=12), st.integers(0, 12), st.sampled_from([0, 8, 1 << 20]))  # fmt: skip
@settings(max_examples=100)
def test_lines_are_kept_or_set_aside(
    tmp_path_factory: pytest.TempPathFactory, marked: list[tuple[bytes, bool]], first: int, at_once: int
) -> None:
    """`at_once`: bytes that are written over the end of the file; more replace it."""
    path = tmp_path_factory.mktemp("kept") / "file"
    lines, rest = [line for line, _ in marked], marked[first:]
    path.write_bytes(b"".join(line + b"\n" for line in lines) + b"torn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.durable.atomic_files.AT_ONCE", at_once or 1)
        keep_lines(path, [kept for _, kept in rest], sum(len(line) + 1 for line in lines[:first]))
    assert list(read_lines(path)) == lines[:first] + [line for line, kept in rest if kept]
    aside = path.with_name("file.discarded")
    assert list(read_lines(aside)) == [line for line, kept in rest if not kept]


def test_a_follower_notices_facts_that_were_set_aside(tmp_path: Path) -> None:
    """Even if the file has grown beyond its place by then."""
    facts = list(FactStream(steps=12, troubles=False).facts())
    record(tmp_path, facts[:-40])
    follower = Follower(tmp_path)
    follower.look(False, 0.0)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    resume = standing(facts[:60], sum(isinstance(fact, StepTrained) for fact in facts[:60]))
    others = [msgspec.structs.replace(fact, t=fact.t + 100) for fact in facts[60:]]
    state = record(tmp_path, [*others, *others], resume)
    assert (tmp_path / "metrics.jsonl").stat().st_size > size
    follower.look(False, 0.0)
    assert [row.t for row in follower.state.rows] == [row.t for row in state.rows]
    assert follower.state.lags == state.lags and not follower.state.warnings


def test_a_checkpoint_whose_fact_was_lost_still_bounds_the_history(tmp_path: Path) -> None:
    facts = [fact for fact in FactStream(steps=6).facts() if not isinstance(fact, CheckpointSaved)]
    record(tmp_path, facts)
    record(tmp_path, [], standing(facts, 4))
    assert steps_of(read_metrics(tmp_path)) == [0, 1, 2, 3]


def test_a_failed_checkpoint_is_not_one_to_resume_from(tmp_path: Path) -> None:
    good, failed = CheckpointSaved(2.0, 3, "p", 0.0), CheckpointSaved(4.0, 3, "", 0.0, "No space left on device")
    record(tmp_path, [good, TicketDrawn(3.0, 0, "later"), failed])
    record(tmp_path, [], standing([], 3))
    assert read_metrics(tmp_path) == [good]


def test_facts_that_the_journal_does_not_know_are_set_aside() -> None:
    """Whichever process cut the journal, and whether or not it could cut the metrics: it was written before them."""
    resume = Resume(step=3, saved=2, next_ticket=9, flying=frozenset({7}), ready=frozenset({6}))
    known = [
        TicketDrawn(0.0, 8, "p"),
        GroupEnded(0.0, 6, "p", "ready"),
        GroupEnded(0.0, 5, "p", "dropped", "no_contrast"),
        CheckpointSaved(0.0, 2, "p", 0.0),
        Evaluated(0.0, "during", 3, 1, 0.0, 0.0, 1.0),
        RunEnded(0.0, "interrupted", 3, Accounting(), 0.0, 0.0),
    ]
    unknown = [
        TicketDrawn(0.0, 9, "p"),
        GroupEnded(0.0, 7, "p", "ready"),
        GroupEnded(0.0, 6, "p", "dropped", "nonfinite_gradient"),
        CheckpointSaved(0.0, 4, "p", 0.0),
        Evaluated(0.0, "during", 4, 1, 0.0, 0.0, 1.0),
    ]
    assert all(kept_of(known, resume))
    for fact in unknown:
        assert kept_of([*known, fact, *known[:2]], resume) == [True] * len(known) + [False] * 3, fact
    assert kept_of(known, Resume(step=3, saved=None, next_ticket=9, anew=True)) == [False] * len(known)


def test_resume_without_any_checkpoint_starts_over(tmp_path: Path) -> None:
    record(tmp_path, list(FactStream(steps=2).facts()))
    state = record(tmp_path, [], Resume(step=0, anew=True))
    assert read_metrics(tmp_path) == []
    assert state.started is None


def test_a_run_that_goes_on_with_its_journal_keeps_every_fact(tmp_path: Path) -> None:
    stream = FactStream(steps=6, troubles=False)
    facts = list(stream.facts())[:-1]
    record(tmp_path, facts)
    state = record(tmp_path, [stream.start(resumed_at=6)], standing(facts, 6))
    assert len(read_metrics(tmp_path)) == len(facts) + 1
    assert not (tmp_path / "metrics.jsonl.discarded").exists()
    assert steps_of(read_metrics(tmp_path)) == list(range(6)) and len(state.sessions) == 2


def test_accounting_goes_on_over_a_resume_with_the_books_of_the_controller() -> None:
    """Ticket 2 was drawn, and ticket 0 dropped, in the moment before the kill: the books know it, no fact does."""
    stream = FactStream()
    draws = [TicketDrawn(1.0, ticket, f"p{ticket}") for ticket in range(2)]
    ready = GroupEnded(2.0, 0, "p0", "ready")
    books = Books(Accounting(drawn=3, dropped={"overdue": 1}, in_pipeline=2), flying=(1, 2), ready=())
    again = msgspec.structs.replace(stream.start(5), t=3.0, books=books)
    state = folded([stream.start(), *draws, ready, again])
    assert state.accounting == Accounting(drawn=3, dropped={"overdue": 1}, in_pipeline=2)
    state.fold(GroupEnded(4.0, 2, "p2", "failed", "reward_raised"))
    assert state.accounting.failed == {"reward_raised": 1} and state.accounting.in_pipeline == 1
    assert state.accounting.balance() == 0


# -- the folded state -------------------------------------------------------------------------------------------------


def test_state_agrees_with_the_run_that_made_the_facts() -> None:
    stream = FactStream(steps=30)
    facts = list(stream.facts())
    state = folded(facts)
    counted = state.tickets.accounting()
    assert counted == stream.accounting()
    rows = [row for f in facts if isinstance(f, StepTrained) for group in f.groups for row in group.rows]
    assert state.step == 30 and state.lags.total() == sum(len(row.tokens) for row in rows)
    assert state.lengths.drawn.count == sum(len(fact.lengths) for fact in facts if isinstance(fact, GroupEnded))
    assert verdicts.accounting(state).mood == "good"


@given(st.integers(0, 400), st.integers(0, 5))
@settings(max_examples=25)
def test_accounting_holds_at_every_instant(length: int, seed: int) -> None:
    state = folded(list(FactStream(steps=8, groups=2, size=2, seed=seed).facts())[:length])
    assert state.tickets.accounting().balance() == 0


def test_a_group_trained_without_a_ticket_breaks_the_identity() -> None:
    facts = [fact for fact in FactStream(steps=3).facts() if not (isinstance(fact, TicketDrawn) and fact.ticket == 1)]
    state = folded([fact for fact in facts if not isinstance(fact, RunEnded)])
    assert verdicts.accounting(state).value == "DOES NOT HOLD"
    assert "≠" in text_of(summary(state)) and "✗ Accounting" in text_of(summary(state))


def test_gaps_in_what_the_sampler_recorded_are_told() -> None:
    facts = list(FactStream(steps=3).facts())
    whole = folded(facts)
    tokens = sum(row.report.loss_tokens for row in whole.rows)
    assert verdicts.record(whole) == (
        "Sampler's record",
        "complete",
        f"{tokens} tokens trained as they were sampled",
        "good",
    )
    assert "Sampler's record" not in text_of(summary(whole))
    gaps = {"dropped_tokens": 2, "outside_tokens": 1, "missing_routes": 3000, "routing_conflicts": 4}
    at = next(i for i, fact in enumerate(facts) if isinstance(fact, StepTrained))
    step = facts[at]
    assert isinstance(step, StepTrained)
    facts[at] = replace(step, report=replace(step.report, **gaps))
    verdict = verdicts.record(folded(facts))
    counts = [int(part.split()[0].replace(",", "")) for part in verdict.detail.split("; ")]
    assert verdict.value == "has gaps" and counts == list(gaps.values())
    assert "• Sampler's record" in text_of(summary(folded(facts)))
    assert verdicts.record(RunState()).mood == "unknown"


def test_a_ready_group_may_still_be_dropped_with_its_step() -> None:
    facts = [
        TicketDrawn(0.0, 7, "p"),
        GroupEnded(1.0, 7, "p", "ready", lengths=(3, 4)),
        GroupEnded(2.0, 7, "p", "dropped", "nonfinite_gradient", lengths=(3, 4)),
    ]
    state = folded(facts)  # type: ignore[arg-type]
    assert state.accounting.dropped == {"nonfinite_gradient": 1} and state.accounting.balance() == 0
    assert state.lengths.drawn.count == 2


def test_engine_idle_counts_restarts_from_zero_and_skips_the_time_between_sessions() -> None:
    use = EngineUse()
    for t, busy in ((0, 0.0), (1, 1.0), (2, 1.5), (3, 0.25)):  # at 3 a new process answers
        use.fold(float(t), EngineStats(busy_seconds=busy, sampled_tokens=int(100 * busy)), [(0.0, math.inf)])
    assert [span.busy for span in use.spans] == [1.0, 0.5, 0.25]
    assert use.idle == pytest.approx(1 - 1.75 / 3)
    use.restart()
    use.fold(100.0, EngineStats(), [(0.0, 3.0), (99.0, math.inf)])
    use.fold(101.0, EngineStats(busy_seconds=1.0), [(0.0, 3.0), (99.0, math.inf)])
    assert use.idle == pytest.approx(1 - 2.75 / 4) and use.rate == pytest.approx(175 / 4)
    use.fold(102.0, EngineStats(busy_seconds=2.0), [(0.0, 3.0), (99.0, 101.0)])
    assert use.idle == pytest.approx(1 - 2.75 / 4), "the time after the training does not count"
    assert EngineUse().idle is None and EngineUse().rate is None


def test_time_left_follows_the_pace_of_the_steps() -> None:
    stream = FactStream(steps=20, evaluate=False, troubles=False)
    state = RunState()
    for fact in stream.facts():
        state.fold(summarise(fact) if isinstance(fact, StepTrained) else fact)  # type: ignore[arg-type]
        if state.step == 10:
            break
    pace = (state.rows[-1].t - state.rows[0].t) / 9
    assert run_state.seconds_left(state) == pytest.approx(10 * pace)
    assert run_state.seconds_left(RunState()) is None


def test_phases_follow_the_facts() -> None:
    state, seen = RunState(), ["loading the model"]
    for fact in FactStream(steps=3).facts():
        state.fold(summarise(fact) if isinstance(fact, StepTrained) else fact)  # type: ignore[arg-type]
        if run_state.phase(state) != seen[-1]:
            seen.append(run_state.phase(state))
    assert seen == [
        "loading the model",
        "starting",
        "measuring held-out reward (before)",
        "training",
        "measuring held-out reward (after)",
        "finished",
    ]


# -- verdicts ---------------------------------------------------------------------------------------------------------


def evaluated(before: float, after: float, sem: float = 0.02) -> RunState:
    return folded([Evaluated(1.0, "before", 0, 64, before, sem, 9.0), Evaluated(2.0, "after", 9, 64, after, sem, 9.0)])


@pytest.mark.parametrize(("after", "mood"), [(0.5, "good"), (0.23, "plain"), (0.05, "bad"), (math.nan, "bad")])
def test_held_out_reward_is_judged_against_its_error(after: float, mood: str) -> None:
    assert verdicts.held_out(evaluated(0.2, after)).mood == mood


def test_what_was_measured_after_a_run_that_then_went_on_is_said_with_its_step() -> None:
    stream = FactStream(steps=3, evaluate=False)
    rows = [fact for fact in stream.facts() if isinstance(fact, StepTrained)]
    before, after = (
        Evaluated(1.0, phase, step, 64, 0.2 + step, 0.02, 9.0) for phase, step in (("before", 0), ("after", 2))
    )  # type: ignore[arg-type]
    assert "at step" not in verdicts.held_out(folded([before, *rows[:2], after])).detail
    assert "at step 2, 64 prompts" in verdicts.held_out(folded([before, *rows[:2], after, rows[2]])).detail


def test_what_was_not_measured_is_not_claimed() -> None:
    state = folded(list(FactStream(steps=3, evaluate=False).facts()))
    assert verdicts.held_out(state).value == "not measured"
    assert "not measured" in text_of(summary(state))
    half = folded([Evaluated(1.0, "before", 0, 64, 0.2, 0.02, 9.0)])
    assert "after training: not measured" in verdicts.held_out(half).detail
    assert [verdict.mood for verdict in verdicts.all_verdicts(RunState())] == ["unknown"] * 6


def test_a_lag_above_the_bound_is_loud() -> None:
    stream = FactStream(steps=2)
    row = next(summarise(fact) for fact in stream.facts() if isinstance(fact, StepTrained))
    state = folded([stream.start(), msgspec.structs.replace(row, lags={0: 5, 3: 1})])
    assert verdicts.lag(state).mood == "bad" and "ABOVE the bound of 1" in verdicts.lag(state).detail


@pytest.mark.parametrize("difference", [0.5, math.nan])
def test_a_failed_probe_is_loud(difference: float) -> None:
    good = IdentityChecked(1.0, 1, 0.01, 0.02, 0.15, True)
    state = folded([good, IdentityChecked(2.0, 4, difference, difference, 0.15, False)])
    assert verdicts.identity(state).value == "1 probe FAILED" and "version 4" in verdicts.identity(state).detail


# -- what people see --------------------------------------------------------------------------------------------------


def test_summary_fits_in_a_hundred_columns_and_needs_no_colour() -> None:
    state = folded(list(FactStream(steps=20).facts()))
    text = text_of(summary(state, Path("runs/demo"), Path("runs/demo/report.html")), width=140)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
    for word in ("✓ Held-out reward", "✓ Lag", "✓ Accounting", "drawn", "✓ Policy identity", "idle 7 %", "report.html"):
        assert word in text
    assert "\x1b" not in text


def test_print_summary_names_the_report_and_its_run() -> None:
    console = Console(file=io.StringIO(), width=100)
    print_summary(folded(list(FactStream(steps=20).facts())), Path("runs/demo/report.html"), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "runs/demo/report.html" in text and "headrace export runs/demo --to DIR" in text


def test_summary_of_an_empty_and_of_a_failed_run() -> None:
    assert "did not start" in text_of(summary(RunState()))
    stream = FactStream(steps=5)
    ended = msgspec.structs.replace(stream.end(), reason="3 steps in a row were skipped [nan]", step=0)
    text = text_of(summary(folded([stream.start(), ended]), Path("runs/x")))
    assert "3 steps in a row were skipped [nan]" in text and "headrace train --resume runs/x" in text


def test_plain_terminal_prints_one_line_per_step() -> None:
    out = io.StringIO()
    terminal, state = PlainTerminal(Console(file=out, width=80)), RunState()
    for fact in FactStream(steps=6).facts():
        fact = summarise(fact) if isinstance(fact, StepTrained) else fact
        state.fold(fact)  # type: ignore[arg-type]
        terminal.record(fact, state)  # type: ignore[arg-type]
    lines = out.getvalue().splitlines()
    assert lines[0] == "headrace: loading the model"
    assert [line.split("] ")[1].split("  ")[0] for line in lines if "] step " in line] == [
        f"step {i}/6" for i in range(1, 7)
    ]
    assert lines[-1].endswith("ended at step 6: finished")


def test_live_terminal_moves_before_the_first_fact_and_shows_the_run() -> None:
    out = io.StringIO()
    terminal, state = LiveTerminal(Console(file=out, width=110, height=40, force_terminal=True)), RunState()
    try:
        assert "loading the model" in out.getvalue()
        facts = list(FactStream(steps=6).facts())
        for fact in facts[:-1]:
            fact = summarise(fact) if isinstance(fact, StepTrained) else fact
            state.fold(fact)  # type: ignore[arg-type]
            terminal.record(fact, state)  # type: ignore[arg-type]
        shown = text_of(terminal._view(), width=110)
    finally:
        terminal.close()
    for word in ("step 6/6", "verdict    ", "tok/s", "running", "generating", "identity 2 ok"):
        assert word in shown


def test_header_counts_on_between_facts() -> None:
    now = [100.0]
    header = Header(lambda: now[0])
    assert "0:00" in text_of(header)
    now[0] += 75
    assert "1:15" in text_of(header)


def test_numbers_and_pictures() -> None:
    assert [number(x) for x in (0, 0.4123, 12.34, 4120.4, 2.1e-5, math.nan)] == [
        "0",
        "0.412",
        "12.3",
        "4,120",
        "2.1e-05",
        "nan",
    ]
    assert [duration(x) for x in (7, 760, 11109)] == ["0:07", "12:40", "3:05:09"]
    assert (
        sparkline([0, 1, math.nan, 7]) == "▁▂█" and sparkline([]) == "" and len(sparkline(list(range(1000)), 40)) == 40
    )
    assert bar(0.5, 4) == "██" and bar(0.001, 4) == "▏" and bar(0, 4) == ""


# -- settings -----------------------------------------------------------------------------------------------


def test_a_missing_sink_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="pip install 'trackio>="):
        check_installed(ObserveConfig(trackio=True), find=lambda name: None)
    check_installed(ObserveConfig(), find=lambda name: None)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValidationError):
        ObserveConfig(terminal="loud")  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        ObserveConfig(neptune=True)  # type: ignore[call-arg]


def test_sampling_facts_are_cheap_to_record(tmp_path: Path) -> None:
    """A fact of a second's rhythm must not read or rewrite what is on disk already: one line is appended for each."""
    recorder = Recorder(tmp_path)
    sizes = []
    for second in range(5):
        recorder.record(EngineSample(float(second), EngineStats(busy_seconds=float(second))))
        sizes.append((tmp_path / "metrics.jsonl").stat().st_size)
    recorder.close()
    assert all(0 < later - earlier < 400 for earlier, later in itertools.pairwise(sizes))
