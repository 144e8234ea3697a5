"""What every part of a run reports by: where facts go, the run's clock, and its named waits. They travel as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.observe.facts import Fact, Warned
from headrace.observe.health.waits import Waits


@dataclass(frozen=True)
class Telemetry:
    record: Callable[[Fact], None]
    clock: Callable[[], float]
    """Seconds since the start of the run, in all its processes."""
    waits: Waits

    def warn(self, message: str) -> None:
        self.record(Warned(self.clock(), message))
