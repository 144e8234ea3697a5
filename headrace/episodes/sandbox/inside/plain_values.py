"""Plain values to JSON and back: all that passes between the code under test and the test.

A value is rebuilt from its contents alone: an object of the code's own class, with an equality of its own, cannot pass for a number or a
list. Anything else is left to each of the two processes, which sends what stands for it.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

from headrace.processes.frames import framed, read_frame

# --- Frames of JSON over file descriptors (`processes/frames.py`)
# Nothing is read ahead, since another process may read the next frame.


MOST = 16 << 20
"""Bytes of a frame."""
PIECE = 1 << 20
"""Bytes that room is made for at once: the other end may say a length and send nothing."""


def send(descriptor: int, frame: Any, most: int = MOST) -> None:
    """Raises OSError if nobody reads, and ValueError for a frame that is too long."""
    body = json.dumps(frame).encode()
    if len(body) > most:
        raise ValueError(f"a value of more than {most:,} bytes")
    rest = memoryview(framed(body))
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def receive(descriptor: int, most: int = MOST) -> Any:
    """Raises StreamEnded (an OSError) at the end, and ValueError for what is no frame."""
    return json.loads(read_frame(lambda count: os.read(descriptor, min(count, PIECE)), most))


# --- plain ------------------------------------------------------------


DEPTH = 64
_EXACT = 1 << 62
"""JSON of a larger int would be slow, and Python limits its decimal digits."""
_VALUES: dict[type, Callable[[Any], Any]] = {
    Decimal: lambda value: [str(value)],
    Fraction: lambda value: [value.numerator, value.denominator],
    date: lambda value: [value.year, value.month, value.day],
    time: lambda value: [value.hour, value.minute, value.second, value.microsecond],
    datetime: lambda value: [
        value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond,
    ],
    timedelta: lambda value: [value.days, value.seconds, value.microseconds],
    range: lambda value: [value.start, value.stop, value.step],
    slice: lambda value: [value.start, value.stop, value.step],
}  # fmt: skip
"""Values of the standard library that cannot change, and the arguments that make them anew."""
_NAMED_VALUES = {kind.__name__: kind for kind in _VALUES}
_DICTS: tuple[Any, ...] = (Counter, OrderedDict, defaultdict)
_VIEWS: dict[str, type] = {"keys": type({}.keys()), "values": type({}.values()), "items": type({}.items())}
_CHANGEABLE: tuple[Any, ...] = (list, dict, set, bytearray, deque)
_IN_JSON = {int, float, bool, str, type(None)}
_NUMERIC = "biufc"
"""Kinds of numpy's dtypes."""

Other = Callable[[Any], dict[str, Any]]
"""Returns JSON with one key for a value that is not plain. Raises NotPlain."""


class NotPlain(Exception):
    """Raised for a value that cannot be sent."""


