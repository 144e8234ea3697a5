"""Plain values to JSON and back: all that passes between the code under test and the test.

A value is rebuilt from its contents alone: an object of the code's own class, with an equality of its own, cannot pass for a number or a
list. Anything else travels as a number that stands for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

MOST = 100_000
"""Elements of an iterator that are sent."""
DEPTH = 64
_EXACT = 1 << 62
"""JSON of a larger int would be slow, and Python limits its decimal digits."""
_DYNAMIC: Any = (Iterator, type({}.keys()), type({}.values()), type({}.items()))

Keep = Callable[[Any], int]
"""Keeps an object that is no plain value, and returns its number."""


class NotPlain(Exception):
    """Raised for a value that cannot be sent."""


def no_keep(value: Any) -> int:
    raise NotPlain(f"{type(value).__name__} is no plain value")


def as_json(value: Any, keep: Keep = no_keep, depth: int = 0) -> Any:
    """Returns the value as JSON knows it, read by the methods of the built-in types and not by those of its own class."""
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
    return _container(value, keep, depth + 1)


def _container(value: Any, keep: Keep, depth: int) -> Any:
    def each(elements: Any) -> list[Any]:
        return [as_json(one, keep, depth) for one in elements]

    match value:
        case list():
            return each(list.__iter__(value))
        case tuple():
            return {"tuple": each(tuple.__iter__(value))}
        case dict():
            return {"dict": [each(pair) for pair in dict.items(value)]}
        case set():
            return {"set": each(set.__iter__(value))}
        case frozenset():
            return {"frozenset": each(frozenset.__iter__(value))}
        case range():
            return {"range": each((value.start, value.stop, value.step))}
    if isinstance(value, _DYNAMIC):
        return {"iterator": each(itertools.islice(value, MOST))}
    return {"kept": keep(value)}


def from_json(sent: Any, kept: Callable[[int], Any]) -> Any:
    """Returns the value. `kept`: what stands for the object of a number. Raises for JSON that `as_json` does not write."""
    if isinstance(sent, list):
        return [from_json(one, kept) for one in sent]
    if not isinstance(sent, dict):
        return sent
    ((kind, body),) = sent.items()
    match kind:
        case "int":
            return int(body, 16)
        case "bytes":
            return bytes.fromhex(body)
        case "complex":
            return complex(*body)
        case "kept":
            return kept(int(body))
    elements = [from_json(one, kept) for one in body]
    made: dict[str, Callable[[list[Any]], Any]] = {
        "tuple": tuple, "set": set, "frozenset": frozenset, "iterator": iter, "dict": dict,
        "range": lambda given: range(*given),
    }  # fmt: skip
    return made[kind](elements)
