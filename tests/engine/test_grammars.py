"""The library of constraints where it is missing, and its limits."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time

import pytest

from headrace.core.types import Constraint
from headrace.episodes.rollout import ConstraintConfig
from headrace.models import grammars
from headrace.models.grammars import LONGEST, Trials, check_constraint, try_all
from headrace.settings.extras import EXTRAS
from support.few import few


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


def test_what_is_long_or_grows_is_refused_within_bounded_work(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The work of the process of trials, done in this one."""
    hostile = [
        Constraint("json_schema", '{"enum": ["' + "x" * 5_000_000 + '"]}'),
        Constraint("json_schema", '{"type": "array", "items": ' * 4000 + "{}" + "}" * 4000),
        Constraint("json_schema", '{"enum": [' + ",".join(f'"value {i}"' for i in range(LONGEST // 16)) + "]}"),
        Constraint("regex", "(" * 5000 + ")" * 5000),
        Constraint("grammar", "start: a\na: b\nb: a\n"),
    ]
    lines = "".join(f"{json.dumps([one.kind, one.text])}\n" for one in hostile)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    began, stack = time.process_time(), threading.stack_size()
    try_all()
    threading.stack_size(stack)
    assert time.process_time() - began < 30
    output = capfd.readouterr().out.splitlines()
    assert len(output) == len(hostile) and all(len(one) < 600 for one in output)


CHAIN = {f"a{place}": {"$ref": f"#/$defs/a{place + 1}"} for place in range(2500)} | {"a2500": {}}
ENDING = {
    "the least number": Constraint("json_schema", '{"const": -9223372036854775808}'),
    "within": Constraint("json_schema", '{"properties": {"a": {"enum": [[-9223372036854775808]]}}}'),
    "in a grammar": Constraint("grammar", 'start: %json {"const": -9223372036854775808}'),
    "references": Constraint("json_schema", json.dumps({"$ref": "#/$defs/a0", "$defs": CHAIN})),
    "rules": Constraint("grammar", "start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(6000)) + 'a6000: "x"'),
}


@pytest.mark.parametrize("constraint", few(ENDING.values(), keep=2), ids=ENDING)
def test_what_ends_the_process_of_the_library_is_refused_and_nothing_else_ends(constraint: Constraint) -> None:
    """In a process of its own, which the fault would end: a server, or a run."""
    program = """
import sys
from headrace.core.types import Constraint
from headrace.models.grammars import check_constraint
try:
    check_constraint(Constraint(*sys.argv[1:]))
except ValueError as refusal:
    print(refusal)
check_constraint(Constraint("regex", "a+"))
print("the next one is checked as before")
"""
    words = [sys.executable, "-c", program, constraint.kind, constraint.text]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "made llguidance fail: its process ended with SIG" in ended.stdout
    assert ended.stdout.endswith("the next one is checked as before\n")


def test_what_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "TRIAL_SECONDS", 0.0)
    assert Trials().problem(Constraint("regex", "a")).endswith("made llguidance fail: it took longer than 0 s")
