"""Calls as Gemma's models write them: `call:NAME{key:value,...}`, where a text stands between two marks and nothing in it is escaped.

FunctionGemma marks texts with `<escape>` (https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices), Gemma 4 with
`<|"|>` (https://ai.google.dev/gemma/docs/capabilities/text/function-calling-gemma4).
"""

from __future__ import annotations

import re
from typing import Any

_CALL = re.compile(r"call:\s*([^\s{}]+)\s*(\{.*\})", re.DOTALL)
_KEY = re.compile(r"\s*([^\s{}\[\],:]+)\s*:")
_PLAIN = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null|None")
_WORDS = {"true": True, "false": False, "null": None, "None": None}


def read_call(section: str, mark: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and the arguments. `mark`: the one around texts. Raises ValueError for what is no call."""
    found = _CALL.fullmatch(section.strip())
    if not found:
        raise ValueError("a call is call:NAME{key:value}")
    values = _Values(found[2], mark)
    try:
        arguments = values.mapping()
    except RecursionError:
        raise ValueError("the call is nested too deeply") from None
    if values.rest:
        raise ValueError(f"there is more behind the arguments: {values.rest[:40]!r}")
    return found[1], arguments


class _Values:
    """Reads values from the beginning of a text."""

    def __init__(self, text: str, mark: str) -> None:
        self._text, self._mark, self._at = text, mark, 0

    @property
    def rest(self) -> str:
        return self._text[self._at :]

    def mapping(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self._take("{")
        while not self._took("}"):
            if found:
                self._take(",")
            key = self._key()
            found[key] = self._value()
        return found

    def _list(self) -> list[Any]:
        found: list[Any] = []
        self._take("[")
        while not self._took("]"):
            if found:
                self._take(",")
            found.append(self._value())
        return found

    def _key(self) -> str:
        if self._began(self._mark):
            key = self._string()
            self._take(":")
            return key
        if not (found := _KEY.match(self._text, self._at)):
            raise ValueError(f"no key at {self.rest[:40]!r}")
        self._at = found.end()
        return found[1]

    def _value(self) -> Any:
        if self._began(self._mark):
            return self._string()
        if self._began("{"):
            return self.mapping()
        if self._began("["):
            return self._list()
        if not (found := _PLAIN.match(self._text, self._at)):
            raise ValueError(f"no value at {self.rest[:40]!r}; a text stands between two {self._mark}")
        self._at = found.end()
        if found[0] in _WORDS:
            return _WORDS[found[0]]
        return int(found[0]) if found[0].lstrip("-").isdigit() else float(found[0])

    def _string(self) -> str:
        self._take(self._mark)
        end = self._text.find(self._mark, self._at)
        if end < 0:
            raise ValueError(f"a text has no {self._mark} at its end")
        said, self._at = self._text[self._at : end], end + len(self._mark)
        return said

    def _began(self, with_: str) -> bool:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        return self._text.startswith(with_, self._at)

    def _took(self, what: str) -> bool:
        if there := self._began(what):
            self._at += len(what)
        return there

    def _take(self, what: str) -> None:
        if not self._took(what):
            raise ValueError(f"no {what!r} at {self.rest[:40]!r}")
