"""Requests with a constraint, between their arrival and the schedule: threads compile the constraints meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait

from headrace.core.steps import Finished
from headrace.core.types import Sampling
from headrace.engine.native.sampling.guides import Guide, Guides
from headrace.engine.native.schedule.scheduler import Scheduler
from headrace.engine.native.schedule.sequences import Sequence

PATIENCE = 0.02
"""Seconds for which a step without other work waits for a constraint."""


class Compiling:
    def __init__(self, guides: Guides) -> None:
        self._guides = guides
        self._waiting: dict[str, tuple[Sequence, Future[Guide]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        return iter([sequence for sequence, _ in self._waiting.values()])

    @property
    def begun(self) -> bool:
        """Whether one of them has tokens already."""
        return any(sequence.begun for sequence in self)

    def check(self, sampling: Sampling) -> None:
        """Raises ValueError for a constraint that no request can have here."""
        self._guides.check(sampling)

    def add(self, sequence: Sequence) -> None:
        constraint = sequence.request.sampling.constraint
        assert constraint is not None
        self._waiting[sequence.id] = sequence, self._guides.begin(constraint, sequence.said)

    def now(self, sampling: Sampling, tokens: tuple[int, ...]) -> Guide | None:
        """Returns the guide of a completion that has these tokens; None without a constraint. Raises ValueError."""
        return self._guides.begin(sampling.constraint, tokens).result() if sampling.constraint else None

    def cancel(self, request_id: str) -> None:
        if found := self._waiting.pop(request_id, None):
            found[1].cancel()

    def clear(self) -> list[Sequence]:
        """Returns those that were there."""
        there = list(self)
        for sequence in there:
            self.cancel(sequence.id)
        return there

    def enter(self, schedule: Scheduler) -> list[Finished]:
        """Puts those that are ready into the schedule. Returns the ends of those whose constraint cannot be followed."""
        if not schedule.has_work():
            wait([future for _, future in self._waiting.values()], PATIENCE, FIRST_COMPLETED)
        failed = []
        for request_id, (sequence, future) in list(self._waiting.items()):
            if not future.done():
                continue
            del self._waiting[request_id]
            try:
                sequence.guide = future.result()
            except ValueError as error:
                failed.append(Finished(request_id, "error", str(error)))
            else:
                schedule.add(sequence)
        return failed
