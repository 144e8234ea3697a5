"""Contracts C1 to C7 under kills, crashes, hangs, lost messages and full disks: the real controller, in virtual time.

`headrace/testing/faultsim/lives.py` says how. Here: thousands of seeds, every bug that was found so (pinned), and bugs that are planted, which
must be found.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections import Counter

import msgspec
import pytest

from headrace.durable import pass_log
from headrace.loop import recovery
from headrace.testing.faultsim.case import MODES, Case, case_of
from headrace.testing.faultsim.faults import Fault
from headrace.testing.faultsim.fuzz import fuzz, problem_of, shrunk
from headrace.testing.faultsim.lives import trial
from support.few import few

CHUNKS, SEEDS = 150, 12
"""Of `make test-slow`: fresh seeds, as `make fuzz` tries them."""

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # a kill leaves such

PINNED = {
    # a last checkpoint with the weights of the step after its tickets
    "stepping": Case(10, groups=1, steps=3, checkpoint_every=0, faults=(Fault("engine_dies", 0, 13),)),
    # a second checkpoint of one step: tokens put behind themselves
    "twice": Case(
        56, groups=1, max_lag=2, group_size=3, steps=3, checkpoint_every=0, faults=(Fault("interrupt", 0, 1),)
    ),
    # killed while that took the place of the first: no checkpoint, no passes
    "replaced": Case(
        19, groups=1, max_lag=0, steps=1, checkpoint_every=0, members=3, faults=(Fault("interrupt", 0, 54),)
    ),
    # what requests had when an error ended the run, or the engine was given up
    "kept": Case(
        13,
        groups=1,
        max_lag=0,
        steps=4,
        checkpoint_every=0,
        faults=(
            Fault("kill", 0, 0),
            Fault("engine_dies", 1, 26),
        ),
    ),
    # a completion told at the very moment of a checkpoint
    "unawaited": Case(
        10,
        overdue="trim",
        groups=1,
        group_size=2,
        steps=4,
        checkpoint_every=0,
        stored=4,
        stragglers=5,
        members=2,
        segment=2000,
        faults=(
            Fault("engine_dies", 0, 20),
            Fault("engine_dies", 0, 6),
        ),
    ),
    # a call between the death of a process and its notice
    "ended": Case(
        852,
        groups=1,
        max_lag=0,
        steps=1,
        checkpoint_every=0,
        faults=(
            Fault("kill", 0, 0),
            Fault("engine_dies", 1, 0),
        ),
    ),
    # failures of a group dropped after it was ready
    "double": Case(47, overdue="trim", groups=1, max_lag=0, group_size=4, steps=2, checkpoint_every=0, stored=4),
    # the same when a swap ends the groups that have tokens of older weights
    "unheard": Case(
        359,
        mode="cancel_group",
        overdue="trim",
        order="finished",
        groups=1,
        max_lag=3,
        group_size=4,
        steps=6,
        checkpoint_every=2,
        stored=4,
        skips=True,
        members=3,
        segment=400,
        faults=(Fault("interrupt", 0, 0),),
    ),
    # passes that a loss of power left, of tickets that it did not
    "outlived": Case(
        146,
        overdue="drop",
        groups=2,
        group_size=2,
        steps=4,
        checkpoint_every=0,
        stored=2,
        faults=(
            Fault("kill", 0, 0),
            Fault("power", 1, 0),
            Fault("power", 2, 29, 0.7753585398136867),
            Fault("kill", 3, 108, 0.9990905924850997),
        ),
        stragglers=3,
        served=True,
    ),
    # a full disk when a run goes on
    "start": Case(
        1,
        groups=1,
        max_lag=0,
        steps=1,
        checkpoint_every=0,
        faults=(
            Fault("kill", 0, 3),
            Fault("kill", 1, 0),
            Fault("full", 2, 5),
        ),
    ),
    # a member of a fleet that came back while the fleet drained was held, and asked for a probe
    "held": Case(
        1630,
        mode="drain",
        overdue="drop",
        groups=1,
        group_size=3,
        steps=6,
        checkpoint_every=3,
        evaluate_every=2,
        stored=2,
        members=2,
        faults=(
            Fault("power", 0, 0, 0.55),
            Fault("kill", 1, 125, 0.07),
            Fault("engine_slow", 1, 0, 0.5),
            Fault("lose", 1, 20, 0.69),
            Fault("engine_lost", 2, 383),
        ),
    ),
    # a checkpoint whose copy was made while an error ended the loops: their group took no more tasks, and that error was told instead
    "shielded": Case(
        44,
        order="stalest",
        groups=3,
        max_lag=3,
        group_size=2,
        steps=5,
        checkpoint_every=1,
        evaluate_every=1,
        curriculum="contrast",
        grows=True,
        served=True,
        faults=(Fault("engine_dies", 0, 65),),
    ),
}
"""By their names in `docs/decisions/0012-virtual-time.md`."""


@pytest.mark.whole
@pytest.mark.parametrize("chunk", few(range(CHUNKS), keep=1))
def test_every_contract_holds_in_every_schedule(chunk: int, capsys: pytest.CaptureFixture[str]) -> None:
    findings = fuzz(chunk * SEEDS, SEEDS, float("inf"))
    assert not findings, capsys.readouterr().out


@pytest.mark.parametrize("what", few(PINNED, keep=6))
def test_what_was_found_once_is_not_found_again(what: str) -> None:
    trial(PINNED[what])


class LeftClient:
    """As those of openai and anthropic: a client that was never closed, in a cycle, starts a task of the loop that runs when it goes."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop().create_task(self.close())

    async def close(self) -> None:
        raise RuntimeError("Event loop is closed")


