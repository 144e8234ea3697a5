"""The library of constraints where it is missing, and its limits."""

from __future__ import annotations

import sys
import time

import pytest

from headrace.core.types import Constraint
from headrace.episodes.rollout import ConstraintConfig
from headrace.models.grammars import LONGEST, check_constraint
from headrace.settings.extras import EXTRAS


def test_without_the_library_a_constraint_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match="needs the package llguidance") as refusal:
        check_constraint(Constraint("regex", "never asked before"))
    assert f"pip install '{EXTRAS['constrained'].requirement}'" in str(refusal.value)
    with pytest.raises(ValueError, match="needs the package llguidance"):
        ConstraintConfig(choice=("never asked before either",))


def test_a_setting_that_cannot_be_followed_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"rollout\.constraint\.regex: the regular expression cannot be followed"):
        ConstraintConfig(regex="(")
    with pytest.raises(ValueError, match="held to one of them"):
        ConstraintConfig(regex="a", choice=("b",))
    assert ConstraintConfig().constraint is None


def test_what_is_long_or_grows_is_refused_within_bounded_work() -> None:
    hostile = [
        Constraint("json_schema", '{"enum": ["' + "x" * 5_000_000 + '"]}'),
        Constraint("json_schema", '{"type": "array", "items": ' * 4000 + "{}" + "}" * 4000),
        Constraint("json_schema", '{"enum": [' + ",".join(f'"value {i}"' for i in range(LONGEST // 16)) + "]}"),
        Constraint("regex", "(" * 5000 + ")" * 5000),
        Constraint("grammar", "start: a\na: b\nb: a\n"),
    ]
    began = time.process_time()
    for constraint in hostile:
        try:
            check_constraint(constraint)
        except ValueError as refusal:
            assert len(str(refusal)) < 600
    assert time.process_time() - began < 30
