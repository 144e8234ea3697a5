"""The sequences that wait for a row: by priority, then in order of arrival."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from headrace.engine.native.schedule.sequences import Sequence


class Queue:
    def __init__(self) -> None:
        self.draining = False
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        """A cancelled sequence stays in the heap until it reaches the top."""
        self.held_back: list[Sequence] = []
        """Sequences that have not begun, while draining."""

    def push(self, sequence: Sequence) -> None:
        if self.draining and not sequence.begun:
            self.held_back.append(sequence)
        else:
            heapq.heappush(self._heap, (sequence.order, sequence))

    def head(self) -> Sequence | None:
        while self._heap and self._heap[0][1].gone:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        heapq.heappop(self._heap)

    def drain(self) -> None:
        """Holds back all sequences that have not begun."""
        self.draining = True
        heap, self._heap = self._heap, []
        for _, sequence in heap:
            if not sequence.gone:
                self.push(sequence)

    def resume(self) -> None:
        self.draining = False
        held_back, self.held_back = self.held_back, []
        for sequence in held_back:
            self.push(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Called when a waiting sequence was removed."""
        if sequence in self.held_back:
            self.held_back.remove(sequence)

    def __iter__(self) -> Iterator[Sequence]:
        yield from (sequence for _, sequence in self._heap if not sequence.gone)
        yield from self.held_back
