"""The bounded buffer between inference and training: tickets, slots, the window, and the accounting of every ticket.

A ticket's life:   drawn -> in flight -> ready -> taken -> trained -> (weights live) released
                            in flight -> dropped(reason) | failed(reason)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from headrace.observe.facts import Accounting
from headrace.staleness import StalenessConfig
from headrace.types import Group, Prompt, Struct


class BufferState(Struct, frozen=True):
    """What a checkpoint holds of the buffer: finished groups, prompts to draw again, and the accounting."""

    next_ticket: int
    ready: tuple[Group, ...]
    unfinished: tuple[Prompt, ...]
    accounting: Accounting


class Buffer:
    """Slots and order enforce C1 (proof in `staleness.py`); counters keep C2. Single-threaded: one asyncio loop."""

    def __init__(self, config: StalenessConfig, groups_wanted: int) -> None:
        """`groups_wanted`: groups that the whole run will train. No more prompts are drawn than that needs."""
        self._config = config
        self._wanted = groups_wanted
        self._next_ticket = 0
        self._in_flight: dict[int, Prompt] = {}
        """By ticket."""
        self._ready: dict[int, Group] = {}
        self._taken: dict[int, Group] = {}
        self._trained_not_live: set[int] = set()
        self._to_draw_again: list[Prompt] = []
        self._drawn = self._trained = self._drawn_again = 0
        self._dropped: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._rollout_failures: Counter[str] = Counter()
        self._closed = False
        self._sleepers: list[asyncio.Future[None]] = []

    # -- the producer's side ------------------------------------------------------------------------------------------

    async def draw(self) -> int | None:
        """A ticket as soon as a slot is free and the run needs another group; None once the buffer is closed."""
        await self._until(lambda: self._closed or self._may_draw())
        if self._closed:
            return None
        self._next_ticket += 1
        return self._next_ticket - 1

    def start(self, ticket: int, prompt: Prompt, again: bool = False) -> None:
        """The prompt of a ticket just drawn. `again`: it was in flight at the checkpoint that this run resumed from."""
        self._in_flight[ticket] = prompt
        if again:
            self._drawn_again += 1
        else:
            self._drawn += 1

    def next_again(self) -> Prompt | None:
        """The next prompt that has to be drawn again after a resume, before the task is asked for new ones."""
        return self._to_draw_again.pop(0) if self._to_draw_again else None

    def put(self, group: Group) -> None:
        del self._in_flight[group.ticket]
        self._ready[group.ticket] = group
        self._count_failures(group.failures)
        self._notify()

    def end(self, ticket: int, outcome: str, reason: str, failures: Iterable[Any] = ()) -> None:
        """A group that will not be trained: its slot is free at once."""
        assert outcome in ("dropped", "failed"), outcome
        self._in_flight.pop(ticket, None) or self._taken.pop(ticket)
        (self._dropped if outcome == "dropped" else self._failed)[reason] += 1
        if outcome == "dropped":
            self._count_failures(failures)
        self._notify()

    # -- the trainer's side -------------------------------------------------------------------------------------------

    async def take(self, count: int) -> tuple[Group, ...] | None:
        """The next `count` groups inside the window, as they become ready; None once the buffer is closed."""
        batch: list[Group] = []
        while len(batch) < count:
            await self._until(lambda: self._closed or self._eligible() is not None)
            ticket = self._eligible()
            if self._closed or ticket is None:
                self._ready |= {group.ticket: self._taken.pop(group.ticket) for group in batch}
                return None
            self._taken[ticket] = self._ready.pop(ticket)
            batch.append(self._taken[ticket])
        return tuple(batch)

    def trained(self, groups: Iterable[Group]) -> None:
        """Counted as trained; their slots stay taken until `release`."""
        for group in groups:
            del self._taken[group.ticket]
            self._trained_not_live.add(group.ticket)
            self._trained += 1

    def release(self, groups: Iterable[Group]) -> None:
        """The weights that these groups trained are live."""
        self._trained_not_live -= {group.ticket for group in groups}
        self._notify()

    def close(self) -> None:
        """Ends the run: `draw` and `take` return None from now on."""
        self._closed = True
        self._notify()

    # -- what it knows ------------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Tickets that hold a slot."""
        return len(self._in_flight) + len(self._ready) + len(self._taken) + len(self._trained_not_live)

    def accounting(self, in_checkpoint: bool = False) -> Accounting:
        """C2 at this instant. `in_checkpoint`: what is in the pipeline now is what a checkpoint holds."""
        inside = len(self._in_flight) + len(self._ready) + len(self._taken)
        waiting = len(self._to_draw_again)
        return Accounting(
            drawn=self._drawn,
            trained=self._trained,
            dropped=dict(self._dropped),
            failed=dict(self._failed),
            in_pipeline=0 if in_checkpoint else inside,
            in_checkpoint=waiting + (inside if in_checkpoint else 0),
            drawn_again=self._drawn_again,
            rollout_failures=dict(self._rollout_failures),
        )

    def state(self) -> BufferState:
        unfinished = tuple(self._in_flight.values()) + tuple(self._to_draw_again)
        ready = {**self._ready, **self._taken}
        groups = tuple(ready[ticket] for ticket in sorted(ready))
        return BufferState(self._next_ticket, groups, unfinished, self.accounting(in_checkpoint=True))

    def restore(self, state: BufferState) -> None:
        assert self._next_ticket == 0, "restore before the first draw"
        counted = state.accounting
        self._next_ticket = state.next_ticket
        self._ready = {group.ticket: group for group in state.ready}
        self._to_draw_again = list(state.unfinished)
        self._drawn, self._trained, self._drawn_again = counted.drawn, counted.trained, counted.drawn_again
        self._dropped, self._failed = Counter(counted.dropped), Counter(counted.failed)
        self._rollout_failures = Counter(counted.rollout_failures)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _may_draw(self) -> bool:
        needed = self._wanted - self._trained - (len(self._in_flight) + len(self._ready) + len(self._taken))
        return self.outstanding < self._config.slots and needed > 0

    def _eligible(self) -> int | None:
        """The oldest ready ticket, if it lies inside the window anchored at the oldest ticket not taken yet."""
        if not self._ready:
            return None
        oldest_ready = min(self._ready)
        anchor = min(oldest_ready, min(self._in_flight, default=oldest_ready))
        return oldest_ready if oldest_ready < anchor + self._config.window else None

    def _count_failures(self, failures: Iterable[Any]) -> None:
        self._rollout_failures.update(failure.reason for failure in failures)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            sleeper = asyncio.get_running_loop().create_future()
            self._sleepers.append(sleeper)
            await sleeper

    def _notify(self) -> None:
        for sleeper in self._sleepers:
            if not sleeper.done():
                sleeper.set_result(None)
        self._sleepers.clear()
