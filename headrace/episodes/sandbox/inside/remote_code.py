"""The code as its test sees it: objects, exceptions and coroutines that stand for those in the process of the code.

What is done with one of them happens there (`answering.py`), and plain values come back. A comparison is different: whoever answers it has
been told what is expected. The code is asked all the same, since a test fails where even the code says no; but with its own word for it no
test passes (`RemoteCode.own_word`).
"""

from __future__ import annotations

import builtins
import itertools
import operator
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, NoReturn

from headrace.episodes.sandbox.inside import plain_values
from headrace.episodes.sandbox.inside.answering import SAME_IN_BOTH
from headrace.episodes.sandbox.inside.confine import CHANNEL
from headrace.episodes.sandbox.inside.plain_values import Given, NotPlain, as_json, from_json, refill

TEST = "test.py"
"""The file name in its tracebacks."""
MOST = 100_000
"""Elements of an iterator that a test passes to the code."""
_SINGLY = 256
"""Elements of an iterator of the code that are asked for one by one; a quarter of as many as were taken are asked for at once thereafter, since a
later one may take very long."""
_AT_ONCE = 4096
_WAIT = 1.0
"""Seconds that a thread of the test waits while another one has a question."""
_VERDICTS = ("startswith", "endswith", "issubset", "issuperset", "isdisjoint")
"""Methods of built-in types that answer whether something is as expected."""
_FROM = (
    "asyncio", "binascii", "configparser", "copy", "csv", "dataclasses", "decimal", "json", "numpy", "pickle", "queue", "re", "sqlite3",
    "statistics", "string", "struct", "xml", "zipfile", "zlib", "zoneinfo",
)  # fmt: skip
"""Modules whose exceptions arrive as themselves. Others could mean something to what runs the test, as `unittest.SkipTest`."""


