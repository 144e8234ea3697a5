"""Sums over all steps, versions and probes of a run: what a verdict needs of them, without the list of all."""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec import field

from headrace.core.reports import LagStats, LoadReport
from headrace.core.weights import WeightUpdate
from headrace.facts.facts import CheckpointSaved, IdentityChecked, TrialChecked, WeightsLive
from headrace.facts.records import StepRow
from headrace.facts.run_sums import RunSums


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

    def add(self, one: LagStats) -> None:
        self.tokens += one.tokens
        for name in ("ratio", "kl", "ess", "chi2", "clipped"):
            self.sums[name] = self.sums.get(name, 0.0) + getattr(one, name) * one.tokens
        for rule, share in one.masked.items():
            self.masked[rule] = self.masked.get(rule, 0.0) + share * one.tokens
        for key, value in one.gaps.items():
            known = self.gaps.get(key, 0.0)
            self.gaps[key] = max(known, value) if key == "max" else known + value * one.tokens

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
        for one in row.report.lags:
            self.of.setdefault(one.name, LagSum()).add(one)

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
    """Those that were sampled by more than one version."""
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
    """Those whose engines were not counted."""

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
