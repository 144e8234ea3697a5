"""The mistakes of `planted_faults.py` can still be made, and the simulation still finds them."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from planted import PACKAGE, SCHEDULES, apply, hunt
from planted_faults import PLANTED, Planted
from test_dst import PINNED

MODULES = {"buffer", "pipeline", "rolling", "ledger", "partial", "recovery", "snapshots", "journal"}
BY_NAME = {one.name: one for one in PLANTED}


@pytest.mark.parametrize("planted", PLANTED, ids=lambda one: one.name)
def test_every_edit_still_applies_and_compiles(planted: Planted, tmp_path: Path) -> None:
    copy = tmp_path / planted.file
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(PACKAGE / planted.file, copy)
    before = copy.read_text()
    apply(planted, tmp_path)
    assert copy.read_text() != before
    compile(copy.read_text(), planted.file, "exec")


def test_code_that_has_moved_away_is_said(tmp_path: Path) -> None:
    planted = BY_NAME["no_window"]
    (tmp_path / planted.file).parent.mkdir()
    (tmp_path / planted.file).write_text("# rewritten\n")
    with pytest.raises(AssertionError, match="no_window: loop/buffer.py has this 0 times instead of once"):
        apply(planted, tmp_path)


def test_the_table_covers_every_module_that_keeps_the_contracts() -> None:
    count = Counter(one.module for one in PLANTED)
    assert len(BY_NAME) == len(PLANTED) and sum(count[module] for module in MODULES) >= 30
    assert all(count[module] >= 5 for module in MODULES)


@pytest.mark.parametrize("name", ["no_window", "counted_first", "recovered_slots_kept"])
def test_some_are_found_at_once(name: str) -> None:
    found = hunt(BY_NAME[name], range(40))
    assert found.schedule is not None, f"{name}: {found.planted.mistake}, and no schedule fails"


UNDONE = {
    "stepping": "last_step_not_awaited",
    "twice": "passes_from_before",
    "replaced": "saved_again",
    "kept": "lost_with_the_error",
    "unawaited": "done_but_unheard",
    "unheard": "unheard_is_young",
    "outlived": "passes_outlive",
    "double": "failures_twice",
}
"""Pinned case -> the fault that undoes its fix."""


@pytest.mark.slow
@pytest.mark.parametrize("pinned", UNDONE)
def test_a_pinned_case_fails_when_its_fix_is_undone(pinned: str) -> None:
    """Its schedule drifts as the code changes: then it has to be found anew (`python tests/simulate/planted.py`), shrunk and pinned."""
    assert hunt(BY_NAME[UNDONE[pinned]], PINNED[pinned]).schedule is not None


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED, ids=lambda one: one.name)
def test_each_is_found(planted: Planted) -> None:
    assert hunt(planted).schedule is not None, f"{planted.mistake}, and none of {SCHEDULES} schedules fails"
