"""The process of the code answers the questions of a test (`remote_code.py`), one at a time."""

from __future__ import annotations

import asyncio
import builtins
import copy
import inspect
import math
import operator
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from headrace.episodes.sandbox.inside import plain_values
from headrace.episodes.sandbox.inside.confine import CHANNEL
from headrace.episodes.sandbox.inside.plain_values import Given, as_json, contents, from_json

_SLICE = 0.01
"""Seconds that coroutines run before the test is told that the one which it awaits has not ended."""
SAME_IN_BOTH = (
    int, float, complex, bool, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, object,
)  # fmt: skip
"""Types that travel by their names."""


def _entered(manager: Any, *, later: bool = False) -> Any:
    return type(manager).__aenter__(manager) if later else type(manager).__enter__(manager)


def _left(manager: Any, error: BaseException | None, *, later: bool = False) -> Any:
    kind, trace = (type(error), error.__traceback__) if error is not None else (None, None)
    return getattr(type(manager), "__aexit__" if later else "__exit__")(manager, kind, error, trace)


OPERATIONS: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(operator, name)
        for name in (
            "eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift",
            "and_", "or_", "xor", "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "ilshift", "irshift", "iand",
            "ior", "ixor", "neg", "pos", "invert", "contains", "getitem", "setitem", "delitem", "index",
        )
    },
    **{
        name: getattr(builtins, name)
        for name in (
            "abs", "len", "bool", "str", "repr", "hash", "int", "float", "complex", "bytes", "iter", "reversed", "dir", "format", "round",
            "divmod", "isinstance", "issubclass", "setattr", "delattr", "aiter", "anext",
        )
    },
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "enter": _entered,
    "exit": _left,
    "aenter": lambda manager: _entered(manager, later=True),
    "aexit": lambda manager, error: _left(manager, error, later=True),
}  # fmt: skip
"""All that a test may do with an object of the code, beside calling it and reading its attributes."""


class _TestEnded(BaseException):
    """Nobody asks any more."""


def _received() -> Any:
    try:
        return plain_values.receive(CHANNEL)
    except ConnectionError:
        raise _TestEnded from None


class TestFunction:
    """A function of the test, in the process of the code."""

    __test__ = False

    def __init__(self, answers: Answers, number: int, name: str, doc: str | None) -> None:
        self._answers, self._number = answers, number
        self.__name__ = self.__qualname__ = name
        self.__doc__ = doc

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._answers.ask_test(self._number, args, named)


