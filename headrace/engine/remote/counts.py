"""A run's own counts over a server: it may have counted other work before the run, and its processes may end during it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headrace.core.reports import TOTALS, EngineStats


class RunCounts:
    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock`: where the server does not report for how long it has worked. Then the time counts in which it had requests of this
        run, without which the run would report an engine that is never busy."""
        self._clock = clock
        self._streams, self._since, self._asked = 0, 0.0, 0.0
        """Open streams; the time from which on there have been some; seconds with some before that."""
        self._before, self._base, self._latest = EngineStats(), EngineStats(), EngineStats()
        """Statistics of processes of the server that ended; what the present one had done before this run; what it has now."""

    def begin(self, stats: EngineStats) -> None:
        self._base = self._latest = stats

    def update(self, stats: EngineStats) -> None:
        self._latest = stats

    def process_ended(self) -> None:
        self._before, self._base, self._latest = self.of_run(0), EngineStats(), EngineStats()

    def stream_began(self) -> None:
        if self._clock and not self._streams:
            self._since = self._clock()
        self._streams += 1

    def stream_ended(self) -> None:
        self._streams -= 1
        if self._clock and not self._streams:
            self._asked += self._clock() - self._since

    def of_run(self, version: int) -> EngineStats:
        """`version`: that of the live weights."""
        counts = {
            name: getattr(self._before, name) + getattr(self._latest, name) - getattr(self._base, name)
            for name in TOTALS
        }
        if self._clock:
            counts["busy_seconds"] = self._asked + (self._clock() - self._since if self._streams else 0.0)
        return msgspec.structs.replace(self._latest, version=version, **counts)