def test_what_another_test_has_left_is_no_problem_of_a_schedule() -> None:
    gc.collect()
    gc.disable()  # only the trial itself may collect it
    try:
        gone = weakref.ref(LeftClient())
        trial(PINNED["stepping"])
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_the_schedules_reach_what_they_are_for() -> None:
    """Every mode, every fault, kills and stops: a simulation in which nothing goes wrong proves nothing."""
    cases = [case_of(seed) for seed in range(CHUNKS * SEEDS)]
    assert set(Counter(case.mode for case in cases)) == set(MODES)
    assert {case.overdue for case in cases} == {"wait", "trim", "drop", "cancel"}
    assert sum(case.synchronous for case in cases) > 100 and sum(case.loses_nothing for case in cases) > 500
    histories = [trial(case) for case in cases[:40]]
    assert sum(history.killed for history in histories) > 30 and sum(len(history.stopped) for history in histories) > 2
    assert len({fault.kind for history in histories for fault in history.befell}) >= 8
    assert sum(history.from_sums for history in histories) > 5


@pytest.mark.slow
def test_rollouts_of_two_turns_are_killed_in_both() -> None:
    """What the environment says between two turns comes again after a kill; what was sampled is not sampled twice."""
    cases = [case for case in map(case_of, range(120)) if any(fault.kind == "kill" for fault in case.faults)][:12]
    histories = [trial(msgspec.structs.replace(case, turns=2)) for case in cases]
    assert sum(history.killed for history in histories) >= 12
    keys = [key for history in histories for by_name in history.truth.keys.values() for key in by_name.values()]
    assert {key.turn for key in keys} == {0, 1} and all(bool(key.context) == bool(key.turn) for key in keys)


@pytest.mark.slow
def test_environments_that_export_their_state_go_on_from_their_last_turn() -> None:
    """What they say differs between lives, so that a note that is lost would cost tokens; and no note may be lost."""
    cases = [case for case in map(case_of, range(200)) if any(fault.kind == "kill" for fault in case.faults)][:16]
    histories = [trial(msgspec.structs.replace(case, turns=3, resumes="exported")) for case in cases]
    assert sum(history.killed for history in histories) >= 16
    assert sum(history.notes.went_on for history in histories) >= 8, "hardly a rollout was killed behind its first turn"


@pytest.mark.slow
def test_rollouts_that_branch_are_killed_in_all_of_their_ends() -> None:
    """The turns before a fork are sampled once, whichever life played them and whichever goes on from there."""
    cases = [case for case in map(case_of, range(200)) if any(fault.kind == "kill" for fault in case.faults)][:16]
    forked = {"turns": 3, "resumes": "exported", "alternatives": 2}
    histories = [trial(msgspec.structs.replace(case, **forked)) for case in cases]
    assert sum(history.killed for history in histories) >= 16
    assert sum(history.notes.went_on for history in histories) >= 8, "hardly a rollout was killed behind its first turn"
    begun: Counter[int] = Counter()
    for case, history in zip(cases, histories, strict=True):
        keys = [key for by_name in history.truth.keys.values() for key in by_name.values()]
        begun.update(key.turn for key in keys if key.index >= case.group_size)
    assert 0 < begun[0] < begun[1] < begun[2], "alternatives begin at any turn, and go on to the end"


@pytest.mark.slow
@pytest.mark.parametrize("members", [1, 2])
def test_a_ticket_that_ends_every_engine_is_given_up_and_is_the_only_one(members: int) -> None:
    """Its journal says so, so that no later life tries it again."""
    ended, innocent = Counter[str](), Counter[int]()
    cases = [
        msgspec.structs.replace(case, members=members, shared="", poisoned=(2,)) for case in map(case_of, range(24))
    ]
    for case in cases:
        history = trial(case)
        ended.update(outcome.reason for outcome in history.outcomes if outcome.ticket == 2)
        innocent.update(
            outcome.ticket for outcome in history.outcomes if outcome.reason == "engine_died" and outcome.ticket != 2
        )
    assert ended["engine_died"] > len(cases) / 2 and sum(innocent.values()) < len(cases) / 8


def test_equal_cases_run_equally() -> None:
    case = next(case for case in map(case_of, range(100)) if len(case.faults) > 3)
    one, other = trial(case), trial(case)
    assert (one.facts, one.killed, one.stopped, one.befell) == (other.facts, other.killed, other.stopped, other.befell)
    assert one.truth == other.truth and one.trained == other.trained and one.weights == other.weights


# --- bugs that are planted (many more: test_planted.py) -----------------------------------------------------------------


@pytest.mark.slow
def test_passes_that_count_twice_are_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "read_passes", lambda run_dir, step, first: pass_log.read_passes(run_dir, step))
    case, problem = next(
        (case, problem)
        for case in map(case_of, range(1000))
        if any(fault.kind == "interrupt" for fault in case.faults) and "C5" in (problem := problem_of(case))
    )
    small = shrunk(case, problem, tries=60)
    assert "C5" in small.problem and len(small.case.faults) <= len(case.faults) and small.case.steps <= case.steps
    assert msgspec.json.decode(small.command.split("--case ")[1].strip("'"), type=Case) == small.case


def test_a_hang_without_a_reason_is_found() -> None:
    """The same hang is no finding where it was meant to be."""
    hang = Case(1, faults=(Fault("trainer_hangs", 0, 3),))
    assert trial(hang).stopped
