"""The result of a simulated day, in numbers and in lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from headrace.core.types import Struct
from headrace.facts.facts import Accounting
from headrace.testing.faultsim.cluster.day_checks import DayChecks
from headrace.testing.faultsim.cluster.mishaps import Mishap
from headrace.testing.faultsim.cluster.sizing import ClusterSize


class DayReport(Struct, frozen=True, kw_only=True):
    size: ClusterSize
    bus: bool
    """Whether every engine belonged to a rollout host."""
    seconds: float
    seed: int
    harsher: float
    mishaps: tuple[Mishap, ...]
    lives: int
    """Processes of the controller."""
    ends: tuple[str, ...]
    """The reasons for which processes ended before the day did."""
    down: float
    """Seconds without a run: restarts, and the start of workers."""
    tokens: int
    steps: int
    rollouts: int
    facts: int
    lag: int
    repeated_steps: int
    repeated_seconds: float
    served_seconds: float
    deaths: int
    absences: int
    books: Accounting
    said: tuple[str, ...]
    cpu: float
    """Seconds of CPU time of the simulation."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def lines(self, ideal: DayReport | None) -> Iterator[str]:
        """`ideal`: the same day without mishaps."""
        size, books = self.size, self.books
        yield (
            f"{size.gpus:,} GPUs: {size.engines} {'rollout hosts' if self.bus else 'engines'} of {size.gpus_per_engine}, {size.ranks} trainer ranks; {self.seconds / 3600:g} hours, "
            f"seed {self.seed}, failures × {self.harsher:g}"
        )
        counts = Counter(mishap.kind for mishap in self.mishaps)
        yield "mishaps      " + (", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none")
        yield (
            f"workers      {self.deaths} deaths of engines, {self.absences} left the rotation; in it for "
            f"{self.served_seconds / self.seconds / size.engines:.2%} of the time"
        )
        yield f"controller   {self.lives} processes, {self.down / 60:.1f} min without a run" + "".join(
            f"\n               {end}" for end in self.ends
        )
        repeated = f", {self.repeated_steps} of them repeated ({self.repeated_seconds / 60:.1f} min)"
        yield f"steps        {self.steps}{repeated if self.repeated_steps else ''}"
        yield f"lag          max {self.lag}, bound {size.staleness.lag_bound}"
        dropped, failed = sum(books.dropped.values()), sum(books.failed.values())
        yield (
            f"accounting   drawn {books.drawn:,} = trained {books.trained:,} + dropped {dropped:,} + failed {failed:,} + pipeline "
            f"{books.in_pipeline} + checkpoint {books.in_checkpoint}"
        )
        yield f"trained      {self.rollouts:,} rollouts, {self.tokens / 1e9:.3f} billion tokens, {self.tokens_per_second:,.0f} a second"
        if ideal:
            yield f"goodput      {self.tokens / ideal.tokens:.2%} of the day without mishaps"
        yield f"simulated    in {self.cpu:.0f} s of CPU time, {self.facts:,} facts checked"


def report_of(checks: DayChecks, **more: object) -> DayReport:
    """`more`: what the checks do not know."""
    found = {
        "tokens": checks.tokens,
        "steps": len(checks.trained),
        "rollouts": checks.rollouts,
        "facts": checks.facts,
        "lag": checks.lag,
        "repeated_steps": checks.repeated_steps,
        "repeated_seconds": checks.repeated_seconds,
        "served_seconds": checks.served_seconds,
        "deaths": checks.deaths,
        "absences": checks.absences,
        "said": tuple(checks.said),
    }
    return DayReport(**found, **more)  # type: ignore[arg-type]
