"""Sums over a whole run: over steps, versions and probes, over samples of the engine, over calls of the reward's parts, and of dollars.

`RunSums` is the base of all numbers of a run. They are plain values, so that a digest (`facts/index_file.py`) is their bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, get_args, get_origin

import msgspec
from msgspec import field

from headrace.core.reports import EngineStats, LagStats, LoadReport
from headrace.core.weights import WeightUpdate
from headrace.facts.facts import (
    CheckpointSaved,
    Fact,
    FleetSample,
    IdentityChecked,
    RunStarted,
    ScorerAsked,
    Slept,
    TrialChecked,
    WeightsLive,
    Woke,
)
from headrace.facts.records import StepRow
from headrace.facts.texts import counted, plural, short_time


class RunSums(msgspec.Struct, forbid_unknown_fields=True):
    """Numbers that facts are folded into. Unlike the nouns they change."""


def counter() -> Any:
    """The default of a field that is a `Counter`."""
    return msgspec.field(default_factory=Counter)


def as_counter(kind: Any, value: Any) -> Any:
    """The hook with which msgspec reads a `Counter`, which it does not know. Raises what msgspec raises for values of other types."""
    if get_origin(kind) is not Counter:
        raise NotImplementedError(kind)
    return Counter(msgspec.convert(value, dict[get_args(kind)[0], int]))  # type: ignore[misc]


# --- Sums over all steps, versions and probes of a run
# What a verdict needs of them, without the list of all.


class LagSum(RunSums):
    """Token-weighted sums of the `LagStats` of one name.

    The token-weighted mean is exact for shares and ratios. Quantiles and the effective sample size are means of the steps' own values,
    and `max` is the largest.
    """

    tokens: int = 0
    sums: dict[str, float] = {}
    """Sums of these fields of `LagStats`."""
    masked: dict[str, float] = {}
    gaps: dict[str, float] = {}

    def add(self, stats: LagStats) -> None:
        self.tokens += stats.tokens
        for name in ("ratio", "kl", "ess", "chi2", "clipped"):
            self.sums[name] = self.sums.get(name, 0.0) + getattr(stats, name) * stats.tokens
        for rule, share in stats.masked.items():
            self.masked[rule] = self.masked.get(rule, 0.0) + share * stats.tokens
        for key, value in stats.gaps.items():
            known = self.gaps.get(key, 0.0)
            self.gaps[key] = max(known, value) if key == "max" else known + value * stats.tokens

    def stats(self, name: str) -> LagStats:
        """Returns the means. `name`: of the lag."""
        masked = {rule: total / self.tokens for rule, total in self.masked.items()}
        gaps = {key: value if key == "max" else value / self.tokens for key, value in self.gaps.items()}
        means = {mean: total / self.tokens for mean, total in self.sums.items()}
        return LagStats(name=name, tokens=self.tokens, masked=masked, gaps=gaps, **means)


class LagSums(RunSums):
    """Sampler against trainer by lag, over many steps."""

    of: dict[str, LagSum] = {}

    def add(self, row: StepRow) -> None:
        for stats in row.report.lags:
            self.of.setdefault(stats.name, LagSum()).add(stats)

    def stats(self) -> list[LagStats]:
        """Returns the statistics of each lag that had tokens, `swapped` last."""
        return [self.of[name].stats(name) for name in sorted(self.of)]


def over_steps(rows: Iterable[StepRow]) -> list[LagStats]:
    """Returns the statistics of each lag that had tokens in these steps, `swapped` last."""
    sums = LagSums()
    for row in rows:
        sums.add(row)
    return sums.stats()


class StepTotals(RunSums):
    """Sums over the steps. Those without a docstring are of the fields of `TrainReport` with their names."""

    steps: int = 0
    tokens: int = 0
    """Tokens in the loss."""
    seconds: float = 0.0
    """Time in which the trainer stepped."""
    completions: int = 0
    """Trained completions."""
    swapped: int = 0
    """Trained completions that were sampled by more than one version."""
    trimmed: int = 0
    """Tokens that are older than the bound, and so are context only."""
    mixed: int = 0
    """Tokens that were sampled while an update was streamed in."""
    dropped_tokens: int = 0
    outside_tokens: int = 0
    missing_routes: int = 0
    routing_conflicts: int = 0
    lagged: int = 0
    """Steps with lags."""
    widths: int = 0
    """Sum of the versions between the oldest and the newest token of a step."""
    widest: int = 0
    """Maximum of these."""
    by_lag: LagSums = field(default_factory=LagSums)

    def add(self, row: StepRow, bound: float) -> None:
        """`bound`: on the lag."""
        report = row.report
        self.steps += 1
        self.tokens += report.loss_tokens
        self.seconds += report.seconds
        self.completions += len(row.lengths)
        self.swapped += row.swapped
        self.trimmed += trimmed(row, bound)
        self.mixed += row.mixed_tokens
        self.dropped_tokens += report.dropped_tokens
        self.outside_tokens += report.outside_tokens
        self.missing_routes += report.missing_routes
        self.routing_conflicts += report.routing_conflicts
        if row.lags:
            width = max(row.lags) - min(row.lags)
            self.lagged, self.widths, self.widest = self.lagged + 1, self.widths + width, max(self.widest, width)
        self.by_lag.add(row)


def trimmed(row: StepRow, bound: float) -> int:
    """Returns the tokens of a step that are older than the bound, and so are context only."""
    return sum(count for lag, count in row.outside.items() if lag > bound)


class TravelSums(RunSums):
    """Sums over versions of what travelled to the engines."""

    versions: int = 0
    whole: int = 0
    """Versions that were offered as full copies only."""
    nbytes: int = 0
    """Bytes of the versions."""
    offered: int = 0
    """Bytes of what the trainer offered, or wrote: the difference where there is one."""
    reported: int = 0
    """Versions whose engines said how many bytes they received. The next four are sums over these."""
    received: int = 0
    engines: int = 0
    wanted: int = 0
    """Bytes that the engines would have received in full copies."""
    uncounted: int = 0
    """Updates whose engines were not counted."""

    def add(self, update: WeightUpdate, load: LoadReport) -> None:
        self.versions += 1
        self.whole += "delta" not in update.where
        self.nbytes += update.nbytes
        self.offered += int(update.where.get("delta", update.nbytes))
        if load.received:
            engines = max(1, load.engines)
            self.reported += 1
            self.received += load.received
            self.engines += engines
            self.wanted += engines * update.nbytes
            self.uncounted += not load.engines


class SwapTotals(RunSums):
    """Sums over the versions that went live, and over the checkpoints."""

    count: int = 0
    swap_seconds: float = 0.0
    """Time for which swaps stopped generation."""
    pauses: float = 0.0
    """Time for which they held it back or stopped it."""
    published: float = 0.0
    """Time that the trainer published."""
    interrupted: int = 0
    """Rollouts that were interrupted by a swap."""
    held: int = 0
    """Versions whose swap held generation back."""
    busy: float = 0.0
    """Time that the trainer published and saved during training."""
    travels: dict[str, TravelSums] = {}
    """The sums of each `WeightUpdate.kind`: a base travels once, its adapters at every step."""

    def swap(self, fact: WeightsLive, training: bool) -> None:
        self.count += 1
        self.swap_seconds += fact.load.swap_seconds
        self.pauses += max(fact.pause, fact.load.swap_seconds)
        self.published += fact.update.seconds
        self.interrupted += fact.interrupted
        self.held += fact.pause > 0
        self.busy += fact.update.seconds * training
        self.travels.setdefault(fact.update.kind, TravelSums()).add(fact.update, fact.load)

    def save(self, fact: CheckpointSaved, training: bool) -> None:
        self.busy += fact.held * training


class ProbeTotals(RunSums):
    """The probes of C3: how many, and the worst."""

    count: int = 0
    failed: list[IdentityChecked] = []
    worst: IdentityChecked | None = None
    """The one with the largest mean difference."""
    widest: float = -math.inf
    """The largest difference of a single token."""
    trial: TrialChecked | None = None
    """The last one that failed; else the last one."""

    def tried(self, fact: TrialChecked) -> None:
        if self.trial is None or self.trial.ok:
            self.trial = fact

    def add(self, fact: IdentityChecked) -> None:
        self.count += 1
        self.failed += [] if fact.ok else [fact]
        if self.worst is None or _size(fact) > _size(self.worst):
            self.worst = fact
        self.widest = max(self.widest, fact.max_abs_diff)


def _size(check: IdentityChecked) -> float:
    return check.mean_abs_diff if math.isfinite(check.mean_abs_diff) else math.inf


# --- Use of the engine pool, computed from samples (about one per second)
# Use of the engine pool, computed from samples (about one per second), and the sleep of both pools where they share their devices.


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


# --- The time that each part of the reward took, its retries and its failures.


class ScorerUse(RunSums):
    """All calls of one part of the reward."""

    what: str
    """A function, a service, a judge."""
    calls: int = 0
    """Each for a group."""
    completions: int = 0
    attempts: int = 0
    """Requests over the network."""
    retries: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    longest: float = 0.0
    failures: Counter[str] = counter()
    """Completions without a score, by reason."""

    def add(self, call: ScorerAsked) -> None:
        self.calls += 1
        self.completions += call.completions
        self.attempts += call.attempts
        self.retries += call.retries
        self.tokens += call.tokens
        self.seconds += call.seconds
        self.waited += call.waited
        self.longest = max(self.longest, call.seconds)
        self.failures.update(call.failures)

    @property
    def words(self) -> str:
        """One line: `12 groups, 1.3 s each (longest 4 s), 2 repeated requests, 300 tokens, failed: 4 reward_timeout`."""
        parts = [
            plural(self.calls, "group"),
            f"{short_time(self.seconds / self.calls)} each (longest {short_time(self.longest)})",
        ]
        parts += [plural(self.retries, "repeated request")] if self.retries else []
        parts += [f"{self.tokens:,} tokens"] if self.tokens else []
        parts += [f"failed: {counted(self.failures)}"] if self.failures else []
        return ", ".join(parts)


# --- The cost of a run in dollars, from the prices of its settings
# A pool costs its price for every hour of the run's clock: loading, waiting, evaluations and checkpoints are paid for like training, and the
# time between two processes of a run is not.

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
