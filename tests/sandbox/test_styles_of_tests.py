"""Unit tests of many styles: right programs pass, wrong ones never do, and what two processes cannot judge is never a zero."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hostile import pytestmark  # noqa: F401

from headrace.core.batches import Failure
from headrace.episodes.sandbox.sandbox import Sandbox
from headrace.episodes.sandbox.sandbox_limits import DEFAULT
from headrace.episodes.scoring.builtin import load_unit_tests
from support.few import few

KEPT: dict[str, Any] = tomllib.loads(Path(__file__).with_name("styles_of_tests.toml").read_text())


@pytest.fixture(scope="module")
def sandbox():
    made = Sandbox(DEFAULT.limits._replace(seconds=20.0))
    yield made
    made.close()


def programs(style: dict[str, Any]) -> tuple[str, str]:
    """The right program, and the wrong one."""
    right = style.get("right", KEPT["vector"])
    wrong = style["wrong"] if "wrong" in style else right.replace(*style["replace"])
    assert wrong != right
    return right, wrong


@pytest.mark.parametrize("name", few(KEPT["judged"], keep=8))
def test_a_right_program_passes_and_a_wrong_one_fails(name, sandbox):
    style = KEPT["judged"][name]
    right, wrong = (sandbox.test(program, style["test"]) for program in programs(style))
    assert (right.reason, right.detail) == ("", "") and wrong.reason == "failed", (right, wrong)


@pytest.mark.parametrize("name", few(KEPT["not_judged"], keep=4))
def test_a_right_program_that_cannot_be_judged_is_no_zero(name, sandbox):
    style = KEPT["not_judged"][name]
    right, wrong = (sandbox.test(program, style["test"]) for program in programs(style))
    assert right.reason == "unsupported" and right.detail and wrong.reason == "failed", (right, wrong)


@pytest.mark.parametrize("name", few(KEPT["doubles"], keep=1))
def test_no_program_passes_that_solves_nothing(name, sandbox):
    test = KEPT["doubles"][name]
    assert sandbox.test("def f(x): return 2 * x", test).reason == ""
    passed = {name for name, code in KEPT["cheats"].items() if not sandbox.test(code, test).reason}
    assert not passed


CATCHES = """
class f:
    x = 3
    def __init__(self, *args): pass
    def __enter__(self): return self
    def __exit__(self, *error): return True
    async def __aenter__(self): return self
    async def __aexit__(self, *error): return True
def g(x): raise ValueError
def safe(work):
    def caught(*args):
        try: return work(*args)
        except BaseException: pass
    return caught
"""
IN_VAIN = (
    "with f() as c:\n    assert c.x == 4",
    "with f() as c:\n    assert c.y == 4",
    "with f() as c:\n    y = c.y\n    assert y == 4",
    "with f() as c:\n    y = [][0]\n    assert y == 4",
    "with f():\n    assert g(2) == 4",
    "assert f\nwith f() as c:\n    def check():\n        y = c.y\n    check()\n    assert False",
    "import contextlib\nwith contextlib.ExitStack() as stack:\n    c = stack.enter_context(f())\n    assert c.x == 4",
    "import asyncio\nasync def main():\n    async with f() as c:\n        assert c.x == 4\nasyncio.run(main())",
    "@safe\ndef check():\n    assert g(2) == 4\ncheck()",
    "@safe\ndef check():\n    assert None[0] == 4\ncheck()",
    "import unittest\nclass T(unittest.TestCase):\n    @safe\n    def test(self): self.assertEqual(g(2), 4)\nunittest.main()",
)


@pytest.mark.parametrize("test", IN_VAIN)
def test_code_that_catches_what_a_test_finds_does_not_pass(test, sandbox):
    assert sandbox.test(CATCHES, test).reason == "unsupported"
    assert sandbox.test(CATCHES, "with f():\n    raise ValueError").reason == ""


def test_the_rewards_of_what_cannot_be_judged():
    style = KEPT["not_judged"]["alias"]
    ((right, wrong),) = [load_unit_tests(whole=False)(programs(style), [[style["test"]]] * 2)]
    assert (
        isinstance(right, Failure) and right.reason == "tests_unsupported" and "fails only apart from" in right.detail
    )
    assert wrong == 0.0


def test_the_test_may_exceed_the_limits_by_itself(sandbox):
    """A right program is not blamed for it."""
    code = "def f(x): return x"
    slow = sandbox.test(code, "n = 0\nwhile True: n += 1\nassert f(1) == 1")
    assert slow.reason == "unsupported" and "the test itself took more than 2 s of CPU time" in slow.detail
    large = sandbox.test(code, "assert f(1) == 1\nx = bytearray(1 << 34)")
    assert large.reason == "unsupported" and "sandbox.memory_mib" in large.detail
    missing = sandbox.test(code, "import nowhere\nassert f(1) == 1")
    assert missing.reason == "unsupported" and "imports what is not there" in missing.detail
    never = sandbox.test(code, "for one in f([]):\n    assert one")
    assert never.reason == "unsupported" and "before any of its assert statements" in never.detail


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.binary(max_size=3)
)
HASHABLE = st.integers(-3, 3) | st.text(max_size=2)
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.sets(HASHABLE, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=12)
@given(st.lists(VALUES, min_size=1, max_size=8), VALUES)
def test_values_pass_through_as_they_are_and_no_other_passes(sandbox, values, other):
    right = f"def f(i): return {values!r}[i]\ndef g(x): return x"
    same = "".join(
        f"assert f({place}) == g({one!r}) == {one!r} and type(f({place})) is {type(one).__name__ if one is not None else 'type(None)'}\n"
        for place, one in enumerate(values)
    )
    assert sandbox.test(right, same).reason == ""
    if values[0] != other:
        assert sandbox.test(right, f"assert f(0) == {other!r}").reason == "failed"


CHANGES = st.sampled_from(
    (
        "a.append(len(a))", "a.insert(0, [])", "a[0].append(a[1])", "a[1] = a[0]", "a.reverse()", "a[2]['k'] = a[1]", "a[2].clear()", "del a[0][:1]",
        "a[3].add(9)", "a[:] = a[:4] + [1]", "a[0] += [2]",
    )
)  # fmt: skip
GIVEN = "a = [[1, 2], [3], {'k': 0}, {1}]\nfirst, named = a[0], a[2]\n"


@settings(max_examples=40)
@given(st.lists(CHANGES, min_size=1, max_size=4), st.integers(0, 3))
def test_changes_in_place_are_those_of_ordinary_python(sandbox, changes, left_out):
    """The test sees what the code has done to an argument, and to what is in it under another name; a program that leaves one of the changes out
    passes only if that makes no difference."""

    def after(lines: list[str]) -> str:
        names: dict[str, Any] = {}
        exec(GIVEN, names)
        try:
            exec("\n".join(lines), names)
        except (IndexError, TypeError, KeyError, AttributeError):
            return ""
        return repr((names["a"], names["first"], names["named"]))

    def code(lines: list[str]) -> str:
        return "def f(a):\n    " + "\n    ".join([*lines, "return a"])

    if not (wanted := after(changes)) or "..." in wanted:  # a list in itself cannot be written down
        return
    test = f"{GIVEN}f(a)\nassert (a, first, named) == {wanted}"
    fewer = [*changes[:left_out], *changes[left_out + 1 :]]
    assert sandbox.test(code(changes), test).reason == ""
    assert (sandbox.test(code(fewer), test).reason == "") == (after(fewer) == wanted)
