"""The notes of environments about rollouts in flight. A later process of the run gets them back, and goes on from them.

The session of a rollout writes what its environment keeps (`Agent.keep`) on the rollout's page. Checkpoints hold the notes, and the log of
passes those since. There they lie in one order with the sampled tokens, so that a note that is found follows every token that it builds
on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from headrace.core.types import RolloutKey, Struct


class Note(Struct, frozen=True, array_like=True):
    turns: int
    """The number of turns that were asked for before it."""
    content: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Note).decode


class Page:
    """The notes of one rollout."""

    def __init__(
        self,
        stored: list[bytes] | None = None,
        write: Callable[[bytes], None] | None = None,
        before: Sequence[Note] = (),
    ) -> None:
        """`stored`: the notes so far; `write` makes a new one outlast this process; `before`: the notes of another rollout, behind which
        this one branches."""
        self._stored = [] if stored is None else stored
        self._write, self._before = write, tuple(before)

    @property
    def notes(self) -> tuple[Note, ...]:
        return (*self._before, *map(_decode, self._stored))

    def keep(self, note: Note) -> None:
        data = _encode(note)
        if self._write:
            self._write(data)
        self._stored.append(data)

    def until(self, turn: int) -> tuple[Note, ...]:
        """Returns the notes that were there when turn number `turn` was asked for."""
        return tuple(note for note in self.notes if note.turns <= turn)


class Notebook:
    def __init__(self, adapter: str = "") -> None:
        """`adapter`: the one that the rollouts train; empty if all weights are trained."""
        self._adapter = adapter
        self._notes: defaultdict[int, dict[str, list[bytes]]] = defaultdict(dict)
        """The notes of each rollout, in order, by ticket and by the key of its first turn: thousands of rollouts are in flight in a large
        run, and a group that ends must not cost a look at all of them."""
        self._write: Callable[[str, bytes], None] | None = None

    def listen(self, write: Callable[[str, bytes], None]) -> None:
        """`write` gets the name of the rollout and each new note, before the environment goes on."""
        self._write = write

    def page(self, ticket: int, rollout: int, before: Sequence[Note] = ()) -> Page:
        name = str(RolloutKey(ticket, rollout, adapter=self._adapter))

        def write(note: bytes) -> None:
            if self._write:
                self._write(name, note)

        return Page(self._notes[ticket].setdefault(name, []), write, before)

    def forget_group(self, ticket: int) -> None:
        """Forgets the notes of a group, when it has ended."""
        self._notes.pop(ticket, None)

    def state(self, tickets: Collection[int]) -> dict[str, tuple[bytes, ...]]:
        """Returns the notes of the groups with these tickets."""
        groups = [self._notes[ticket] for ticket in tickets if ticket in self._notes]
        return {name: tuple(notes) for group in groups for name, notes in group.items() if notes}

    def restore(self, notes: Mapping[str, Collection[bytes]]) -> None:
        self._notes.clear()
        for name, those in notes.items():
            self._notes[_ticket(name)][name] = list(those)


def _ticket(name: str) -> int:
    key = RolloutKey.read(name)
    assert key is not None, f"{name} names no rollout"
    return key.ticket
