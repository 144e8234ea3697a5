"""Use of the engine pool, computed from samples (about one per second)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.reports import EngineStats

Window = tuple[float, float]


class EngineSpan(NamedTuple):
    """The work of the engine between two samples."""

    start: float
    end: float
    busy: float
    """Share of the span, 0 to 1."""
    sampled: int
    prompt: int
    running: int
    waiting: int


class EngineUse:
    """All spans of a run."""

    def __init__(self) -> None:
        self.spans: list[EngineSpan] = []
        self.last: EngineStats | None = None
        self._at = 0.0
        self._origin = True

    def restart(self) -> None:
        """Begins a new process of the run: counters start at zero again, and the time in between is not counted."""
        self._origin = True

    def fold(self, t: float, stats: EngineStats) -> None:
        before, self.last = self.last, stats
        start, self._at = self._at, t
        if self._origin or before is None or t <= start:
            self._origin = False
            return
        # Counters that went down belong to a new engine process.
        old = before if stats.busy_seconds >= before.busy_seconds and stats.steps >= before.steps else EngineStats()
        busy = (stats.busy_seconds - old.busy_seconds) / (t - start)
        self.spans.append(
            EngineSpan(
                start=start,
                end=t,
                busy=min(1.0, max(0.0, busy)),
                sampled=stats.sampled_tokens - old.sampled_tokens,
                prompt=stats.prompt_tokens - old.prompt_tokens,
                running=stats.running,
                waiting=stats.waiting,
            )
        )

    def idle(self, windows: Sequence[Window]) -> float | None:
        """Returns the share of the windows in which the engine was idle; None if they contain no samples."""
        inside = self.inside(windows)
        total = sum(span.end - span.start for span in inside)
        return 1 - sum(span.busy * (span.end - span.start) for span in inside) / total if total else None

    def rate(self, windows: Sequence[Window]) -> float | None:
        """Returns sampled tokens per second in the windows."""
        inside = self.inside(windows)
        total = sum(span.end - span.start for span in inside)
        return sum(span.sampled for span in inside) / total if total else None

    def inside(self, windows: Sequence[Window]) -> list[EngineSpan]:
        """Returns the spans whose middle is in a window."""
        return [span for span in self.spans if any(a <= (span.start + span.end) / 2 <= b for a, b in windows)]

    def recent(self, seconds: float = 30.0) -> tuple[float | None, float | None]:
        """Returns idle share and sampled tokens per second of the newest samples. The cost does not grow with the run."""
        tail = [span for span in self.spans[-120:] if span.start >= self._at - seconds]
        total = sum(span.end - span.start for span in tail)
        if not total:
            return None, None
        busy = sum(span.busy * (span.end - span.start) for span in tail)
        return 1 - busy / total, sum(span.sampled for span in tail) / total
