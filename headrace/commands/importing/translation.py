"""The result of a library's rules for its config: settings, what has no counterpart, and what is left to be filled in."""

from __future__ import annotations

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
        """Returns the value of the first of these names that is given and not null. A value that is not known is noted in `unknown`."""
        self._read |= {name for name in names if name in self.given}
        for name in names:
            found = self.given.get(name)
            if found is UNKNOWN:
                self.unknown += [name] if name not in self.unknown else []
            elif found is not None:
                return found
        return default

    def number(self, *names: str, default: float) -> Any:
        """Returns the value of `value` if it is a number. Any other one is noted in `unknown`."""
        found = self.value(*names, default=default)
        if isinstance(found, int | float) and not isinstance(found, bool):
            return found
        self.unknown += [name for name in names if self.given.get(name) is not None and name not in self.unknown]
        return default

    def put(self, setting: str, value: Any, note: str = "") -> None:
        """Sets one of ours; nothing for None."""
        if value is not None:
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
