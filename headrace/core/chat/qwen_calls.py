"""Calls as Qwen3-Coder and the models after it write them: a tag for the function, and one for each argument, whose value is plain text
(https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct, its chat template). Nothing in a value is escaped or quoted, so that the tool's
schema alone says whether `12` is a number."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

ARGUMENT, ARGUMENT_ENDS = "<parameter=", "</parameter>"
"""The marks before and after an argument."""

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>\s*")
_ENDS = re.compile(r"</function>\s*")
_NAME = re.compile(r"<parameter=([^>\n]+)>")
_VALUE_ENDS = re.compile(r"</parameter>\s*(?=<parameter=|</function>)")
"""A value may hold the closing tag: it ends where another argument, or the end of the call, follows."""


def read_functions(section: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields name and arguments of each call. Raises ValueError for what is no call."""
    at = 0
    while at < len(section) or not at:
        if not (found := _FUNCTION.match(section, at)):
            raise ValueError(f"a call is <function=NAME>, and not {section[at:].strip()[:40]!r}")
        arguments, at = _arguments(section, found.end())
        yield found[1], arguments
        if not section[at:].strip():
            return


def _arguments(section: str, at: int) -> tuple[dict[str, str], int]:
    """Returns the arguments that begin there, and the place behind the end of their call."""
    arguments: dict[str, str] = {}
    while not (ended := _ENDS.match(section, at)):
        begun = _NAME.match(section, at)
        ends = _VALUE_ENDS.search(section, begun.end()) if begun else None
        if not begun or not ends:
            raise ValueError(f"an argument is <parameter=NAME>value</parameter>, and not {section[at:][:40]!r}")
        if begun[1] in arguments:
            raise ValueError(f"the argument {begun[1]} is given twice")
        value = section[begun.end() : ends.start()].removeprefix("\n").removesuffix("\n")  # the template's own
        arguments[begun[1]], at = value, ends.end()
    return arguments, ended.end()


def typed(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments with the types of a tool's schema. A text that is no value of its type stays a text: the tool answers it."""
    kinds = schema.get("properties")
    known = kinds if isinstance(kinds, Mapping) else {}
    return {name: _typed(value, _types(known.get(name), schema)) for name, value in arguments.items()}


def _types(one: Any, root: Mapping[str, Any], depth: int = 8) -> frozenset[str]:
    """The types that a schema allows; none if it does not say. `root`: the place of what it refers to."""
    if not isinstance(one, Mapping) or not depth:
        return frozenset()
    if isinstance(path := one.get("$ref"), str):
        found: Any = root
        for part in path.removeprefix("#/").split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        return _types(found, root, depth - 1)
    kind = one.get("type")
    named = (
        [kind]
        if isinstance(kind, str)
        else [name for name in kind if isinstance(name, str)]
        if isinstance(kind, list)
        else []
    )
    choices = [*one["enum"]] if isinstance(one.get("enum"), list) else [one["const"]] if "const" in one else []
    inner = [other for word in ("anyOf", "oneOf", "allOf") for other in one.get(word) or ()]
    below = [_types(other, root, depth - 1) for other in inner]
    return frozenset(named or map(_type_of, choices)).union(*below)


_TYPES = {
    "str": "string",
    "bool": "boolean",
    "int": "integer",
    "float": "number",
    "NoneType": "null",
    "dict": "object",
    "list": "array",
}
_WORDS = {"true": True, "false": False, "null": None, "none": None}
"""Templates write Python's words too."""


def _type_of(value: Any) -> str:
    return _TYPES.get(type(value).__name__, "string")


def _typed(value: Any, types: frozenset[str]) -> Any:
    if not isinstance(value, str) or not types:
        return value
    text = value.strip()
    read = _WORDS[text.lower()] if text.lower() in _WORDS else _decoded(text)
    found = _type_of(read)
    if found in types - {"string"} or (found == "integer" and "number" in types):
        # a text is allowed too: only what no text would be is no text
        return value if "string" in types and found != "null" else read
    if isinstance(read, float) and "integer" in types and read.is_integer():
        return int(read)
    return value


def _decoded(text: str) -> Any:
    """The value of JSON; the text itself for anything else."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return text


def _no_number(word: str) -> Any:
    raise ValueError(word)
