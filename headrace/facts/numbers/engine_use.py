"""Use of the engine pool, computed from samples (about one per second), and the sleep of both pools where they share their devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from headrace.core.reports import EngineStats
from headrace.facts.facts import Slept, Woke
from headrace.facts.run_sums import RunSums, counter
from headrace.facts.texts import plural, short_time

Window = tuple[float, float]

LENT = "lent engine"
"""The name of an engine on lent devices, in facts."""


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


class EngineUse(RunSums):
    """All spans of a run, and what was done in those of them whose middle lies in the training."""

    spans: list[EngineSpan] = []
    seconds: float = 0.0
    """Time of the spans during training."""
    busy: float = 0.0
    """The part of it in which the engine worked."""
    sampled: int = 0
    """Tokens."""
    last: EngineStats | None = None
    at: float = 0.0
    """The time of the last sample."""
    origin: bool = True
    """Whether the next sample is the first of its process."""

    def restart(self) -> None:
        """Begins a new process of the run: counters start at zero again, and the time in between is not counted."""
        self.origin = True

    def fold(self, t: float, stats: EngineStats, windows: Sequence[Window]) -> None:
        """`windows`: intervals of training so far; the last one ends at infinity while it goes on."""
        before, self.last = self.last, stats
        start, self.at = self.at, t
        if self.origin or before is None or t <= start:
            self.origin = False
            return
        # Counters that went down belong to a new engine process.
        old = before if stats.busy_seconds >= before.busy_seconds and stats.steps >= before.steps else EngineStats()
        busy = (stats.busy_seconds - old.busy_seconds) / (t - start)
        span = EngineSpan(
            start=start,
            end=t,
            busy=min(1.0, max(0.0, busy)),
            sampled=stats.sampled_tokens - old.sampled_tokens,
            prompt=stats.prompt_tokens - old.prompt_tokens,
            running=stats.running,
            waiting=stats.waiting,
        )
        self.spans.append(span)
        if any(a <= (start + t) / 2 <= b for a, b in windows):
            self.seconds += t - start
            self.busy += span.busy * (t - start)
            self.sampled += span.sampled

    @property
    def idle(self) -> float | None:
        """Share of the training in which the engine was idle; None without samples of it."""
        return 1 - self.busy / self.seconds if self.seconds else None

    @property
    def rate(self) -> float | None:
        """Sampled tokens per second of training."""
        return self.sampled / self.seconds if self.seconds else None

    def recent(self, seconds: float = 30.0) -> tuple[float | None, float | None]:
        """Returns idle share and sampled tokens per second of the newest samples. The cost does not grow with the run."""
        tail = [span for span in self.spans[-120:] if span.start >= self.at - seconds]
        total = sum(span.end - span.start for span in tail)
        if not total:
            return None, None
        busy = sum(span.busy * (span.end - span.start) for span in tail)
        return 1 - busy / total, sum(span.sampled for span in tail) / total


class Nap(NamedTuple):
    """The time in which a worker did not have the devices."""

    who: str
    start: float
    end: float
    freed: int
    """Bytes that it gave back."""


class Naps(RunSums):
    """All naps of a run, and what was done on lent devices between them."""

    over: list[Nap] = []
    now: dict[str, Slept] = {}
    """The workers that are asleep."""
    turns: int = 0
    """Changes of the devices from one to the other."""
    seconds: float = 0.0
    """The time of these changes, in which neither worked."""
    freed: Counter[str] = counter()
    """The most bytes that a sleep gave back, by worker."""
    loans: int = 0
    """Times that the trainer lent its devices."""
    lent_seconds: float = 0.0
    lent_tokens: int = 0
    """Tokens that were sampled there."""
    lent_at: float = -1.0
    """The time at which an engine woke on lent devices; negative while there is none."""

    def restart(self) -> None:
        """Begins a new process of the run."""
        self.now.clear()
        self.lent_at = -1.0

    def sleep(self, fact: Slept) -> None:
        self.now[fact.who] = fact
        self.seconds += fact.report.seconds
        self.freed[fact.who] = max(self.freed[fact.who], fact.report.memory)
        if fact.who == LENT and self.lent_at >= 0:
            self.loans += 1
            self.lent_seconds += fact.t - self.lent_at
            self.lent_tokens += fact.report.tokens
            self.lent_at = -1.0

    def wake(self, fact: Woke) -> None:
        self.turns += 1
        self.seconds += fact.report.seconds
        if fact.who == LENT:
            self.lent_at = fact.t
        if slept := self.now.pop(fact.who, None):
            self.over.append(Nap(fact.who, slept.t, fact.t, slept.report.memory))

    @property
    def words(self) -> str:
        """`40 turns on the same devices, 0.21 s each; at most 1.2 GiB given back by the trainer, 0.3 GiB by the engine`; empty without any."""
        if not self.turns:
            return ""
        freed = [f"{size / 2**30:.2g} GiB by the {who}" for who, size in self.freed.most_common() if size]
        given = f"; at most {', '.join(freed)} given back" if freed else ""
        return f"{self.turns} turns on the same devices, {self.seconds / self.turns:.2g} s each{given}"

    @property
    def lent_words(self) -> str:
        """`lent 12 times while the trainer waited, 34 s in all: 5,678 tokens sampled there`; empty if nothing was lent."""
        if not self.loans and self.lent_at < 0:
            return ""
        now = ", and now" if self.lent_at >= 0 else ""
        times = f"lent {plural(self.loans, 'time')} while the trainer waited{now}"
        return f"{times}, {short_time(self.lent_seconds)} in all: {plural(self.lent_tokens, 'token')} sampled there"
