"""Prompts on their way into the cache, and those computed lately.

A prompt is computed once, in chunks, in a cache row of its own, and then copied to the row of every request that shares it.
It stays there for requests that come later, until room is needed or the weights change: an entry is looked up by tokens and
version, so a new request never gets keys and values of older weights. (One whose prompt straddles a swap keeps what it has,
as every running sequence does, and its version span says so.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from headrace.engine.native.attention import Chunk
from headrace.engine.native.sequences import Sequence


@dataclass(eq=False)
class Entry:
    tokens: tuple[int, ...]
    row: int
    """Of the cache."""
    done: int = 0
    """Tokens in the cache."""
    kv_version: int | None = None
    """Oldest weights that computed any of them."""
    logits: torch.Tensor | None = None
    """[V] after the last token, once all is computed: what every sharing request draws its first token from."""
    waiters: list[Sequence] = field(default_factory=list)
    """Admitted requests that start when it is computed."""

    @property
    def computed(self) -> bool:
        return self.done == len(self.tokens)


class Prompts:
    def __init__(self, rows: range) -> None:
        self.rows = rows
        self.entries: list[Entry] = []
        """In the order in which they were opened or, once computed, last used."""

    def find(self, tokens: tuple[int, ...], version: int) -> Entry | None:
        for entry in self.entries:
            if entry.kv_version in (None, version) and entry.tokens == tokens:
                return entry
        return None

    def open(self, tokens: tuple[int, ...]) -> Entry | None:
        """A new entry, in the place of the one unused for longest if need be; None when all are awaited."""
        if len(self.entries) == len(self.rows):
            idle = next((entry for entry in self.entries if not entry.waiters), None)
            if idle is None:
                return None
            self.entries.remove(idle)
        taken = {entry.row for entry in self.entries}
        entry = Entry(tokens, next(row for row in self.rows if row not in taken))
        self.entries.append(entry)
        return entry

    def plan(self, budget: int) -> list[tuple[Entry, Chunk]]:
        """What to compute next: first come, first served, `budget` tokens at most."""
        chunks = []
        for entry in self.entries:
            size = min(budget, len(entry.tokens) - entry.done)
            if size > 0:
                chunks.append((entry, Chunk(entry.row, entry.done, entry.done + size)))
                budget -= size
        return chunks

    def advance(self, entry: Entry, chunk: Chunk, version: int) -> None:
        entry.done = chunk.stop
        if entry.kv_version is None:
            entry.kv_version = version

    def ready(self) -> Iterator[tuple[Entry, Sequence]]:
        """Takes out the requests whose prompt is computed."""
        for entry in [entry for entry in self.entries if entry.waiters and entry.computed]:
            self.entries.remove(entry)  # to the end: used last
            self.entries.append(entry)
            waiters, entry.waiters = entry.waiters, []
            yield from ((entry, sequence) for sequence in waiters)

    def leave(self, sequence: Sequence) -> Entry | None:
        """Takes a cancelled request out. The entry when nobody waits for its unfinished prompt any more: it is given up."""
        for entry in self.entries:
            if sequence in entry.waiters:
                entry.waiters.remove(sequence)
                if not entry.waiters and not entry.computed:
                    self.entries.remove(entry)
                    return entry
                return None
        raise AssertionError(f"{sequence.id} waits for no prompt")

    def discard(self, entry: Entry) -> None:
        if entry in self.entries:
            self.entries.remove(entry)

    def forget(self) -> None:
        """At a swap: computed prompts belong to the weights before."""
        self.entries = [entry for entry in self.entries if not entry.computed or entry.waiters]

    def admitted(self) -> int:
        """Requests that have been promised a slot and wait for their prompt."""
        return sum(len(entry.waiters) for entry in self.entries)
