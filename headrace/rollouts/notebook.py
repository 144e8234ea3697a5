"""The notes of environments about rollouts in flight. A later process of the run gets them back, and goes on from them.

The session of a rollout writes what its environment keeps (`Agent.keep`) on the rollout's page. Checkpoints hold the notes, and the log of
passes those since. There they lie in one order with the sampled tokens, so that a note that is found follows every token that it builds
on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from headrace.rollout_key import RolloutKey


class Page:
    """The notes of one rollout."""

    def __init__(self, notes: list[bytes] | None = None, write: Callable[[bytes], None] | None = None) -> None:
        """`notes`: those so far; `write` makes a new one outlast this process."""
        self._notes = [] if notes is None else notes
        self._write = write

    @property
    def kept(self) -> tuple[bytes, ...]:
        return tuple(self._notes)

    def keep(self, note: bytes) -> None:
        if self._write:
            self._write(note)
        self._notes.append(note)


class Notebook:
    def __init__(self, adapter: str = "") -> None:
        """`adapter`: the one that the rollouts train; empty if all weights are trained."""
        self._adapter = adapter
        self._notes: dict[str, list[bytes]] = {}
        """The notes of each rollout, in order, by the key of its first turn."""
        self._write: Callable[[str, bytes], None] | None = None

    def listen(self, write: Callable[[str, bytes], None]) -> None:
        """`write` gets the name of the rollout and each new note, before the environment goes on."""
        self._write = write

    def page(self, ticket: int, rollout: int) -> Page:
        name = str(RolloutKey(ticket, rollout, adapter=self._adapter))

        def write(note: bytes) -> None:
            if self._write:
                self._write(name, note)

        return Page(self._notes.setdefault(name, []), write)

    def forget_group(self, ticket: int) -> None:
        """Forgets the notes of a group, when it has ended."""
        for name in [name for name in self._notes if _ticket(name) == ticket]:
            del self._notes[name]

    def state(self, tickets: Collection[int]) -> dict[str, tuple[bytes, ...]]:
        """Returns the notes of the groups with these tickets."""
        return {name: tuple(notes) for name, notes in self._notes.items() if notes and _ticket(name) in tickets}

    def restore(self, notes: Mapping[str, Collection[bytes]]) -> None:
        self._notes = {name: list(those) for name, those in notes.items()}


def _ticket(name: str) -> int:
    key = RolloutKey.read(name)
    assert key is not None, f"{name} names no rollout"
    return key.ticket
