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

    def put(self, setting: str, value: Any, note: str = "") -> None:
        """Sets one of ours; nothing for None."""
        if value is not None:
            self.settings[setting] = value
            if note:
                self.notes[setting] = note

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

    @property
    def unread(self) -> list[str]:
        return [name for name in self.given if name not in self._read]