class Given:
    """The containers in the arguments of a call: both processes number them alike, so that changes can be sent back."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._places: dict[int, int] = {}

    def add(self, container: Any) -> None:
        self._places[id(container)] = len(self.all)
        self.all.append(container)

    def place(self, container: Any) -> int | None:
        return self._places.get(id(container))


def nothing_else(value: Any) -> dict[str, Any]:
    raise NotPlain(f"{type(value).__name__}, which is not a plain value")


def as_json(
    value: Any, other: Other = nothing_else, depth: int = 0, given: Given | None = None, *, grow: bool = True
) -> Any:
    """Returns the value as JSON knows it, read by the methods of the built-in types and not by those of its own class. `given`: a container that
    is among them already is only named; others are added if `grow`."""
    if depth > DEPTH:
        raise NotPlain(f"a value nested more than {DEPTH} deep")
    match value:
        case None | True | False:
            return value
        case int():
            number = int.__add__(value, 0)
            return number if abs(number) < _EXACT else {"int": hex(number)}
        case float():
            return float.__add__(value, 0.0)
        case str():
            return str.__getitem__(value, slice(None))
        case bytes():
            return {"bytes": bytes.hex(value)}
        case complex():
            exact = complex.__add__(value, 0)
            return {"complex": [exact.real, exact.imag]}

    def each(elements: Any) -> list[Any]:
        found = list(elements)
        return found if _simple(found) else [as_json(element, other, depth + 1, given, grow=grow) for element in found]

    if given is not None and isinstance(value, _CHANGEABLE):
        if (place := given.place(value)) is not None:
            return {"given": place}
        if grow:
            given.add(value)
    if (sent := _container(value, each)) is not None:
        return sent
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.generic):
        return as_json(value.item(), other, depth + 1)
    if numpy and type(value) is numpy.ndarray and value.dtype.kind in _NUMERIC:
        return {"array": [value.dtype.str, each(value.tolist()) if value.ndim else each([value.item()])[0]]}
    return other(value)


def _simple(elements: list[Any]) -> bool:
    """Whether JSON knows all of them as they are: looked at once for all, since lists may be long."""
    kinds = set(map(type, elements))
    if not kinds <= _IN_JSON:
        return False
    return int not in kinds or all(-_EXACT < element < _EXACT for element in elements if type(element) is int)


def _container(value: Any, each: Callable[[Any], list[Any]]) -> Any:
    """Returns None for what is neither a container nor a value of the standard library."""
    match value:
        case list():
            return each(list.__iter__(value))
        case tuple():
            return _tuple(value, each)
        case dict():
            known = next((kind.__name__ for kind in _DICTS if type(value) is kind), "dict")
            return {known: [each(pair) for pair in dict.items(value)]}
        case set():
            return {"set": each(set.__iter__(value))}
        case frozenset():
            return {"frozenset": each(frozenset.__iter__(value))}
        case bytearray():
            return {"bytearray": bytes(value).hex()}
        case deque():
            return {"deque": [each(deque.__iter__(value)), value.maxlen]}
    if type(value) in _VALUES and getattr(value, "tzinfo", None) is None:
        return {type(value).__name__: each(_VALUES[type(value)](value))}
    for name, kind in _VIEWS.items():
        if type(value) is kind:
            return {name: each(value)}
    return None


def _tuple(value: Any, each: Callable[[Any], list[Any]]) -> Any:
    elements, fields = each(tuple.__iter__(value)), getattr(type(value), "_fields", None)
    if type(value) is tuple or not isinstance(fields, tuple) or len(fields) != len(elements):
        return {"tuple": elements}
    if not all(type(name) is str and name.isidentifier() and not name.startswith("_") for name in fields):
        return {"tuple": elements}
    return {"namedtuple": [str(type(value).__name__), list(fields), elements]}


def contents(container: Any, other: Other, given: Given) -> Any:
    """Returns what one of the given containers holds now, in which the others are only named."""
    sent = _container(
        container, lambda elements: [as_json(element, other, 1, given, grow=False) for element in elements]
    )
    assert sent is not None
    return sent


def refill(container: Any, new: Any) -> None:
    """Gives the container the elements of another of its kind."""
    match container:
        case list() | bytearray():
            container[:] = new
        case deque():
            container.clear()
            container.extend(new)
        case dict() | set():
            container.clear()
            container.update(new)


def from_json(sent: Any, other: Callable[[str, Any], Any], given: Given | None = None, *, grow: bool = True) -> Any:
    """Returns the value. `other`: what stands for a value that is not plain, by its key and what is behind it. `given`: containers that may be
    only named; others are added if `grow`. Raises for JSON that `as_json` does not write."""
    if not isinstance(sent, list | dict):
        return sent
    kind: str = "list" if isinstance(sent, list) else next(iter(sent))
    body: Any = sent if isinstance(sent, list) else sent[kind]

    def each(elements: Any) -> list[Any]:
        if set(map(type, elements)).isdisjoint((list, dict)):
            return list(elements)
        return [from_json(element, other, given, grow=grow) for element in elements]

    made = _changeable(kind, body)
    if made is not None:
        if given is not None and grow:
            given.add(made)  # before its elements, as it was written
        if kind in ("list", "set"):
            refill(made, each(body))
        elif kind == "deque":
            made.extend(each(body[0]))
        elif kind != "bytearray":
            dict.update(made, dict(map(each, body)))
        return made
    if kind == "given" and given is not None:
        return given.all[body]
    return _fixed(kind, body, each, other)


def _changeable(kind: str, body: Any) -> Any:
    match kind:
        case "list":
            return []
        case "set":
            return set()
        case "dict":
            return {}
        case "bytearray":
            return bytearray.fromhex(body)
        case "deque":
            return deque(maxlen=body[1])
    return next((made() for made in _DICTS if made.__name__ == kind), None)


def _fixed(kind: str, body: Any, each: Callable[[Any], list[Any]], other: Callable[[str, Any], Any]) -> Any:
    match kind:
        case "int":
            return int(body, 16)
        case "bytes":
            return bytes.fromhex(body)
        case "complex":
            return complex(*body)
        case "tuple":
            return tuple(each(body))
        case "frozenset":
            return frozenset(each(body))
        case "namedtuple":
            return namedtuple(body[0], body[1])(*each(body[2]))
        case "keys":
            return dict.fromkeys(each(body)).keys()
        case "values":
            return dict(enumerate(each(body))).values()
        case "items":
            return dict(each(body)).items()
        case "array":
            return _array(*body)
    if kind in _NAMED_VALUES:
        return _NAMED_VALUES[kind](*each(body))
    return other(kind, body)


def _array(kind: str, elements: Any) -> Any:
    import numpy

    dtype = numpy.dtype(kind)
    if dtype.kind not in _NUMERIC:
        raise ValueError(f"an array of {kind}")
    return numpy.array(from_json(elements, lambda *_: None), dtype)
