"""One queue as a value: which letters are in it, and who holds them. It knows no clock and no disk; `memory_bus.py` and `jsonl.py` use it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from headrace.run.hosts.bus.bus_port import Letter


class Held(NamedTuple):
    who: str
    since: float
    """The time at which this process last heard from the holder, on its own clock: the clocks of several machines are never compared."""


class LetterBox:
    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._letters: dict[str, Letter] = {}
        """Ordered as they were posted."""
        self._holders: dict[str, Held] = {}

    def post(self, letter: Letter) -> None:
        """A letter whose id is known is the same letter."""
        self._letters.setdefault(letter.id, letter)

    def free(self, who: str, most: int, now: float, given: Collection[str]) -> list[Letter]:
        """Returns the letters that `who` may claim. `given`: the ids of those that this process of `who` has claimed before."""
        found = (letter for letter in self._letters.values() if self._is_free(letter.id, who, now, given))
        return [letter for letter, _ in zip(found, range(most), strict=False)]

    def hold(self, ids: Collection[str], who: str, now: float) -> None:
        for one in ids:
            if one in self._letters:
                self._holders[one] = Held(who, now)

    def kept(self, ids: Collection[str], who: str) -> list[str]:
        """Those of `ids` that `who` still holds."""
        return [one for one in ids if (held := self._holders.get(one)) and held.who == who]

    def settle(self, ids: Collection[str]) -> None:
        for one in ids:
            self._letters.pop(one, None)
            self._holders.pop(one, None)

    @property
    def keys(self) -> set[str]:
        return {letter.key for letter in self._letters.values()}

    @property
    def letters(self) -> Iterator[tuple[Letter, str]]:
        """Every letter with its holder, who is empty if nobody holds it."""
        for letter in self._letters.values():
            held = self._holders.get(letter.id)
            yield letter, held.who if held else ""

    def _is_free(self, letter_id: str, who: str, now: float, given: Collection[str]) -> bool:
        held = self._holders.get(letter_id)
        if held is None or now - held.since >= self._lease:
            return True
        return held.who == who and letter_id not in given
