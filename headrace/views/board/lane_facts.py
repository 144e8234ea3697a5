"""The history of every rollout of some steps, with its moments: from the facts of these steps, which are read from their place in the metrics.

The moments of turns, of scores, of steps and of swaps are recorded; runs from before 2026-11-24 recorded no turns. A rollout's versions come from the
journal. Where it has none (dropped groups; places that are not read yet), they are those that were live in the meantime.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from headrace.core.types import Turn
from headrace.facts.facts import GroupEnded, RunStarted, TicketDrawn, WeightsLive
from headrace.facts.records import MetricsFact, StepRow
from headrace.views.board import step_windows

OF_LANES = (b"RunStarted", b"TicketDrawn", b"GroupEnded", b"StepTrained", b"WeightsLive")
"""Facts from which lanes are drawn."""
MOST_MARGIN = 16
"""Steps that are read before and behind those asked for, at most: a rollout of a step was asked for at most `max_lag` steps earlier."""

Kind = Literal["all", "trained", "dropped", "late"]


class VersionStretch(NamedTuple):
    """Consecutive tokens of one version, from the first to the last of them, in seconds of the run."""

    start: float
    end: float
    version: int
    tokens: int
    """0 if it is not known how many."""
    mixed: bool = False


class Swaps:
    """The moments at which versions went live."""

    def __init__(self, facts: Sequence[WeightsLive], before: int) -> None:
        """`before`: the version that was live before the first of them."""
        self.moments = [one.t for one in facts]
        self.versions = [one.update.version for one in facts]
        self._before = before
        self._first = dict(zip(reversed(self.versions), reversed(self.moments), strict=True))

    def live_at(self, t: float) -> int:
        place = bisect_right(self.moments, t)
        return self.versions[place - 1] if place else self._before

    def moment_of(self, version: int, start: float, end: float) -> float | None:
        """Returns when a version went live, if that was between `start` and `end`."""
        moment = self._first.get(version)
        return moment if moment is not None and start < moment < end else None

    def between(self, start: float, end: float) -> list[float]:
        return self.moments[bisect_right(self.moments, start) : bisect_right(self.moments, end)]


@dataclass(kw_only=True)
class TicketStory:
    """The history of one ticket, as far as the facts that were read say."""

    ticket: int
    drawn: float | None = None
    played: GroupEnded | None = None
    """The fact that its rollouts are over: the first one, because a group that was ready may be dropped later."""
    gone: GroupEnded | None = None
    """The fact that it is not trained."""
    step: StepRow | None = None
    """The step that trained it."""

    @property
    def start(self) -> float:
        begun = self.played.t - self.played.seconds if self.played else self.end
        return begun if self.drawn is None else min(begun, self.drawn)

    @property
    def end(self) -> float:
        last = [one.t for one in (self.played, self.gone, self.step) if one]
        return max(last, default=self.drawn or 0.0)

    @property
    def over(self) -> bool:
        return bool(self.gone or self.step)

    def turns_of(self, rollout: int) -> list[tuple[float, float]]:
        """Returns when each turn of a rollout was asked for and had ended; empty if that was not recorded."""
        if self.played is None or rollout >= len(self.played.times):
            return []
        moments = [self.played.t - before for before in self.played.times[rollout]]
        return list(zip(moments[::2], moments[1::2], strict=False))

    @property
    def sampled(self) -> float:
        """The moment when the last rollout had ended, and scoring began; that of the outcome if turns were not recorded."""
        assert self.played
        ends = [turns[-1][1] for i in range(len(self.played.times)) if (turns := self.turns_of(i))]
        return max(ends, default=self.played.t)

    def lag_at(self, swaps: Swaps, rollout: int) -> int | None:
        """Returns the lag that the rollout's first token has at the step that trains it, if the engine sampled it as soon as it was
        asked for; None for a group that was not trained."""
        turns = self.turns_of(rollout)
        return self.step.report.step - swaps.live_at(turns[0][0] if turns else self.start) if self.step else None


@dataclass(frozen=True, kw_only=True)
class LaneWindow:
    """The tickets that were drawn, sampled, scored or waiting during some steps."""

    first: int
    last: int
    """Steps, counted from 1, both included."""
    start: float
    end: float
    """The moments at which these steps began and ended, in seconds of the run."""
    stories: tuple[TicketStory, ...]
    swaps: Swaps
    bound: int = 1
    """Lag from which a rollout is late."""
    whole: bool = True
    """Whether everything up to the end of the file was read: what has no outcome there is still under way."""
    cut: bool = False
    """Whether the last steps that were asked for are left out, because there would be too much to read."""
    missing: int = 0
    """Groups that these steps trained and whose rollouts ended before everything that was read."""
    sizes: Mapping[int, int] = field(default_factory=dict)
    """Rollouts of each ticket: scored, failed, or expected."""

    def of_kind(self, kind: Kind) -> list[tuple[TicketStory, int]]:
        """Returns the rollouts of a kind, in order of their tickets: their story, and their place among its rollouts."""
        return [
            (story, rollout)
            for story in self.stories
            for rollout in range(self.sizes[story.ticket])
            if self._fits(story, rollout, kind)
        ]

    def _fits(self, story: TicketStory, rollout: int, kind: Kind) -> bool:
        failed = story.played is not None and rollout >= len(story.played.lengths)
        if kind == "trained":
            return story.step is not None and not failed
        if kind == "dropped":
            return story.gone is not None or failed
        if kind == "late":
            return not failed and (story.lag_at(self.swaps, rollout) or 0) >= self.bound
        return True


def read_lanes(run_dir: Path, started: RunStarted | None, first: int, last: int) -> LaneWindow:
    """Reads the tickets of steps `first` to `last`. Raises OSError if the file cannot be read."""
    margin = min(MOST_MARGIN, (started.max_lag if started else 1) + 1)
    begin = max(1, first - margin)
    read = step_windows.read_facts(run_dir, begin, last + margin, kinds=OF_LANES, most=step_windows.MOST)
    rows = [one for one in read.facts if isinstance(one, StepRow)]
    cut = read.cut and read.last < last
    last = max(first, min(last, read.last)) if cut else last
    start = max((row.t for row in rows if row.report.step + 1 < first), default=0.0)
    ends = [row.t for row in rows if row.report.step + 1 == last]
    newest = not any(row.report.step + 1 > last for row in rows) and not read.cut
    end = ends[-1] if ends and not newest else max((one.t for one in read.facts), default=0.0)
    stories, trained = _stories(read.facts), [row for row in rows if first <= row.report.step + 1 <= last]
    shown = tuple(
        one
        for _, one in sorted(stories.items())
        if one.start <= end and (one.end >= start or not one.over) and (one.played or one.drawn is not None)
    )
    return LaneWindow(
        first=first,
        last=last,
        start=start,
        end=end,
        stories=shown,
        swaps=Swaps([one for one in read.facts if isinstance(one, WeightsLive)], before=begin - 1),
        bound=max(1, started.max_lag if started else 1),
        whole=read.whole,
        cut=cut,
        missing=sum(stories[ticket].played is None for row in trained for ticket in row.tickets),
        sizes={one.ticket: _size(one, started) for one in shown},
    )


def _stories(facts: Sequence[MetricsFact]) -> dict[int, TicketStory]:
    found: dict[int, TicketStory] = {}
    for fact in facts:
        if isinstance(fact, TicketDrawn):
            _of(found, fact.ticket).drawn = fact.t
        elif isinstance(fact, GroupEnded):
            story = _of(found, fact.ticket)
            story.played = story.played or fact
            story.gone = fact if fact.outcome != "ready" else None
        elif isinstance(fact, StepRow):
            for ticket in fact.tickets:
                _of(found, ticket).step = fact
    return found


def _of(found: dict[int, TicketStory], ticket: int) -> TicketStory:
    return found.setdefault(ticket, TicketStory(ticket=ticket))


def _size(story: TicketStory, started: RunStarted | None) -> int:
    """A group that is sampled has one lane: what its rollouts do is recorded when all of them are over."""
    return len(story.played.lengths) + sum(story.played.failures.values()) if story.played else 1


def stretches(
    interval: tuple[float, float], swaps: Swaps, turns: Sequence[Turn] = (), tokens: int = 0
) -> list[VersionStretch]:
    """Returns the versions of the tokens that were sampled in an interval. `turns`: those of the journal that were sampled in it; without
    them, the versions are those that were live in it. `tokens`: how many were sampled, if `turns` do not say so."""
    start, end = interval
    if not turns:
        ends = [start, *swaps.between(start, end), end]
        several = len(ends) > 2
        return [
            VersionStretch(left, right, swaps.live_at(left), 0 if several else tokens)
            for left, right in pairwise(ends)
            if right > left
        ]
    spans = list(_spans(turns))
    total = sum(count for count, _, _ in spans) or 1
    found: list[VersionStretch] = []
    done, left = 0, swaps.moment_of(spans[0][1], start, end) or start
    for place, (count, version, mixed) in enumerate(spans):
        done += count
        following = spans[place + 1][1] if place + 1 < len(spans) else None
        by_share = start + (end - start) * done / total
        right = end if following is None else swaps.moment_of(following, left, end) or max(left, by_share)
        found.append(VersionStretch(left, right, version, count, mixed))
        left = right
    return found


def _spans(turns: Sequence[Turn]) -> Iterator[tuple[int, int, bool]]:
    """Yields tokens, version and whether it was mixed; neighbours of one version together."""
    spans: list[tuple[int, int, bool]] = []
    for turn in turns:
        done = turn.completion
        ends = [*(span.start for span in done.spans[1:]), len(done.tokens)]
        for span, end in zip(done.spans, ends, strict=False):
            if spans and spans[-1][1:] == (span.version, span.mixed):
                spans[-1] = (spans[-1][0] + end - span.start, span.version, span.mixed)
            else:
                spans.append((end - span.start, span.version, span.mixed))
    yield from spans or [(0, 0, False)]
