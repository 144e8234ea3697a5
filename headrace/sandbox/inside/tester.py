"""The test of one call, in a process of its own: it has the test, and not the code under test.

A name that the test does not define and Python does not have stands for one of the code's. Calling it sends plain values to the process
of the code, and returns plain values from there; everything else, each comparison above all, happens here. So the code never sees what
is expected, and cannot say that it passed.
"""

from __future__ import annotations

import builtins
from typing import Any

from headrace.sandbox.inside import json_frames
from headrace.sandbox.inside.confine import CHANNEL
from headrace.sandbox.inside.plain import NotPlain, as_json, from_json

Verdict = tuple[str, str]
"""The reason why the test did not pass, empty if it did, and the detail."""


class UnsupportedTest(Exception):
    """The test does something that cannot be done with code in another process."""


class CodeEnded(BaseException):
    """The process of the code has ended, or answers nonsense."""


class RemoteObject:
    """A function, class or object of the code."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, *args: Any, **named: Any) -> Any:
        try:
            sent = as_json(list(args), _number_of), as_json(named, _number_of)
        except NotPlain as error:
            raise UnsupportedTest(f"the test passes {error}") from None
        return _asked({"call": self._number, "args": sent[0], "named": sent[1]})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{name} of an object of the code cannot be used in a test")
        return _asked({"name": name, "of": self._number})


class NamesOfTest(dict[str, Any]):
    """The global names of a test."""

    def __init__(self, entry_point: str) -> None:
        super().__init__(__name__="__test__", __builtins__=builtins)
        self._entry_point = entry_point
        self.used = False
        """Whether the test has used a name of the code."""
        _ended.clear()

    def __missing__(self, name: str) -> Any:
        if name != self._entry_point and hasattr(builtins, name):
            return getattr(builtins, name)
        self.used = True
        return _asked({"name": name, "of": None})


def run_test(test: str, entry_point: str) -> Verdict:
    """`entry_point`: the code's function, if it has the name of one of Python's."""
    names = NamesOfTest(entry_point)
    try:
        exec(compile(test, "test.py", "exec"), names)
    except UnsupportedTest as error:
        return "unsupported", str(error)
    except SyntaxError as error:
        return "unsupported", f"the test is not valid Python: {error}"
    except AssertionError as error:
        return "failed", str(error)[:500]
    except CodeEnded:
        pass
    except BaseException as error:
        return "failed", f"{type(error).__name__}: {error}"[:500]
    if _ended:
        return _ended[0]
    if not names.used:
        return "unsupported", (
            "the test calls nothing of the code; a function with the name of one of Python's is named in the column entry_point"
        )
    return "", ""


_ended: list[Verdict] = []
"""The verdict of code that has ended or answered nonsense: a test may catch `CodeEnded`, and does not pass for it."""


def _number_of(value: Any) -> int:
    if not isinstance(value, RemoteObject):
        raise NotPlain(f"{type(value).__name__}, which is no plain value")
    return int(value._number)


def _asked(question: Any) -> Any:
    try:
        json_frames.send(CHANNEL, question)
        answer = json_frames.receive(CHANNEL)
        if "raised" not in answer:
            return from_json(answer["value"], RemoteObject)
        kind, text = str(answer["raised"]), str(answer["text"])
    except (OSError, EOFError):
        _ended.append(("ended", "it ended before it answered"))
        raise CodeEnded from None
    except Exception as error:
        _ended.append(("failed", f"its answer made no sense: {type(error).__name__}"))
        raise CodeEnded from None
    raise _exception(kind, text)


def _exception(kind: str, text: str) -> Exception:
    """The same exception, so that a test may expect it; never one that ends a test well."""
    known = getattr(builtins, kind, None)
    try:
        if isinstance(known, type) and issubclass(known, Exception) and known is not AssertionError:
            return known(text)
    except Exception:  # one that takes other arguments, such as UnicodeDecodeError
        pass
    return RuntimeError(f"{kind}: {text}")
