"""A request inside a simulated engine, and the order in which requests end."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Sequence

from headrace.core.types import Completion, Request, Stop, VersionSpan
from headrace.loop.world.surroundings import completion_tokens

ROUNDING = 1e-6
"""Passes by which a sum of floats may be off."""

LengthOf = Callable[[Request], tuple[int, bool]]
"""Returns the real tokens of a request's whole completion, and whether max_tokens ends it."""

Swaps = Sequence[tuple[float, int, bool]]
"""Ascending: passes done at the swap, the version from then on, and whether that version is mixed with the next one."""


class Flight:
    __slots__ = (
        "at_limit",
        "begun",
        "done",
        "gone",
        "length",
        "order",
        "prefix",
        "prompt",
        "reported",
        "request",
        "room",
        "start",
        "swaps",
    )

    def __init__(self, request: Request, *, length: int, at_limit: bool, prefix: int, prompt: int, order: int) -> None:
        """`length`: real tokens of the whole completion; `prefix`: those of them that an earlier request sampled; `prompt`: those
        before it."""
        self.request, self.at_limit, self.order, self.prompt = request, at_limit, order, prompt
        self.length, self.prefix = max(length, prefix + 1), prefix
        self.done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.begun = self.gone = False
        self.start = 0
        """Passes done when it began: every later pass gives it one token."""
        self.swaps = 0
        """Index of the last swap before it began."""
        self.room = 0.0
        self.reported = 0
        """Simulated tokens that listeners have been sent."""

    @property
    def end(self) -> int:
        """The number of the pass that gives it its last token."""
        return self.start + self.length - self.prefix

    def completion(self, passes: float, swaps: Swaps, grain: int, stop: Stop, recompute: bool) -> Completion:
        """Returns what is sampled after `passes` passes; the whole completion if it ended by itself."""
        whole = completion_tokens(self.length, grain)
        kept = len(whole)
        if not self.begun:
            kept = len(self.request.prefix)
        elif (
            stop == "interrupted"
        ):  # rounded, so that nothing is gained or lost on average; the last token would end it
            kept = min(kept - 1, max(len(self.request.prefix), round((self.prefix + passes - self.start) / grain)))
        tokens = whole[len(self.request.prefix) : kept]
        spans = self._spans(len(tokens), swaps, grain, recompute) if tokens else ()
        return Completion(tokens, (-1.0,) * len(tokens), spans, stop)

    def _spans(self, count: int, swaps: Swaps, grain: int, recompute: bool) -> tuple[VersionSpan, ...]:
        """Gives each simulated token the version of the first real token in it."""
        _, oldest, mixed = swaps[self.swaps]
        spans = [VersionSpan(0, oldest, oldest, mixed)]
        for at, version, mixed in swaps[self.swaps + 1 :]:
            start = max(0, math.ceil((at - self.start) / grain - ROUNDING))
            if start >= count:
                break
            if start == spans[-1].start:
                spans.pop()
            kv_version = version if recompute else oldest
            if not spans or (spans[-1].version, spans[-1].mixed) != (version, mixed):
                spans.append(VersionSpan(start, version, kv_version, mixed))
        return tuple(spans)


class EndTimes:
    """The running requests, ordered by the pass that ends them."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Flight]] = []

    def push(self, flight: Flight) -> None:
        heapq.heappush(self._heap, (flight.end, flight.order, flight))

    def first(self) -> Flight | None:
        """Returns the request that ends first, among those that have not left."""
        while self._heap and self._heap[0][2].gone:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None