class Answers:
    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._kept: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._functions: dict[int, TestFunction] = {}
        self._thrown: dict[int, int] = {}
        """The test's numbers of its exceptions, by the places of those that stand for them here."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[int, asyncio.Future[Any]] = {}

    def serve(self) -> None:
        """Answers until the test has ended."""
        try:
            while True:
                self._answer(_received())
        except _TestEnded:
            return

    def ask_test(self, number: int, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Calls a function of the test, and answers what it asks meanwhile."""
        plain_values.send(CHANNEL, {"callback": number, "args": self._json(list(args)), "named": self._json(named)})
        while "ask" in (reply := _received()):
            self._answer(reply)
        if "raised" in reply:
            raise self._value(reply["raised"])
        return self._value(reply["value"])

    def _answer(self, question: Any) -> None:
        try:
            answer = self._found(question)
        except _TestEnded:
            raise
        except BaseException as error:  # SystemExit too: it ends this call only
            answer = {"raised": self._error(error)}
        try:
            plain_values.send(CHANNEL, answer)
        except ValueError as error:  # too long
            plain_values.send(CHANNEL, {"raised": self._error(error)})

    def _found(self, question: Any) -> Any:
        match question:
            case {"ask": "name", "name": name}:
                if not hasattr(self._module, name):
                    raise NameError(f"the code defines no {name}")
                return {"value": self._json(getattr(self._module, name))}
            case {"ask": "attribute", "name": name, "of": place}:
                return {"value": self._json(getattr(self._kept[place], name))}
            case {"ask": "call", "of": place, "args": args, "named": named, "in_place": in_place}:
                return self._called(self._kept[place], args, named, in_place)
            case {"ask": "operation", "name": name, "args": args}:
                return {"value": self._json(OPERATIONS[name](*self._value(args)))}
            case {"ask": "next", "of": place, "most": most}:
                return self._elements(self._kept[place], most)
            case {"ask": "await", "of": place}:
                return self._awaited(place)
        raise ValueError("a test asks no such question")

    def _called(self, work: Any, args: Any, named: Any, in_place: bool) -> Any:
        """Answers with the containers of the arguments as they are now if the test looks at them: it does not look at the value, or there is
        none."""
        given = Given()
        found = work(*from_json(args, self._other_of, given), **from_json(named, self._other_of, given))
        answer = {"value": self._json(found)}
        if in_place or found is None:
            answer["given"] = [contents(container, self._other, given) for container in given.all]
        return answer

    def _elements(self, elements: Any, most: int) -> Any:
        found: list[Any] = []
        try:
            while len(found) < most:
                found.append(self._json(next(elements)))
        except BaseException as error:
            return {"value": found, "then": self._error(error)}
        return {"value": found}

    def _awaited(self, place: int) -> Any:
        """Answers the first question when there is a task, so that others which are awaited at once begin before it runs."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        if place not in self._tasks:
            self._tasks[place] = asyncio.ensure_future(self._kept[place], loop=self._loop)
            return {"pending": True}
        task = self._tasks[place]
        if not task.done():
            self._loop.run_until_complete(asyncio.wait({task}, timeout=_SLICE))
        return {"value": self._json(task.result())} if task.done() else {"pending": True}

    def _json(self, value: Any) -> Any:
        return as_json(value, self._other)

    def _value(self, sent: Any) -> Any:
        return from_json(sent, self._other_of)

    def _keep(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._kept)
            self._kept.append(value)
        return self._numbers[id(value)]

    def _other(self, value: Any) -> dict[str, Any]:
        if isinstance(value, TestFunction):
            return {"mine": value._number}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"class": self._class(value)}
        if isinstance(value, BaseException):
            return {"error": self._error(value)}
        if any(value is function for function in SAME_IN_BOTH):
            return {"builtin": value.__name__}
        kind = "coroutine" if inspect.iscoroutine(value) else "iterator" if isinstance(value, Iterator) else "kept"
        return {kind: self._keep(value)}

    def _other_of(self, kind: str, body: Any) -> Any:
        match kind:
            case "kept":
                return self._kept[body]
            case "builtin":
                return getattr(builtins, body)
            case "iterator":
                return iter(self._value(body))
            case "mine":
                number, name, doc = body
                return self._functions.setdefault(number, TestFunction(self, number, name, doc))
            case "thrown":
                return self._throw(*body)
        raise ValueError(f"a test sends no {kind}")

    def _throw(self, number: int, name: str, args: Any) -> BaseException:
        known: Any = getattr(builtins, name, None)
        try:
            error: BaseException = known(*self._value(args))
        except Exception:
            error = Exception(name)
        self._thrown[self._keep(error)] = number
        return error

    def _error(self, error: BaseException) -> Any:
        place = self._keep(error)
        if place in self._thrown:
            return {"mine": self._thrown[place]}
        try:
            args, text = self._json(list(error.args)), str(error)[:500]
        except Exception:
            args, text = [], ""
        return {"class": self._class(type(error)), "number": place, "args": args, "text": text}

    def _class(self, kind: type) -> Any:
        if getattr(builtins, kind.__name__, None) is kind:
            return {"builtin": kind.__name__}
        bases = [self._class(base) for base in kind.__bases__ if issubclass(base, BaseException)]
        return {"number": self._keep(kind), "name": kind.__name__, "module": kind.__module__, "bases": bases}
