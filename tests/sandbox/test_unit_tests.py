"""Tests of code in another process: what passes, what does not, and what code does to pass without solving anything."""

from __future__ import annotations

import json
import signal
from collections import Counter
from typing import Any

import pytest
from test_hostile import LIMITS, pytestmark  # noqa: F401

from headrace.core.batches import Failure
from headrace.episodes.sandbox.attending import CallEnd, report_of
from headrace.episodes.sandbox.inside.plain_values import NotPlain, as_json, from_json
from headrace.episodes.sandbox.sandbox import Sandbox
from headrace.episodes.scoring.builtin import BadTests, UnitTest, load_unit_tests, read_tests
from headrace.episodes.scoring.config import RewardConfig, RewardSpec, sandbox_problems
from headrace.episodes.scoring.extract import code_block, written
from support.few import few

ADD = "def add(a, b):\n    return a + b\n"


@pytest.fixture(scope="module")
def sandbox():
    made = Sandbox(LIMITS)
    yield made
    made.close()


PASSES = {
    "equality": (ADD, "assert add(1, 2) == 3"),
    "a tolerance": ("def half(x): return x / 2", "assert abs(half(1) - 0.5) < 1e-9"),
    "a loop": (ADD, "for n in range(3):\n    assert add(n, n) == 2 * n"),
    "a function of the test": (ADD, "def check(candidate):\n    assert candidate(2, 2) == 4\ncheck(add)"),
    "a comprehension": (ADD, "assert all(add(n, 1) == n + 1 for n in range(5))"),
    "an import": ("def area(r): return 3.141592653589793 * r * r", "import math\nassert math.isclose(area(1), math.pi)"),
    "an exception": ("def div(a, b): return a / b", "try:\n    div(1, 0)\nexcept ZeroDivisionError: pass\nelse: assert False"),
    "containers": (
        "def all_kinds(): return ([1, (2, 3)], {'a': {4}}, b'x', None, 1.5, 2 ** 100, 1j, frozenset([5]), float('inf'))",
        "assert all_kinds() == ([1, (2, 3)], {'a': {4}}, b'x', None, 1.5, 2 ** 100, 1j, frozenset([5]), float('inf'))",
    ),
    "subclasses of containers": ("from collections import Counter\ndef count(x): return Counter(x)", "assert count('aab') == {'a': 2, 'b': 1}"),
    "a generator": ("def up(n): yield from range(n)", "assert list(up(3)) == [0, 1, 2]"),
    "a class": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n    def pop(self): return self.items.pop()",
        "stack = Stack()\nstack.push(3)\nstack.push(4)\nassert stack.pop() == 4 and stack.items == [3]",
    ),
    "LeetCode's class": ("class Solution:\n    def twice(self, x): return 2 * x", "assert Solution().twice(4) == 8"),
    "objects that are passed back": (
        "class Node:\n    def __init__(self, value, rest=None): self.value, self.rest = value, rest\ndef total(node): return node.value + (total(node.rest) if node.rest else 0)",
        "assert total(Node(1, Node(2))) == 3",
    ),
    "output of the code": ("print('loaded')\n" + ADD, "assert add(1, 1) == 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSES)
def test_a_right_solution_passes(name, sandbox):
    result = sandbox.test(*PASSES[name])
    assert (result.reason, result.detail) == ("", "")


SOLVES_NOTHING = {
    "wrong": ("def add(a, b): return a", "failed"),
    "an equality that is always true": (
        "class Any:\n    __eq__ = __ne__ = __lt__ = __gt__ = __contains__ = lambda *_: True\n    __hash__ = None\ndef add(a, b): return Any()",
        "failed",
    ),
    "an int whose equality is always true": (
        "class Any(int):\n    __eq__ = lambda *_: True\n    __hash__ = None\ndef add(a, b): return Any(0)", "failed",
    ),
    "a left operand": ("class Any(int):\n    __rsub__ = __sub__ = lambda *_: 0\ndef add(a, b): return Any(7)", "failed"),
    "exit before the test": ("import os; os._exit(0)", "exit"),
    "sys.exit before the test": ("import sys; sys.exit(0)", "failed"),
    "exit within the call": ("import os\ndef add(a, b): os._exit(0)", "exit"),
    "sys.exit within the call": ("def add(a, b): raise SystemExit(0)", "failed"),
    "AssertionError is gone": ("import builtins\nbuiltins.AssertionError = ZeroDivisionError\ndef add(a, b): return 0", "failed"),
    "builtins are replaced": ("import builtins\nbuiltins.abs = builtins.all = lambda *_: True\ndef add(a, b): return 0", "failed"),
    "the verdict on standard output": ("print('[\"\", \"\"]', flush=True)\nimport os; os._exit(0)", "exit"),
    "the verdict on every descriptor": (
        "import os\nfor n in range(64):\n    try: os.write(n, b'[\"\", \"\"]')\n    except OSError: pass\ndef add(a, b): return 0", "failed",
    ),
    "a forged answer": (
        "import json, os, struct\nbody = json.dumps({'value': True}).encode()\nfor _ in range(9): os.write(3, struct.pack('<I', len(body)) + body)\ndef add(a, b): return 0",
        "failed",
    ),
    "an answer of the wrong kind": (
        "import json, os, struct\nbody = b'[]'\nfor _ in range(9): os.write(3, struct.pack('<I', len(body)) + body)\ndef add(a, b): return 0",
        "failed",
    ),
    "an answer without an end": ("import os\nos.write(3, b'\\x00\\x10\\x00\\x00x')\nimport time; time.sleep(1000)", "time"),
    "answers are not sent": (
        "import sys\nfor name, module in list(sys.modules.items()):\n    if name.endswith('plain_values'): module.send = lambda *_: None\ndef add(a, b): return 0",
        "time",
    ),
    "AssertionError is raised": ("def add(a, b): raise AssertionError", "failed"),
    "a deep answer": ("def add(a, b):\n    x = []\n    for _ in range(5000): x = [x]\n    return x", "failed"),
    "an endless answer": ("def add(a, b):\n    while True: yield 1", "failed"),
    "an endless loop": ("def add(a, b):\n    while True: pass", "cpu"),
    "killing the tester": ("import os\nfor pid in range(os.getpid() - 3, os.getpid() + 9):\n    try: os.kill(pid, 9) if pid != os.getpid() else 0\n    except OSError: pass\ndef add(a, b): return 0", "failed"),
    "no such name": ("x = 1", "failed"),
    "no Python": ("def add(:", "raised"),
    "the function of a builtin": ("def abs(x): return 0\ndef add(a, b): return 9", "failed"),
}  # fmt: skip
"""Programs that do not add, and the reasons for which `TEST` does not pass."""
TEST = "assert abs(add(1, 2) - 3) < 1e-9\nassert add(1, 2) == 3"


@pytest.mark.parametrize("name", few(SOLVES_NOTHING, keep=8))
def test_code_that_solves_nothing_does_not_pass(name, sandbox):
    code, reason = SOLVES_NOTHING[name]
    own = Sandbox(LIMITS._replace(seconds=1.0)) if reason == "time" else sandbox
    result = own.test(code, TEST)
    assert result.reason == reason, result
    assert sandbox.test(ADD, TEST).reason == ""
    if own is not sandbox:
        own.close()


def test_a_test_that_catches_everything_does_not_pass_for_code_that_ended(sandbox):
    assert sandbox.test("import os\ndef add(a, b): os._exit(0)", "try: add(1, 2)\nexcept: pass").reason == "exit"


def test_the_code_that_can_pass_never_has_the_test_in_its_memory(sandbox):
    """It looks through all objects and all frames that it can reach, in the second call of the process as well. What it looks for is there when
    the test is run beside it, where no test passes."""
    code = """
import gc, sys
def seek():
    word = "".join(["ANSW", "ER"])
    reached, frame = gc.get_objects(), sys._getframe().f_back
    while frame:
        for value in frame.f_locals.values():
            reached += [value, getattr(value, "__dict__", None)]
        frame = frame.f_back
    return [1 for one in reached if isinstance(one, (str, dict, tuple, list)) and word in str(one)] != []
"""
    for _ in range(2):
        result = sandbox.test(code, "answer = 'ANSWER'\nassert seek() is False")
        assert result.reason == "unsupported" and "fails only beside the code" in result.detail, result


UNSUPPORTED = {
    "nothing of the code": (ADD, "assert 1 + 1 == 2"),
    "a function with the name of a builtin": ("def sum(a, b): return a + b", "assert sum([1, 2]) == 3"),
    "an object of the test as an argument": ("def get(x): return x.y", "class X: y = 3\nassert get(X()) == 3"),
    "no Python": (ADD, "assert add(1, 2) = 3"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_test_that_cannot_be_run_is_the_mistake_of_the_test(name, sandbox):
    assert sandbox.test(*UNSUPPORTED[name]).reason == "unsupported"


@pytest.mark.parametrize(
    ("broken", "status", "verdict", "reason"),
    [
        (("", ""), -signal.SIGKILL, ["unsupported", "it calls nothing"], "unsupported"),
        (("", ""), -signal.SIGKILL, ["ended", "it ended before it answered"], "unconfined"),
        (("", ""), 1, ["unsupported", "it calls nothing"], "unconfined"),
        (("time", "it took more than 5 s"), -signal.SIGKILL, None, "unconfined"),
    ],
)
def test_code_that_a_test_did_not_wait_for_need_not_have_been_confined(broken, status, verdict, reason):
    """The process of the code is killed when the test is over, which on a busy machine may be before it was confined."""
    printed = [b"", b"", json.dumps(verdict).encode() if verdict else b""]
    ended = CallEnd(broken, status, 0.0, 0.0, printed)
    report = report_of(ended, LIMITS)["result"]
    assert report["reason"] == reason and report["detail"] == (verdict or broken)[1]


def test_the_entry_point_may_have_the_name_of_a_builtin(sandbox):
    assert sandbox.test("def sum(a, b): return a + b", "assert sum(1, 2) == 3", "sum").reason == ""


@pytest.mark.parametrize(
    "value", [0, -(2**70), 1.5, "\ud800", b"\0", (), [1, [2]], {1: (2,)}, {3}, frozenset([4]), True, None, 1j]
)
def test_plain_values_come_back_as_they_were(value):
    back = from_json(json.loads(json.dumps(as_json(value))), int)
    assert back == value and type(back) is type(value)


def test_values_are_rebuilt_by_the_methods_of_the_built_in_types():
    class Liar(dict[Any, Any]):
        def items(self) -> Any:
            return [("a", 1)]

        def __eq__(self, other: object) -> bool:
            return True

    assert from_json(as_json(Liar()), int) == {}
    assert type(from_json(as_json(Counter("a")), int)) is Counter
    assert type(from_json(as_json(type("Own", (Counter,), {})("a")), int)) is dict
    with pytest.raises(NotPlain):
        as_json(object())


def test_forms_of_tests():
    assert read_tests(["assert f()", "assert g()"], "import math") == [
        UnitTest("import math\nassert f()"),
        UnitTest("import math\nassert g()"),
    ]
    assert read_tests("assert f()", "") == [UnitTest("\nassert f()")]
    pairs = [UnitTest("", "1\n", "2\n"), UnitTest("", "3\n", "4\n")]
    assert read_tests({"inputs": ["1\n", "3\n"], "outputs": ["2\n", "4\n"]}, "") == pairs
    assert read_tests('{"inputs": ["1\\n", "3\\n"], "outputs": ["2\\n", "4\\n"]}', "") == pairs
    assert read_tests([{"input": "1\n", "output": "2\n"}, {"input": "3\n", "output": "4\n", "kind": "x"}], "") == pairs
    for bad in (
        "",
        [],
        [""],
        3,
        {},
        {"inputs": ["1"], "outputs": []},
        [{"input": "1"}],
        "[1",
        {"inputs": [1], "outputs": ["2"]},
    ):
        with pytest.raises(BadTests):
            read_tests(bad, "")


def test_the_rewards():
    share, whole = load_unit_tests(whole=False), load_unit_tests(whole=True)
    tests = ["assert add(1, 1) == 2", "assert add(2, 2) == 4", "assert add(1, 2) == 3"]
    half_right = "def add(a, b): return 2 * a"
    codes = [ADD, half_right, "nonsense (", ""]
    assert share(codes, [tests] * 4) == [1.0, 2 / 3, 0.0, 0.0]
    assert whole(codes, [tests] * 4) == [1.0, 0.0, 0.0, 0.0]
    reads = "a, b = map(int, input().split())\nprint(a + b)"
    pairs = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3", "7 \n\n"]}
    assert share([reads, "print(3)", "print('3 x')"], [pairs] * 3) == [1.0, 0.5, 0.0]
    (failed,) = share([ADD], ["assert 1 == 1"])
    assert isinstance(failed, Failure) and failed.reason == "tests_unsupported"
    (failed,) = share([ADD], [3])
    assert isinstance(failed, Failure) and failed.reason == "tests_unreadable"


def test_code_blocks():
    text = "First\n```python\nx = 1\n```\nthen\n```py\ny = 2\n```\ndone"
    assert code_block(text) == "y = 2\n"
    assert code_block("no code") == ""
    assert code_block("```python\nx = 1") == "x = 1"
    assert code_block(written("z = 3", {"code_block", "answer_tag"})).strip() == "<answer>z = 3</answer>"
    assert code_block(written("z = 3", {"code_block"})) == "z = 3\n"
    assert written("```\nz = 3\n```", {"code_block"}) == "```\nz = 3\n```"


def test_programs_that_take_long_may_not_cost_the_group():
    config = RewardConfig(functions=(RewardSpec("unit_tests"),), timeout=30.0)
    assert list(sandbox_problems(config, group=8, seconds=3.0)) == []
    (said,) = sandbox_problems(config, group=16, seconds=3.0)
    assert "set reward.timeout to 96" in said
    assert list(sandbox_problems(RewardConfig(function="reasoning_gym"), group=99, seconds=9.0)) == []