class RemoteObject:
    __slots__ = ("__code", "__number")

    def __init__(self, code: RemoteCode, number: int) -> None:
        object.__setattr__(self, "_RemoteObject__code", code)
        object.__setattr__(self, "_RemoteObject__number", number)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.__code.call(self.__number, args, named)

    def __getattr__(self, name: str) -> Any:
        found = self.__code.ask({"ask": "attribute", "name": name, "of": self.__number})
        if name in _VERDICTS and isinstance(found, RemoteObject):
            return _Doubted(self.__code, number_of(found), name)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        self.__code.operate("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self.__code.operate("delattr", self, name)

    def __contains__(self, item: Any) -> Any:
        self.__code.doubt("in", item)
        return self.__code.operate("contains", self, item)

    def __getitem__(self, key: Any) -> Any:
        return self.__code.operate("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__code.operate("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self.__code.operate("delitem", self, key)

    def __format__(self, spec: str) -> Any:
        return self.__code.operate("format", self, spec)

    def __round__(self, *digits: Any) -> Any:
        return self.__code.operate("round", self, *digits)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__code.operate("deepcopy", self)

    def __instancecheck__(self, value: Any) -> Any:
        try:
            return self.__code.operate_if_plain("isinstance", value, self)
        except NotPlain:  # an object of the test
            return False

    def __subclasscheck__(self, kind: Any) -> Any:
        try:
            return self.__code.operate_if_plain("issubclass", kind, self)
        except NotPlain:
            return False

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        caught = self.__code.operate("exit", self, error)
        if caught and error is not None:
            self.__code.swallowed(error)
        return caught

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> Any:
        caught = await self.__code.operate("aexit", self, error)
        if caught and error is not None:
            self.__code.swallowed(error)
        return caught

    async def __anext__(self) -> Any:
        try:
            return await self.__code.operate("anext", self)
        except STAND_INS["StopAsyncIteration"]:
            raise StopAsyncIteration from None

    def __await__(self) -> Generator[None, None, Any]:
        while True:
            done, value = self.__code.awaited(self.__number)
            if done:
                return value
            yield


def _unary(name: str) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        return code_of(self).operate(name, self)

    return method


def _binary(name: str, *, swapped: bool = False) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        code = code_of(self)
        if not isinstance(other, RemoteObject) and not (
            swapped and name == "add" and type(other) is int and other == 0  # sum() begins with it
        ):
            code.doubt(name, other)
        return code.operate(name, *((other, self) if swapped else (self, other)))

    return method


def _comparison(name: str) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if other is None and name in ("eq", "ne"):
            return name == "ne"
        code = code_of(self)
        try:
            found = code.operate_if_plain(name, self, other)
        except NotPlain:  # an object of the test, which may know better
            return NotImplemented
        code.doubt(name, other)
        return found

    return method


_UNARY = (
    "neg", "pos", "invert", "abs", "len", "bool", "str", "repr", "hash", "int", "float", "complex", "bytes", "index", "iter", "reversed",
    "trunc", "floor", "ceil", "dir", "copy", "enter", "aenter", "aiter",
)  # fmt: skip
_BINARY = (
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "lshift",
    "rshift",
    "and_",
    "or_",
    "xor",
    "divmod",
)
for _name in _UNARY:
    setattr(RemoteObject, f"__{_name}__", _unary(_name))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(RemoteObject, f"__{_name}__", _comparison(_name))
for _name in _BINARY:
    _plain = _name.rstrip("_")
    setattr(RemoteObject, f"__{_plain}__", _binary(_name))
    setattr(RemoteObject, f"__r{_plain}__", _binary(_name, swapped=True))
    if hasattr(operator, f"i{_plain}"):
        setattr(RemoteObject, f"__i{_plain}__", _binary(f"i{_plain}"))


class InPlace:
    """A function of the code whose value the test does not use: it looks at what the arguments have become."""

    def __init__(self, work: RemoteObject) -> None:
        self._work = work

    def __call__(self, *args: Any, **named: Any) -> Any:
        return code_of(self._work).call(number_of(self._work), args, named, in_place=True)


class _Doubted(RemoteObject):
    """One of `_VERDICTS`."""

    __slots__ = ("__name",)

    def __init__(self, code: RemoteCode, number: int, name: str) -> None:
        super().__init__(code, number)
        object.__setattr__(self, "_Doubted__name", name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        code_of(self).doubt(self.__name, args)
        return super().__call__(*args, **named)


class RemoteIterator(RemoteObject):
    """An iterator of the code. What it has is compared here."""

    __slots__ = ("__ahead", "__ended", "__taken")

    def __init__(self, code: RemoteCode, number: int) -> None:
        super().__init__(code, number)
        for name, value in (("ahead", deque()), ("ended", None), ("taken", 0)):
            object.__setattr__(self, f"_RemoteIterator__{name}", value)

    def __iter__(self) -> RemoteIterator:
        return self

    def __next__(self) -> Any:
        if not self.__ahead and self.__ended is None:
            most = 1 if self.__taken < _SINGLY else min(self.__taken // 4, _AT_ONCE)
            found, after = code_of(self).elements(number_of(self), most)
            self.__ahead.extend(found)
            object.__setattr__(self, "_RemoteIterator__taken", self.__taken + len(found))
            object.__setattr__(self, "_RemoteIterator__ended", after)
        if self.__ahead:
            return self.__ahead.popleft()
        ended = self.__ended
        object.__setattr__(self, "_RemoteIterator__ended", None)
        if isinstance(ended, STAND_INS["StopIteration"]):
            raise StopIteration(*ended.args)
        raise ended or StopIteration

    def __contains__(self, item: Any) -> bool:
        return any(element is item or element == item for element in self)


class RemoteCoroutine(RemoteObject):
    """A coroutine of the code, for asyncio: with the methods of one."""

    __slots__ = ("__steps",)

    def __init__(self, code: RemoteCode, number: int) -> None:
        super().__init__(code, number)
        object.__setattr__(self, "_RemoteCoroutine__steps", self.__await__())

    def send(self, value: Any) -> Any:
        return self.__steps.send(value)

    def throw(self, *error: Any) -> Any:
        return self.__steps.throw(*error)

    def close(self) -> None:
        self.__steps.close()


def code_of(value: RemoteObject) -> RemoteCode:
    return object.__getattribute__(value, "_RemoteObject__code")


def number_of(value: RemoteObject) -> int:
    return object.__getattribute__(value, "_RemoteObject__number")


class RemoteClass(type):
    """The class of an exception of the code, which a test may name in `except`. An instance is made by the code."""

    def __call__(cls, *args: Any, **named: Any) -> Any:
        known = _CLASSES.get(cls)
        return known[0].call(known[1], args, named) if known else super().__call__(*args, **named)

    def __getattr__(cls, name: str) -> Any:
        if not (known := _CLASSES.get(cls)):
            raise AttributeError(name)
        return known[0].ask({"ask": "attribute", "name": name, "of": known[1]})


_CLASSES: dict[type, tuple[RemoteCode, int]] = {}
_ERRORS: dict[int, tuple[BaseException, RemoteCode, int, str]] = {}
"""Exceptions of the code by their places here, with their numbers there and their texts."""


def _attribute(error: BaseException, name: str) -> Any:
    if id(error) not in _ERRORS:
        raise AttributeError(name)
    _, code, number, _ = _ERRORS[id(error)]
    return code.ask({"ask": "attribute", "name": name, "of": number})


def _text(error: BaseException) -> str:
    return _ERRORS[id(error)][3] if id(error) in _ERRORS else BaseException.__str__(error)


def _new_class(name: str, bases: tuple[type, ...]) -> type:
    return RemoteClass(name, bases, {"__getattr__": _attribute, "__str__": _text, "__module__": "__main__"})


STAND_INS: dict[str, Any] = {
    name: _new_class(name, (base,))
    for name, base in {
        "StopIteration": Exception,
        "StopAsyncIteration": Exception,
        "GeneratorExit": BaseException,
        "KeyboardInterrupt": BaseException,
        "SystemExit": BaseException,
        "CancelledError": BaseException,
    }.items()
}
"""Classes for exceptions that end a loop, a task or a process well: in place of them, an exception of the code ends the test."""


class TestLines(NamedTuple):
    """Lines of a test."""

    asserts: set[int]
    """All lines of assert statements, and of unittest's methods."""
    raises: set[int]
    blocks: list[range]
    """Lines of each `with`."""


def _lines(error: BaseException) -> set[int]:
    """The lines of the test on the way to where it was raised."""
    found, trace = set(), error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == TEST:
            found.add(trace.tb_lineno)
        trace = trace.tb_next
    return found


class RemoteCode:
    def __init__(self, end: Callable[[str, str], NoReturn], lines: TestLines) -> None:
        """`end`: ends this process with a verdict."""
        self._end = end
        self._lines = lines
        self._one = threading.RLock()
        self._mine: list[Any] = []
        self._places: dict[int, int] = {}
        self._kinds: dict[int, type] = {}
        self.own_word = ""
        """Something that only the code has said, and for which no test can take its word; empty if there was nothing."""
        self.raised = False
        """Whether the code has raised an exception."""
        self.assertion = ""
        """One that failed where the code may have caught it: in a function that the test passed to it, or in its context manager."""

    def ask(self, question: dict[str, Any]) -> Any:
        return self._read(self._value, self._answer(question)["value"])

    def call(self, number: int, args: tuple[Any, ...], named: dict[str, Any], *, in_place: bool = False) -> Any:
        given = Given()
        sent = {"args": self._sent(list(args), given), "named": self._sent(named, given)}
        answer = self._answer({"ask": "call", "of": number, "in_place": in_place, **sent})
        changed = [self._read(self._value, contents, given) for contents in answer.get("given", ())]
        for container, new in zip(given.all, changed, strict=False):
            refill(container, new)
        return self._read(self._value, answer["value"])

    def operate(self, name: str, *args: Any) -> Any:
        return self.ask({"ask": "operation", "name": name, "args": self._sent(list(args))})

    def operate_if_plain(self, name: str, *args: Any) -> Any:
        """Raises NotPlain if an argument cannot be sent."""
        return self.ask({"ask": "operation", "name": name, "args": as_json(list(args), self._other)})

    def doubt(self, name: str, other: Any) -> None:
        self.own_word = self.own_word or f"how an object of its own and {other!r:.60} compare ({name})"

    def swallowed(self, error: BaseException) -> None:
        """The code may have caught the exception: its context manager, and the test goes on behind its block, or what called a function of the
        test."""
        lines = _lines(error)
        left_out = any(
            lines & set(range(line)) & set(block)
            for block in self._lines.blocks
            for line in self._lines.asserts & set(block)
        )
        meant = raised_by_code(error) or bool(lines & self._lines.raises)
        if not self._failed(error) and (left_out or not meant):
            self.own_word = self.own_word or f"that {type(error).__name__} may be caught"

    def _failed(self, error: BaseException) -> bool:
        """Notes that an assertion has failed, if it was one."""
        own = isinstance(error, AssertionError) and not raised_by_code(error)
        if not own and not _lines(error) & self._lines.asserts:
            return False
        self.assertion = self.assertion or str(error) or "an assertion that the code caught"
        return True

    def elements(self, number: int, most: int) -> tuple[list[Any], BaseException | None]:
        """Returns the next elements of an iterator, and what it raised if there are fewer."""
        answer = self._answer({"ask": "next", "of": number, "most": most})
        then = answer.get("then")
        return self._read(self._value, answer["value"]), None if then is None else self._read(self._error, then)

    def awaited(self, number: int) -> tuple[bool, Any]:
        """Returns whether the coroutine has ended, and its value."""
        answer = self._answer({"ask": "await", "of": number})
        return "pending" not in answer, self._read(self._value, answer.get("value"))

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer, or raises the exception of the code. Calls functions of the test that the code calls meanwhile."""
        if not self._one.acquire(timeout=_WAIT):
            self._end("unsupported", "the test calls the code from a thread while another call has not ended")
        try:
            answer = self._exchanged(question)
            while "callback" in answer:
                answer = self._exchanged(self._called_back(answer))
        finally:
            self._one.release()
        if "raised" in answer:
            raise self._read(self._error, answer["raised"])
        return answer

    def _exchanged(self, sent: dict[str, Any]) -> dict[str, Any]:
        try:
            plain_values.send(CHANNEL, sent)
        except ValueError as error:
            self._end("unsupported", f"the test passes {error}")
        except OSError:
            self._end("ended", "it ended before it answered")
        try:
            answer = plain_values.receive(CHANNEL)
        except OSError:
            self._end("ended", "it ended before it answered")
        except Exception as error:
            self._made_no_sense(error)
        if not isinstance(answer, dict) or not answer.keys() & {"value", "raised", "callback", "pending"}:
            self._made_no_sense(TypeError())
        return answer

    def _called_back(self, call: dict[str, Any]) -> dict[str, Any]:
        work = self._read(self._mine.__getitem__, call["callback"])
        args, named = self._read(self._value, call.get("args")), self._read(self._value, call.get("named"))
        try:
            return {"value": self._sent(work(*args, **named))}
        except BaseException as error:
            self.swallowed(error)  # perhaps
            return {"raised": self._sent(error)}

    def _read(self, read: Callable[..., Any], *sent: Any) -> Any:
        try:
            return read(*sent)
        except Exception as error:
            self._made_no_sense(error)

    def _made_no_sense(self, error: Exception) -> NoReturn:
        self._end("failed", f"its answer made no sense: {type(error).__name__}")

    def _sent(self, value: Any, given: Given | None = None) -> Any:
        try:
            return as_json(value, self._other, given=given)
        except NotPlain as error:
            self._end("unsupported", f"the test passes {error}")

    def _other(self, value: Any) -> dict[str, Any]:
        if isinstance(value, RemoteObject):
            return {"kept": number_of(value)}
        if isinstance(value, type) and value in _CLASSES:
            return {"kept": _CLASSES[value][1]}
        if isinstance(value, BaseException):
            return self._thrown(value)
        name = getattr(value, "__name__", None)
        if isinstance(name, str) and getattr(builtins, name, None) is value:
            return {"builtin": name}
        if isinstance(value, Iterator):
            elements = list(itertools.islice(value, MOST + 1))
            if len(elements) > MOST:
                raise NotPlain(f"an iterator of more than {MOST:,} elements")
            return {"iterator": as_json(elements, self._other)}
        if callable(value):
            doc = getattr(value, "__doc__", None)
            return {
                "mine": [self._place(value), str(name or type(value).__name__), doc if isinstance(doc, str) else None]
            }
        raise NotPlain(f"{type(value).__name__}, which is not a plain value")

    def _place(self, value: Any) -> int:
        if id(value) not in self._places:
            self._places[id(value)] = len(self._mine)
            self._mine.append(value)
        return self._places[id(value)]

    def _thrown(self, error: BaseException) -> dict[str, Any]:
        if id(error) in _ERRORS:
            return {"kept": _ERRORS[id(error)][2]}
        known = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
        try:
            args = as_json(list(error.args), self._other)
        except NotPlain:
            args = []
        return {"thrown": [self._place(error), known.__name__, args]}

    def _value(self, sent: Any, given: Given | None = None) -> Any:
        return from_json(sent, self._other_of, given, grow=False)

    def _other_of(self, kind: str, body: Any) -> Any:
        match kind:
            case "kept":
                return RemoteObject(self, int(body))
            case "iterator":
                return RemoteIterator(self, int(body))
            case "coroutine":
                return RemoteCoroutine(self, int(body))
            case "mine":
                return self._mine[body]
            case "class":
                return self._class(body)
            case "error":
                return self._error(body)
            case "builtin":
                return next(function for function in SAME_IN_BOTH if function.__name__ == body)
        raise ValueError(f"the code sends no {kind}")

    def _class(self, sent: dict[str, Any]) -> type:
        if "builtin" in sent:
            name = sent["builtin"]
            kind: type = STAND_INS.get(name) or getattr(builtins, name)
            if not issubclass(kind, BaseException):
                raise TypeError(name)
            return kind
        number, name, module = int(sent["number"]), str(sent["name"]), str(sent["module"])
        if number not in self._kinds:
            self._kinds[number] = self._own_class(name, module, sent["bases"])
            if isinstance(self._kinds[number], RemoteClass):
                _CLASSES.setdefault(self._kinds[number], (self, number))
        return self._kinds[number]

    def _own_class(self, name: str, module: str, bases: Any) -> type:
        if module.startswith("asyncio") and name in STAND_INS:
            return STAND_INS[name]
        known = getattr(sys.modules.get(module), name, None) if module.partition(".")[0] in _FROM else None
        if isinstance(known, type) and issubclass(known, BaseException):
            return _new_class(name, (known,))
        try:
            return _new_class(name, tuple(self._class(base) for base in bases))
        except TypeError:  # bases of the code that do not fit together here
            return _new_class(name, (Exception,))

    def _error(self, sent: dict[str, Any]) -> BaseException:
        if "mine" in sent:
            mine = self._mine[sent["mine"]]
            if not isinstance(mine, BaseException):
                raise TypeError
            return mine
        kind: Any = self._class(sent["class"])
        args = self._value(sent["args"])
        try:
            own = isinstance(kind, RemoteClass)  # which would be made by the code
            error: BaseException = BaseException.__new__(kind, *args) if own else kind(*args)
        except Exception:
            error = kind.__new__(kind)
            error.args = tuple(args)
        self.raised = True
        _ERRORS[id(error)] = (error, self, int(sent["number"]), str(sent["text"]))
        return error


def raised_by_code(error: BaseException) -> bool:
    return id(error) in _ERRORS
