"""A run's own counts over a server: it may have counted other work before the run, and its processes may end during it."""

from __future__ import annotations

import msgspec

from headrace.reports import TOTALS, EngineStats


class RunCounts:
    def __init__(self) -> None:
        self._before, self._base, self._latest = EngineStats(), EngineStats(), EngineStats()
        """Statistics of processes of the server that ended; what the present one had done before this run; what it has now."""

    def begin(self, stats: EngineStats) -> None:
        self._base = self._latest = stats

    def update(self, stats: EngineStats) -> None:
        self._latest = stats

    def process_ended(self) -> None:
        self._before, self._base, self._latest = self.of_run(0), EngineStats(), EngineStats()

    def of_run(self, version: int) -> EngineStats:
        """`version`: that of the live weights."""
        counts = {
            name: getattr(self._before, name) + getattr(self._latest, name) - getattr(self._base, name)
            for name in TOTALS
        }
        return msgspec.structs.replace(self._latest, version=version, **counts)
