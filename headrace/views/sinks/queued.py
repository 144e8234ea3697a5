"""Dashboards are written to by a thread of their own, so that one that is slow, full or not there never slows or stops a run: its numbers are
then dropped, counted, and warned of."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from headrace.facts.facts import RunStarted
from headrace.facts.number_tables import scalars
from headrace.facts.records import MetricsFact
from headrace.facts.run_state import RunState
from headrace.facts.texts import clip, plural

ROOM = 4096
"""Facts that wait for a dashboard at most."""
PATIENCE = 60.0
"""Seconds for which the end of a run waits until a dashboard has everything."""
LONGEST = 200
"""Characters of a dashboard's error."""


class Dashboard(Protocol):
    """A place for numbers. One thread calls it. What it raises is counted, and the call is not repeated."""

    def start(self, fact: RunStarted) -> None:
        """A process of the run begins; called before `log`. If it fails, it is tried again with the next numbers."""

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        """`at`: seconds since 1970."""

    def close(self) -> None: ...


def described(fact: RunStarted) -> dict[str, Any]:
    """Returns what a dashboard shows of a run beside its numbers."""
    return {"headline": fact.headline, "seed": fact.seed, "max_lag": fact.max_lag, "steps": fact.steps}


class DashboardNumbers(NamedTuple):
    step: int
    values: Mapping[str, float]
    at: float


class QueuedSink:
    """A sink that hands numbers to a dashboard by a queue."""

    def __init__(
        self,
        name: str,
        dashboard: Dashboard,
        say: Callable[[str], None],
        *,
        room: int = ROOM,
        patience: float | None = None,
    ) -> None:
        """`name`: its setting below `observe`. `say`: records a warning; called by the thread that calls `record` and `close` only."""
        self._name, self._dashboard, self._say = name, dashboard, say
        self._patience = PATIENCE if patience is None else patience
        self._waiting: queue.Queue[RunStarted | DashboardNumbers | None] = queue.Queue(room)
        self.dropped = self.failed = 0
        """Facts that found the queue full; calls that raised."""
        self._given = self._done = 0
        self._error = ""
        self._warned = False
        self._thread = threading.Thread(target=self._work, name=f"observe.{name}", daemon=True)

    def record(self, fact: MetricsFact, state: RunState) -> None:
        if isinstance(fact, RunStarted):
            self._put(fact)
        step, values = scalars(fact, state)
        if values:
            self._put(DashboardNumbers(step, values, time.time()))
        if (self.failed or self.dropped) and not self._warned:
            self._warned = True
            self._say(f"observe.{self._name} does not get all numbers, and the run goes on without: {self._why}")

    @property
    def _why(self) -> str:
        return self._error or "it is slower than the run"

    def _put(self, entry: RunStarted | DashboardNumbers) -> None:
        if self._thread.ident is None:
            self._thread.start()
        try:
            self._waiting.put_nowait(entry)
            self._given += 1
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        if self._thread.ident is None:
            return
        end = time.monotonic() + self._patience
        try:
            self._waiting.put(None, timeout=self._patience)
            self._thread.join(max(0.0, end - time.monotonic()))
        except queue.Full:
            pass
        lost = self.failed + self.dropped + self._given - self._done
        if lost or self._thread.is_alive():
            slow = f", and had not ended after {self._patience:.0f} s" if self._thread.is_alive() else ""
            self._say(f"observe.{self._name} lacks the numbers of {plural(lost, 'fact')}{slow}: {self._why}")

    def _work(self) -> None:
        starts: list[RunStarted] = []
        while (entry := self._waiting.get()) is not None:
            if isinstance(entry, RunStarted):
                starts.append(entry)
            try:
                while starts:
                    self._dashboard.start(starts[0])
                    starts.pop(0)
                if isinstance(entry, DashboardNumbers):
                    self._dashboard.log(*entry)
            except Exception as error:  # whatever a library raises
                self._fail(error)
            self._done += 1
        try:
            self._dashboard.close()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or clip(f"{type(error).__name__}: {error}", LONGEST)
        self.failed += 1
