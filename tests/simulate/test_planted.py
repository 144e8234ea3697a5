"""The mistakes of `planted_faults.py` can still be made, and the simulation still finds them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from planted import PACKAGE, SCHEDULES, apply, edited, hunt
from planted_faults import BY_PART, PLANTED, Edit, Planted
from test_dst import PINNED

from support.few import few

PARTS = {"buffer", "pipeline", "ledger", "partial", "recovery", "checkpoints", "journal"}
BY_NAME = {one.name: one for one in PLANTED}


@pytest.mark.parametrize("planted", PLANTED, ids=lambda one: one.name)
def test_every_edit_still_applies_and_compiles(planted: Planted) -> None:
    trees = edited(planted, PACKAGE)
    assert trees and all(edit.old != edit.new for edit in planted.edits)
    for path, tree in trees.items():
        compile(tree, str(path), "exec")


def test_code_that_has_moved_away_is_said(tmp_path: Path) -> None:
    (tmp_path / "buffer.py").write_text("# rewritten\n")
    with pytest.raises(AssertionError, match=r"no_window: Buffer\._eligible has this 0 times instead of once"):
        apply(BY_NAME["no_window"], tmp_path)


SOURCE = "class Buffer:\n    def release(self):\n        if self.full:\n            self.notify( )\n        return 1\n"


@pytest.mark.parametrize(
    "old, new, body",
    [
        ("self.notify()", "", "if self.full:\n    pass\nreturn 1"),
        ("self.full", "True", "if True:\n    self.notify()\nreturn 1"),
        ("if self.full:\n    ...", "self.x()\nif 1:\n    ...", "self.x()\nif 1:\n    self.notify()\nreturn 1"),
    ],
)
def test_an_edit_follows_its_function_into_any_file(tmp_path: Path, old: str, new: str, body: str) -> None:
    moved = tmp_path / "deep" / "moved.py"
    moved.parent.mkdir()
    moved.write_text(SOURCE)
    apply(Planted("it", "C1", "a mistake", (Edit("Buffer.release", old, new),)), tmp_path)
    function = ast.parse(moved.read_text()).body[0].body[0]  # type: ignore[attr-defined]
    assert "\n".join(map(ast.unparse, function.body)) == body


def test_a_statement_in_two_functions_of_one_name_is_said(tmp_path: Path) -> None:
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text(SOURCE)
    edit = Edit("Buffer.release", "self.notify()", "")
    with pytest.raises(AssertionError, match="2 times instead of once"):
        apply(Planted("it", "C1", "a mistake", (edit,)), tmp_path)


def test_the_table_covers_every_part_that_keeps_the_contracts() -> None:
    assert len(BY_NAME) == len(PLANTED) and sum(len(BY_PART[part]) for part in PARTS) >= 30
    assert all(len(BY_PART[part]) >= 5 for part in PARTS)


@pytest.mark.whole
@pytest.mark.parametrize("name", few(["no_window", "counted_first", "recovered_slots_kept"], keep=2))
def test_some_are_found_at_once(name: str) -> None:
    found = hunt(BY_NAME[name], range(120))  # which one finds it drifts as the code changes
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
