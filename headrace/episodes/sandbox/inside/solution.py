"""The code under test: run as a program, or run once and then asked by a test in another process. Nothing here knows what is expected."""

from __future__ import annotations

import ast
import atexit
import contextlib
import linecache
import os
import sys
import threading
import traceback
from types import CodeType, ModuleType
from typing import Any, NoReturn

from headrace.episodes.sandbox.inside.answering import Answers

NAME = "solution.py"
"""The file name in its tracebacks."""
RAISED, MEMORY = 1, 113
"""Exit codes: of an exception that nobody caught, and of one that says that the memory is used up."""
CONFINED = b"\0"
"""Written to standard output when the process is confined, before it runs the code: an exit code could be the code's own."""


def run_program(code: str) -> int:
    """Runs it, and prints the value of a last line that is an expression, as the interpreter does. Then it waits for its threads, those of idle
    executors end, and what is registered with `atexit` is called. Returns the exit code."""
    module = new_module(code)
    ended = _guarded(lambda: exec(compiled(code, show=True), module.__dict__))
    with contextlib.suppress(BaseException):  # they are printed, and change no exit code
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    return ended


def serve_calls(code: str) -> int:
    """Runs it, then answers until the test has ended. Returns the exit code."""
    module = new_module(code)
    ended = _guarded(lambda: exec(compiled(code, show=False), module.__dict__))
    if not ended:
        Answers(module).serve()
    return ended


def new_module(code: str) -> ModuleType:
    """Returns the module in which it is to be run."""
    module = ModuleType("__main__")
    sys.modules["__main__"] = module  # dataclasses and typing look up their module there
    linecache.cache[NAME] = (len(code), None, [f"{line}\n" for line in code.splitlines()], NAME)
    return module


def compiled(code: str, *, show: bool) -> CodeType:
    """`show`: whether the value of a last line that is an expression is printed. Raises SyntaxError."""
    tree = ast.parse(code, NAME)
    if show and tree.body and isinstance(last := tree.body[-1], ast.Expr):
        shown: Any = ast.parse("__import__('sys').displayhook(None)", mode="eval").body
        shown.args = [last.value]
        tree.body[-1] = ast.copy_location(ast.Expr(shown), last)
    return compile(tree, NAME, "exec")


def _guarded(work: Any) -> int:
    try:
        work()
    except SystemExit as left:
        code = left.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
        return code & 0xFF if isinstance(code, int) else int(code is not None)
    except MemoryError:
        return MEMORY
    except BaseException as error:
        _print(error)
        return RAISED
    return 0


def _print(error: BaseException) -> None:
    """Prints the traceback without the frames of this file."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    own = (
        [frame for frame in frames if not frame.filename.endswith("/ast.py")]
        if isinstance(error, SyntaxError)
        else frames
    )
    messages = ["Traceback (most recent call last):\n", *traceback.format_list(own)] if own else []
    sys.stderr.write("".join([*messages, *traceback.format_exception_only(error)]))


def end(code: int) -> NoReturn:
    """Ends the process with what was printed, and does nothing else."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # the code has closed them
        code = code or RAISED
    finally:
        os._exit(code)
