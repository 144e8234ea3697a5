"""Who waits, whose prompt is computed, who runs, and which cache row is whose."""

from __future__ import annotations

from headrace.engine.native.attention import Chunk
from headrace.engine.native.kv import Budget, KVCache
from headrace.engine.native.prompts import Entry, Prompts
from headrace.engine.native.sequences import Running, Sequence


class Scheduler:
    """First come, first served. A request is admitted when a slot is free, and keeps its slot until it ends."""

    def __init__(self, cache: KVCache, shares: Budget, prefill_chunk: int) -> None:
        self._cache, self._prefill_chunk = cache, prefill_chunk
        self._all: dict[str, Sequence] = {}
        self._waiting: dict[str, Sequence] = {}
        """In order of arrival."""
        self.running = Running(shares.slots)
        self.prompts = Prompts(range(shares.slots, shares.rows))

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._all

    @property
    def admitted(self) -> int:
        return len(self.running) + self.prompts.admitted()

    def add(self, sequence: Sequence) -> None:
        self._all[sequence.id] = self._waiting[sequence.id] = sequence

    def admit(self, version: int) -> None:
        """Lets in whom a slot and a place for their prompt is free for."""
        free = self.running.slots - self.admitted
        while self._waiting and free > 0:
            request_id, sequence = next(iter(self._waiting.items()))
            entry = self.prompts.find(sequence.tokens, version) or self.prompts.open(sequence.tokens)
            if entry is None:
                return
            entry.waiters.append(sequence)
            del self._waiting[request_id]
            free -= 1

    def plan(self) -> list[tuple[Entry, Chunk]]:
        return self.prompts.plan(self._prefill_chunk)

    def start(self) -> list[Entry]:
        """Gives those whose prompt is computed the next rows. The entry of each, in the order of the rows."""
        entries = []
        for entry, sequence in self.prompts.ready():
            assert entry.kv_version is not None
            row = self.running.add(sequence, entry.kv_version)
            self._cache.copy(entry.row, row, len(entry.tokens))
            entries.append(entry)
        return entries

    def remove(self, row: int, clear: bool) -> None:
        """Ends a running sequence; the last one moves into its row. `clear` wipes what it leaves in the cache."""
        del self._all[self.running.sequences[row].id]
        length = int(self.running.column("length")[row])
        last = self.running.remove(row)
        if clear:
            self._cache.clear(row, length)
        if row != last:
            self._cache.copy(last, row, int(self.running.column("length")[row]))

    def cancel(self, request_id: str) -> None:
        sequence = self._all.get(request_id)
        if sequence is None:
            return
        if sequence.row >= 0:
            self.remove(sequence.row, clear=True)
            return
        del self._all[request_id]
        if self._waiting.pop(request_id, None) is None and (given_up := self.prompts.leave(sequence)):
            self._cache.clear(given_up.row, given_up.done)

    def drop_prompt(self, entry: Entry) -> None:
        """Nobody may share a prompt whose logits are not finite, nor inherit what it left in the cache."""
        self.prompts.discard(entry)
        self._cache.clear(entry.row, len(entry.tokens))

    def integrity(self) -> None:
        """Asserts that every request is in exactly one place and every cache row has at most one owner."""
        rows = [sequence.row for sequence in self.running.sequences]
        assert rows == list(range(len(rows))), "running sequences know their rows, which have no holes"
        assert self.admitted <= self.running.slots, "nobody is admitted without a slot"
        taken = [entry.row for entry in self.prompts.entries]
        assert len(set(taken)) == len(taken) and set(taken) <= set(self.prompts.rows), "one prompt a row"
        places = [
            *(sequence.id for sequence in self.running.sequences),
            *(sequence.id for entry in self.prompts.entries for sequence in entry.waiters),
            *self._waiting,
        ]
        assert sorted(places) == sorted(self._all), "every request is in exactly one place"
        for entry in self.prompts.entries:
            assert entry.computed == (entry.logits is not None), "logits come with the last token"
            assert entry.computed or entry.waiters, "no prompt is computed for nobody"
        for sequence, row in zip(self.running.sequences, self.running.columns, strict=False):
            expected = len(sequence.request.prompt) + row["counter"] - 1
            assert row["length"] == expected, "the cache holds all tokens but the one sampled last"
            assert row["length"] < self._cache.tokens and row["counter"] < row["limit"]
