"""A test in one process with the code, as Python runs it anywhere else.

Nothing keeps the code from cheating here, so that no test passes by it. But a test that passes here and not apart from the code (`tester.py`), or
the other way round, has met something that the two processes do not share, and is no verdict on the code.
"""

from __future__ import annotations

import json
import os
import sys
from types import ModuleType
from typing import Any

from headrace.episodes.sandbox.inside.confine import CHANNEL
from headrace.episodes.sandbox.inside.remote_code import TEST
from headrace.episodes.sandbox.inside.solution import NAME, compiled, new_module
from headrace.episodes.sandbox.inside.tester import NamesOfPython, names_of_test

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
