"""Warnings that are no longer true: what withdraws them, and that no view shows them as if they were."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import StalledError
from headrace.facts import run_state
from headrace.facts.facts import Fact, Warned, Withdrawn
from headrace.facts.health import health
from headrace.facts.recorder import Recorder
from headrace.facts.run_state import RunState
from headrace.facts.waits import Waits
from headrace.loop.run_limits import REFIT_AFTER, SHORT, Allowance, Minutes
from headrace.loop.world import virtual_time
from headrace.processes.health.live_status import Status
from headrace.views.board.runs_board import RunsBoard
from headrace.views.report import write_report
from headrace.views.screen.console import Console
from headrace.views.screen.live import frame
from headrace.views.screen.status_view import lines_of
from headrace.views.screen.summary import summary
from headrace.views.screen.terminal import PlainLines
from support.fact_stream import FactStream

WAIT, KEY = (
    "trainer has waited 120 s for 8 scored groups (the run stops at 1800 s)",
    "trainer waits for 8 scored groups",
)
ASIDE = "a step was skipped"


def folded(facts: list[Any]) -> RunState:
    state = RunState()
    for fact in facts:
        state.fold(fact)
    return state


def told(recorded: list[Fact]) -> list[tuple[str, str]]:
    return [
        (type(fact).__name__, fact.key) for fact in recorded if isinstance(fact, (Warned, Withdrawn))
    ]  # fmt: skip


# --- what withdraws them ------------------------------------------------------------------------------------------------


def test_a_wait_that_is_over_takes_its_warning_back_with_the_last_of_its_kind() -> None:
    recorded: list[Fact] = []

    async def main() -> None:
        waits = Waits(recorded.append, asyncio.get_running_loop().time, 10.0, 1000.0)

        async def wait(begin: float, seconds: float) -> None:
            await asyncio.sleep(begin)
            async with waits.named("scorer", "a turn"):
                await asyncio.sleep(seconds)

        await asyncio.gather(wait(0, 30), wait(1, 50), wait(5, 20), wait(0, 9), wait(200, 5))

    virtual_time.run(main())
    key = "scorer waits for a turn"
    assert told(recorded) == [("Warned", key), ("Withdrawn", key)], "three waited, and were told of once"
    assert next(fact.t for fact in recorded if isinstance(fact, Withdrawn)) == 51.0


def test_a_wait_that_ends_the_run_stays_true() -> None:
    recorded: list[Fact] = []

    async def main() -> None:
        waits = Waits(recorded.append, asyncio.get_running_loop().time, 10.0, 20.0)
        async with waits.named("trainer", "8 scored groups"):
            await asyncio.sleep(1e6)

    with pytest.raises(StalledError):
        virtual_time.run(main())
    assert told(recorded) == [("Warned", KEY)]


@pytest.mark.parametrize(("pace", "withdrawn"), [(1.0, True), (40.0, False)])
def test_minutes_that_suffice_after_all_are_no_longer_too_short(pace: float, withdrawn: bool) -> None:
    recorded: list[Fact] = []
    now = 0.0
    one = Allowance(end=100.0, steps=8, most=60, evaluation=0.0, save=0.0, step=40.0)
    minutes = Minutes(one, record=recorded.append, clock=lambda: now)
    minutes.begin(0)
    for step in range(REFIT_AFTER):
        now += pace
        minutes.stepped(step + 1, pace)
    assert told(recorded) == ([("Withdrawn", SHORT)] if withdrawn else [])
    now += pace
    minutes.stepped(REFIT_AFTER + 1, pace)
    assert len(told(recorded)) == withdrawn, "it is judged once"


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("ab") | st.just("")), max_size=12))
def test_a_warning_is_open_until_its_key_is_withdrawn(given_: list[tuple[bool, str]]) -> None:
    state, still = RunState(), []
    for t, (warns, key) in enumerate(given_):
        state.fold(Warned(float(t), f"{t}", key) if warns else Withdrawn(float(t), key))
        if warns:
            still.append((key, f"{t}"))
        elif key:
            still = [entry for entry in still if entry[0] != key]
    assert [(warning.key, warning.message) for warning in run_state.open_warnings(state)] == still
    assert len(state.warnings) == sum(warns for warns, _ in given_), "none is forgotten"


# --- what is shown ------------------------------------------------------------------------------------------------------


def shown(what: Any) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(what)
    return " ".join(console.file.getvalue().replace("│", " ").split())  # type: ignore[attr-defined]


def test_no_view_shows_what_has_passed_as_if_it_were_so(tmp_path: Path) -> None:
    facts = [*FactStream(steps=12, troubles=False).facts()][:-1]
    end = facts[-1].t
    warned = [*facts, Warned(end, ASIDE), Warned(end, WAIT, KEY)]
    for withdrawn in (False, True):
        state = folded([*warned, Withdrawn(end + 9, KEY)] if withdrawn else warned)
        status = lines_of("tiny", Status("alive", "training", None), state)
        texts = {
            "live": shown(frame(state)),
            "summary": shown(summary(state)),
            "status": " ".join(part.plain for _, parts in status for part in parts),
            "health": str(health(state)),
        }
        for name, text in texts.items():
            assert (WAIT.split(" (")[0] in text) is not withdrawn, name
            assert ASIDE in text or name == "health", name
        assert ("1 no longer true" in texts["status"]) is withdrawn
        assert (health(state).rows[0].mark == "warn") is not withdrawn


def test_the_report_keeps_it_with_the_time_at_which_it_passed_and_a_log_says_so(tmp_path: Path) -> None:
    lines, printed = PlainLines(), []
    recorder = Recorder(tmp_path)
    facts = [FactStream().start(), Warned(30.0, WAIT, KEY), Withdrawn(95.0, KEY), Withdrawn(99.0, "another")]
    for fact in facts:
        recorder.record(fact)
        printed += lines.of(fact, recorder.state)
    recorder.close()
    assert f"{WAIT} — no longer true since 1:35" in write_report(tmp_path).read_text()
    assert printed[-1] == f"NO LONGER TRUE, since [0:30]: {WAIT}", "of what nobody was warned, nothing is said"


def test_the_board_names_warnings_and_advice_by_their_keys(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    recorder = Recorder(tmp_path / "one")
    for fact in [FactStream().start(), Warned(30.0, WAIT, KEY), Warned(31.0, ASIDE)]:
        recorder.record(fact)
    recorder.close()
    board = RunsBoard(tmp_path, held=lambda path: True, make_pieces=lambda path: None)
    known = board.look(["one"])[0]["opened"]["one"]
    assert known["warnings"] == {KEY: WAIT, ASIDE: ASIDE} and known["warned"] == 2
