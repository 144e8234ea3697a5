"""The means by which every part of a run reports, as one value: the recorder of facts, the run's clock, and its named waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.facts.facts import Fact, Warned, Withdrawn
from headrace.facts.waits import Waits


@dataclass(frozen=True)
class Telemetry:
    """Passed to every loop and client of a run."""

    record: Callable[[Fact], None]
    clock: Callable[[], float]
    """Seconds since the start of the run, counting all its processes from the first on."""
    waits: Waits

    def warn(self, message: str, key: str = "") -> None:
        """`key`: as in `Warned`."""
        self.record(Warned(self.clock(), message, key))

    def withdraw(self, key: str) -> None:
        """Says that what was warned of under this key has passed."""
        self.record(Withdrawn(self.clock(), key))
