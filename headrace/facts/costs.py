"""The cost of a run in dollars, from the prices of its settings.

A pool costs its price for every hour of the run's clock: loading, waiting, evaluations and checkpoints are paid for like training, and the
time between two processes of a run is not.
"""

from __future__ import annotations

from msgspec import field

from headrace.facts.facts import Fact, FleetSample, RunStarted
from headrace.facts.run_sums import RunSums

ENGINE, TRAINER = "engine", "trainer"


class Costs(RunSums):
    """Dollars spent so far."""

    prices: dict[str, float] = {}
    """Dollars an hour: of each engine, of the trainer. Empty if none was set."""
    spent: dict[str, float] = field(default_factory=lambda: {ENGINE: 0.0, TRAINER: 0.0})
    of_step: float = 0.0
    """Dollars between the ends of the last two steps."""
    before: float = 0.0
    """Dollars until the end of the last step."""
    engines: int = 1
    at: float = 0.0
    """The time of the last fact."""

    def fold(self, fact: Fact) -> None:
        if isinstance(fact, RunStarted):
            self.prices, self.engines = fact.prices, 1
        if not self.prices:
            return
        hours, self.at = max(0.0, fact.t - self.at) / 3600, max(fact.t, self.at)
        self.spent[ENGINE] += hours * self.engines * self.prices.get(ENGINE, 0.0)
        self.spent[TRAINER] += hours * self.prices.get(TRAINER, 0.0)
        if isinstance(fact, FleetSample):
            self.engines = sum(member.state != "lost" and not member.lent for member in fact.members)

    def end_step(self) -> None:
        self.of_step, self.before = self.total - self.before, self.total

    @property
    def total(self) -> float:
        return sum(self.spent.values())


def dollars(value: float) -> str:
    """Formats dollars: `$1,240`, `$12.40`, `$0.0031`.

    >>> dollars(1240.4), dollars(12.4), dollars(0.00312), dollars(0)
    ('$1,240', '$12.40', '$0.0031', '$0')
    """
    if value >= 1000:
        return f"${value:,.0f}"
    return f"${value:.2f}" if value >= 0.1 else f"${value:.2g}"
