"""The test of one call, in a process of its own: it has the test, and not the code under test.

A name that the test does not define and Python does not have stands for one of the code's. Calling it sends plain values to the process
of the code, and returns plain values from there (`remote_code.py`); each comparison of plain values happens here. So the code never sees
what is expected, and cannot say that it passed.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any, NoReturn

from headrace.episodes.sandbox.inside.confine import CHANNEL
from headrace.episodes.sandbox.inside.remote_code import (
    STAND_INS,
    TEST,
    InPlace,
    RemoteCode,
    RemoteObject,
    TestLines,
    raised_by_code,
)
from headrace.episodes.sandbox.inside.solution import NAME, compiled, new_module

_VERDICT = 0
"""The descriptor to which the verdict is written: no test prints to it."""
_CALLS_NOTHING = (
    "the test calls nothing of the code; a function with the name of one of Python's is named in the column entry_point"
)
_EXPECTING = ("assertRaises", "assertRaisesRegex", "raises", "suppress", "isinstance", "issubclass")
"""Functions whose arguments may be exceptions that are expected."""
_IN_PLACE, _REACHED = "__in_place__", "__reached__"


class NamesOfPython(dict[str, Any]):
    """Python's own names, in which a test looks for those that it does not define; any other is one of the code. Not in its global names: the
    body of a class would not find it there."""

    def __init__(self, entry_point: str, find: Callable[[str], Any]) -> None:
        super().__init__({name: value for name, value in vars(builtins).items() if name != entry_point})
        self._find = find
        self.used = False
        """Whether the test has used a name of the code."""

    def __missing__(self, name: str) -> Any:
        self.used = True
        return self._find(name)


def names_of_test(python: NamesOfPython) -> dict[str, Any]:
    """Returns the global names of a test, which it is going to extend."""
    return {"__name__": "__test__", "__builtins__": python}


class TestModule(ModuleType):
    """`__main__`, in which `unittest.main()` looks for the test."""

    __test__ = False
    names: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name in TestModule.names:
            return TestModule.names[name]
        raise AttributeError(name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *TestModule.names]


class _Rewriting(ast.NodeTransformer):
    """Says that an assert statement is reached and that the value of a call is not used, and expects what stands in for exceptions."""

    def __init__(self) -> None:
        self.asserts = False
        self.lines = TestLines(set(), set(), [])
        self.expects = False
        """Whether the test names an exception that has a stand-in."""

    def visit_Assert(self, node: ast.Assert) -> Any:
        self.asserts = True
        self.lines.asserts.update(_span(node))
        self.generic_visit(node)
        return [ast.Expr(_call(_REACHED)), node]

    def visit_With(self, node: Any) -> Any:
        self.lines.blocks.append(_span(node))
        self.generic_visit(node)
        return node

    visit_AsyncWith = visit_With

    def visit_Raise(self, node: ast.Raise) -> Any:
        self.lines.raises.add(node.lineno)
        self.generic_visit(node)
        return node

    def visit_Expr(self, node: ast.Expr) -> Any:
        self.generic_visit(node)
        if isinstance(node.value, ast.Call):
            node.value.func = _call(_IN_PLACE, node.value.func)
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> Any:
        self.generic_visit(node)
        node.type = self._with_stand_in(node.type)
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        name = _name(node.func)
        if name in _EXPECTING:
            node.args = [self._with_stand_in(part) for part in node.args]
        if name.startswith("assert"):
            self.lines.asserts.update(_span(node))
        return node

    def visit_Name(self, node: ast.Name) -> Any:
        self.expects |= node.id in STAND_INS
        return node

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.expects |= node.attr in STAND_INS
        self.generic_visit(node)
        return node

    def _with_stand_in(self, node: Any) -> Any:
        if isinstance(node, ast.Tuple):
            node.elts = [self._with_stand_in(element) for element in node.elts]
        if (name := _name(node)) not in STAND_INS:
            return node
        return ast.Tuple([node, ast.Name(_stand_in(name), ast.Load())], ast.Load())


def _name(node: Any) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _span(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _stand_in(name: str) -> str:
    return f"__code_{name}__"


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def _compiled(test: str, rewriting: _Rewriting) -> CodeType:
    """Raises SyntaxError."""
    compile(test, TEST, "exec")
    tree = rewriting.visit(ast.parse(test, TEST))
    return compile(ast.fix_missing_locations(tree), TEST, "exec")


def end_test(reason: str, detail: str, *, sure: bool = False) -> NoReturn:
    """Ends this process with a verdict. `sure`: a failure for which the test need not be run beside the code."""
    os.write(_VERDICT, json.dumps([reason, detail[:500], sure]).encode())
    os._exit(0)


def run_test(test: str, entry_point: str) -> NoReturn:
    """Ends with the verdict. `entry_point`: the code's function, if it has the name of one of Python's."""
    rewriting = _Rewriting()
    try:
        program = _compiled(test, rewriting)
    except (SyntaxError, ValueError, RecursionError) as error:
        end_test("unsupported", f"the test is not valid Python: {error}")
    code = RemoteCode(end_test, rewriting.lines)
    python = NamesOfPython(entry_point, lambda name: code.ask({"ask": "name", "name": name}))
    reached: list[bool] = []
    python[_IN_PLACE] = lambda work: InPlace(work) if isinstance(work, RemoteObject) else work
    python[_REACHED] = lambda: reached.append(True) if not reached else None
    python.update({_stand_in(name): kind for name, kind in STAND_INS.items()})
    TestModule.names = names = names_of_test(python)
    sys.modules["__main__"], sys.argv = TestModule("__main__"), [TEST]
    try:
        exec(program, names)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:  # unittest.main() raises it in any case
            _end_badly(error, rewriting, used=python.used)
    if rewriting.asserts and not reached and not code.raised:  # an expected exception is a verdict too
        end_test("unsupported", "the test ended before any of its assert statements")
    _end_well(code, used=python.used)


def _end_badly(error: BaseException, rewriting: _Rewriting, *, used: bool) -> NoReturn:
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, ImportError) and not raised_by_code(error):
        end_test("unsupported", f"the test imports what is not there: {message}")
    if not used:
        end_test("unsupported", f"{_CALLS_NOTHING}; and it fails: {message}")
    if isinstance(error, MemoryError) and not raised_by_code(error):
        end_test("unsupported", "the test itself uses more than sandbox.memory_mib")
    sure = isinstance(error, tuple(STAND_INS.values())) and not rewriting.expects
    end_test("failed", str(error) if isinstance(error, AssertionError) else message, sure=sure)


def _end_well(code: RemoteCode, *, used: bool) -> NoReturn:
    if code.assertion:
        end_test("failed", code.assertion)
    if not used:
        end_test("unsupported", _CALLS_NOTHING)
    if code.own_word:
        end_test("unsupported", f"only the code can say {code.own_word}")
    end_test("", "")


# --- A test in one process with the code, as Python runs it anywhere else.
#
# Nothing keeps the code from cheating here, so that no test passes by it. But a test that passes here and not apart from the code (`tester.py`), or
# the other way round, has met something that the two processes do not share, and is no verdict on the code.


_Verdict = tuple[str, str]


class _CodeAndTest(ModuleType):
    """`__main__` with the code, in which `unittest.main()` finds the test."""

    test_names: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name in _CodeAndTest.test_names:
            return _CodeAndTest.test_names[name]
        raise AttributeError(name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_CodeAndTest.test_names]


def run_together(code: str, test: str, entry_point: str, seal: str) -> int:
    """Writes the verdict between two of `seal`, so that what the code writes to all its descriptors is none."""
    write, dumps = os.write, json.dumps
    verdict = _verdict(code, test, entry_point)
    write(CHANNEL, f"{seal}{dumps(verdict)}{seal}".encode())
    return 0


def sealed(printed: bytes, seal: str) -> bytes:
    """Returns the verdict as JSON; empty if there is none."""
    try:
        _, verdict, _ = printed.split(seal.encode())
        reason, detail = json.loads(verdict)
        return verdict if reason in ("", "failed") and isinstance(detail, str) else b""
    except ValueError:
        return b""


def _verdict(code: str, test: str, entry_point: str) -> _Verdict:
    module = new_module(code)
    python = NamesOfPython(entry_point, lambda name: _find(module, name))  # before the code can replace them
    try:
        exec(compiled(code, show=False), module.__dict__)
    except BaseException as error:
        return "failed", type(error).__name__
    _CodeAndTest.test_names = names = names_of_test(python)
    module.__class__, sys.argv = _CodeAndTest, [TEST]
    try:
        exec(compile(test, TEST, "exec"), names)
    except SystemExit as error:
        if _by_code(error):
            return "failed", "the code raised SystemExit"
        return ("failed", f"exit code {error.code}") if error.code else ("", "")
    except BaseException as error:
        return "failed", f"{type(error).__name__}: {error}"[:500]
    return "", ""


def _find(module: ModuleType, name: str) -> Any:
    if not hasattr(module, name):
        raise NameError(f"the code defines no {name}")
    return getattr(module, name)


def _by_code(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == NAME:
            return True
        trace = trace.tb_next
    return False
