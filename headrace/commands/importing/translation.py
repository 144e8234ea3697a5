"""The result of a library's rules for its config: settings, what has no counterpart, and what is left to be filled in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.commands.importing.given import UNKNOWN


class Library(NamedTuple):
    """Another library whose configs are read."""

    name: str
    is_of: Callable[[Mapping[str, Any]], bool]
    """Whether these settings are one's of it."""
    translate: Callable[[Translation], None]


@dataclass(kw_only=True)
class Translation:
    given: Mapping[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    """Our settings, by name."""
    notes: dict[str, str] = field(default_factory=dict)
    """Comments on our settings, by name."""
    to_do: dict[str, str] = field(default_factory=dict)
    """Settings that nobody but the user can give, with what they should say."""
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Names that have no counterpart, by the reason."""
    files: dict[str, str] = field(default_factory=dict)
    """Texts of files beside the config, by name."""
    also: list[str] = field(default_factory=list)
    """Sentences on what else is to be done, where no setting of ours is concerned."""
    unknown: list[str] = field(default_factory=list)
    """Names whose values are worked out where the other library runs. What would follow from them has a default."""
    _read: set[str] = field(default_factory=set)

    def value(self, *names: str, default: Any = None) -> Any:
        """Returns the value of the first of these names that is given and not null. A value that is not known is noted in `unknown`, and in
        `also` that other names say otherwise."""
        self._read |= {name for name in names if name in self.given}
        self._note(name for name in names if self.given.get(name) is UNKNOWN)
        told = {name: value for name in names if (value := self.given.get(name)) is not None and value is not UNKNOWN}
        if not told:
            return default
        first, *others = told
        if differing := [name for name in others if told[name] != told[first]]:
            more = f"{first} is {told[first]}, but {' and '.join(f'{name} is {told[name]}' for name in differing)}: "
            self.also += [more + "the first is translated"] if more + "the first is translated" not in self.also else []
        return told[first]

    def _note(self, names: Iterable[str]) -> None:
        self.unknown += [name for name in dict.fromkeys(names) if name not in self.unknown]

    def number(self, *names: str, default: float) -> Any:
        """Returns the value of `value` if it is a finite number. Any other one is noted in `unknown`."""
        found = self.value(*names, default=default)
        if isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found):
            return found
        self._note(name for name in names if self.given.get(name) is not None)
        return default

    def word(self, *names: str, default: str) -> str:
        """Returns the value of `value` if it is a text. Any other one is noted in `unknown`."""
        found = self.value(*names, default=default)
        if isinstance(found, str):
            return found
        self._note(name for name in names if self.given.get(name) is not None)
        return default

    def tables(self, *names: str) -> list[Mapping[str, Any]]:
        """Returns the value of `value` if it is a list of tables. Any other one is noted in `unknown`."""
        found = self.value(*names, default=[])
        if isinstance(found, list) and all(isinstance(one, Mapping) for one in found):
            return found
        self._note(name for name in names if self.given.get(name) is not None)
        return []

    def put(self, setting: str, value: Any, note: str = "") -> None:
        """Sets one of ours; nothing for None. A value that no config can hold is left to do."""
        if value is not None and not _is_writable(value):
            self.to_do[setting] = f"{value!r} was given, which is not a value of a setting"
        elif value is not None:
            self.settings[setting] = value
            if note:
                self.notes[setting] = " ".join(note.split())  # a line of the file, whatever values it names

    def take(self, setting: str, *names: str, note: str = "") -> None:
        """Sets one of ours to the value of the first of these names that is given."""
        self.put(setting, self.value(*names), note)

    def leave(self, reason: str, *names: str) -> None:
        """Says why these names have no counterpart, as far as they are given."""
        there = [name for name in names if name in self.given]
        self._read |= set(there)
        self.left_out.setdefault(reason, []).extend(there)

    def leave_all(self, reason: str, beginnings: Iterable[str]) -> None:
        """Says the same of all names that begin so and that no rule has read."""
        begin = tuple(beginnings)
        self.leave(reason, *(name for name in self.unread if name.startswith(begin)))

    def same(self, reason: str, values: Mapping[str, Any]) -> None:
        """Leaves the names out whose values are these. With another value a name stays unread, which is told."""
        self.leave(reason, *(name for name, value in values.items() if self.given.get(name) == value))

    @property
    def unread(self) -> list[str]:
        """The names that no rule has read and that say something."""
        return [name for name, value in self.given.items() if name not in self._read and value not in (None, {}, [])]


def _is_writable(value: Any) -> bool:
    """Whether TOML has this value and the settings take it: no null within a list, no number that is none, no half of a character."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_writable(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_writable, value))
    if isinstance(value, str):
        return value.isascii() or value.encode(errors="replace").decode() == value
    return isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))
