"""The code under test: run as a program, or run once and then called by a test in another process. Nothing here knows what is expected."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import threading
import traceback
from types import CodeType, ModuleType
from typing import Any, NoReturn

from headrace.sandbox.inside import json_frames
from headrace.sandbox.inside.confine import CHANNEL
from headrace.sandbox.inside.plain import as_json, from_json

NAME = "solution.py"
"""The file name in its tracebacks."""
RAISED, MEMORY = 1, 113
"""Exit codes: of an exception that nobody caught, and of one that says that the memory is used up."""
CONFINED = b"\0"
"""Written to standard output when the process is confined, before it runs the code: an exit code could be the code's own."""


def run_program(code: str) -> int:
    """Runs it, and prints the value of a last line that is an expression, as the interpreter does. Returns the exit code."""
    module = _module(code)
    ended = _guarded(lambda: exec(_compiled(code, show=True), module.__dict__))
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    return ended


def serve_calls(code: str) -> int:
    """Runs it, then answers calls until the test has ended. Returns the exit code."""
    module = _module(code)
    ended = _guarded(lambda: exec(_compiled(code, show=False), module.__dict__))
    if ended:
        return ended
    kept: list[Any] = []
    while True:
        try:
            asked = json_frames.receive(CHANNEL)
        except (EOFError, ConnectionError):  # the test has ended
            return 0
        try:
            answer = {"value": _answered(asked, module, kept)}
        except BaseException as error:  # SystemExit too: it ends this call only
            answer = {"raised": type(error).__name__, "text": _text(error)}
        json_frames.send(CHANNEL, answer)


def _answered(asked: Any, module: ModuleType, kept: list[Any]) -> Any:
    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    match asked:
        case {"name": name, "of": None}:
            if not hasattr(module, name):
                raise NameError(f"the code defines no {name}")
            found = getattr(module, name)
        case {"name": name, "of": place}:
            found = getattr(kept[place], name)
        case {"call": place, "args": args, "named": named}:
            found = kept[place](*from_json(args, kept.__getitem__), **from_json(named, kept.__getitem__))
    return as_json(found, keep)


def _text(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except Exception:
        return ""


def _module(code: str) -> ModuleType:
    module = ModuleType("__main__")
    sys.modules["__main__"] = module  # dataclasses and typing look up their module there
    linecache.cache[NAME] = (len(code), None, [f"{line}\n" for line in code.splitlines()], NAME)
    return module


def _compiled(code: str, *, show: bool) -> CodeType:
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
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename != __file__]
    own = [one for one in frames if not one.filename.endswith("/ast.py")] if isinstance(error, SyntaxError) else frames
    said = ["Traceback (most recent call last):\n", *traceback.format_list(own)] if own else []
    sys.stderr.write("".join([*said, *traceback.format_exception_only(error)]))


def end(code: int) -> NoReturn:
    """Ends the process with what was printed, and without anything else that was to be done at the end."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # the code has closed them
        code = code or RAISED
    finally:
        os._exit(code)
