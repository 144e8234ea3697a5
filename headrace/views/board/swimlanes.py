"""Rollouts over time: a lane for each, in blocks by ticket, drawn from its admission to the step that trained it or to the reason why none did.
Zoomed as the chart of the pools is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from headrace.core.batches import Group
from headrace.core.types import Turn
from headrace.facts.facts import GroupEnded, RunStarted, TicketDrawn, WeightsLive
from headrace.facts.number_tables import StepColumns
from headrace.facts.records import MetricsFact, StepRow
from headrace.facts.rollout_view import calls_of
from headrace.facts.run_state import RunState
from headrace.facts.texts import duration, number, plural, short_time
from headrace.views.board import followed_run
from headrace.views.board.board_parts import chosen, pager, steps_of, strip
from headrace.views.report.gantt import time_chart
from headrace.views.report.plots import LAST, lag_class, lag_name

# --- The history of every rollout of some steps, with its moments
# From the facts of these steps, which are read from their place in the metrics.
#
# The moments of turns, of scores, of steps and of swaps are recorded; runs from before 2026-11-24 recorded no turns. A rollout's versions come from the
# journal. Where it has none (dropped groups; places that are not read yet), they are those that were live in the meantime.


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
        self.moments = [fact.t for fact in facts]
        self.versions = [fact.update.version for fact in facts]
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
        last = [fact.t for fact in (self.played, self.gone, self.step) if fact]
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
    read = followed_run.read_facts(run_dir, begin, last + margin, kinds=OF_LANES, most=followed_run.MOST)
    rows = [fact for fact in read.facts if isinstance(fact, StepRow)]
    cut = read.cut and read.last < last
    last = max(first, min(last, read.last)) if cut else last
    start = max((row.t for row in rows if row.report.step + 1 < first), default=0.0)
    ends = [row.t for row in rows if row.report.step + 1 == last]
    newest = not any(row.report.step + 1 > last for row in rows) and not read.cut
    end = ends[-1] if ends and not newest else max((fact.t for fact in read.facts), default=0.0)
    stories, trained = _stories(read.facts), [row for row in rows if first <= row.report.step + 1 <= last]
    shown = tuple(
        story
        for _, story in sorted(stories.items())
        if story.start <= end and (story.end >= start or not story.over) and (story.played or story.drawn is not None)
    )
    return LaneWindow(
        first=first,
        last=last,
        start=start,
        end=end,
        stories=shown,
        swaps=Swaps([fact for fact in read.facts if isinstance(fact, WeightsLive)], before=begin - 1),
        bound=max(1, started.max_lag if started else 1),
        whole=read.whole,
        cut=cut,
        missing=sum(stories[ticket].played is None for row in trained for ticket in row.tickets),
        sizes={story.ticket: _size(story, started) for story in shown},
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


# --- swimlanes ------------------------------------------------------------


MOST_LANES = 160
"""Rollouts that are drawn at once."""
AT_FIRST = 6
"""Steps that are shown before others are chosen."""
MOST_JOURNAL = 4 << 20
"""Bytes of the journal that are read for one answer."""
LANE, BAR, APART, LEAST = 10, 8, 8, 16
"""Pixels: height of a lane and of its bar, room between blocks, least height of a block."""
COLOURS = 6
"""Colours of versions, which are used again for later ones."""
SOON = 0.02
"""Seconds that are too short for a bar of a wait."""
KINDS = {"all": "all", "trained": "trained", "dropped": "dropped or failed", "late": "late"}
assert tuple(KINDS) == get_args(Kind)

Journaled = Callable[[Sequence[int], int], dict[int, Group]]
"""Returns groups by ticket, as many as the journal has within so many bytes."""


@dataclass(frozen=True, kw_only=True)
class LaneQuery:
    steps: tuple[int, int] | None = None
    kind: Kind = "all"
    start: int = 0
    """Rollouts of this kind that are left out, because they were shown before."""


def swimlanes(run_dir: Path, state: RunState, columns: StepColumns, query: LaneQuery, journaled: Journaled) -> str:
    """Returns the choice of steps and rollouts, and their chart."""
    steps = steps_of(columns)
    window = read_lanes(run_dir, state.started, *chosen(steps, query.steps, AT_FIRST))
    every = window.of_kind(query.kind)
    shown = every[query.start : query.start + MOST_LANES]
    tickets = list(dict.fromkeys(story.ticket for story, _ in shown if story.played and not story.gone))
    groups = journaled(tickets, MOST_JOURNAL)
    head = strip(columns, window.first, window.last) + pager(window.first, window.last, steps) if steps else ""
    chart = _Chart(window, groups, shown).html() if shown else '<p class="empty">No rollout of this kind.</p>'
    unread = len(set(tickets) - groups.keys())
    notes = [*_notes(window, unread), *([_LEGEND] if shown else [])]
    below = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    return f'<div class="swimlanes">{head}{_choice(window, query, len(shown), len(every))}{chart}{below}</div>'


_LEGEND = (
    "Recorded: admission, swaps, scores, steps, and when each turn was asked for and had ended. Versions are those that the tokens have in the "
    "journal; a colour changes at the moment of the swap, or, if that was not between its tokens, by the share of the tokens before it. "
    "Where the journal has no tokens (groups that were not trained), colours are the versions that were live. Lag is counted to the step that trained the rollout; without one, to its end."
)


def _notes(window: LaneWindow, unread: int) -> Iterator[str]:
    if window.cut:
        yield "More steps would take too long to read at once."
    if window.missing:
        yield f"{plural(window.missing, 'group')} of these steps ended too long before them and are left out."
    if unread:
        words = "cannot be found in the journal (yet), or would take too long to read at once"
        yield f"{plural(unread, 'group')} {words}: their versions are those that were live."
    if any(story.played and story.played.lengths and not any(story.played.times) for story in window.stories):
        yield (
            "The moments of turns were not recorded for some of these rollouts (before 2026-11-24, or a rollout with forks): they are drawn from the "
            "start of their group to their last possible token."
        )


def _choice(window: LaneWindow, query: LaneQuery, shown: int, count: int) -> str:
    """Returns the filter, the colouring, and which of the rollouts are shown."""
    options = "".join(
        f'<option value="{name}"{" selected" * (name == query.kind)}>{text} ({len(window.of_kind(name)):,})</option>'  # type: ignore[arg-type]
        for name, text in KINDS.items()
    )
    place = f"rollouts {query.start + 1:,} to {query.start + shown:,} of {count:,}" if shown else "none"
    left, right = query.start, count - query.start - shown
    buttons = ""
    if left or right > 0:
        before, after = max(0, left - MOST_LANES), left + MOST_LANES
        buttons = (
            f'<button type="button" data-lane="{before}"{" disabled" * (not left)}>◀ {left:,} before</button>'
            f'<button type="button" data-lane="{after}"{" disabled" * (right <= 0)}>{max(0, right):,} more ▶</button>'
        )
    late = f"late: new weights went live {plural(window.bound, 'time')} or more between its first token and its step"
    return (
        f'<div class="toolbar lane-choice"><label title="{escape(late)}">show <select name="show">{options}</select></label>'
        '<label>colour <select name="colour"><option value="version">version</option><option value="lag">lag</option></select></label>'
        f"<span>{place} · steps {window.first:,} to {window.last:,} · {duration(window.start)} to {duration(window.end)}</span>{buttons}</div>"
    )


class _Chart:
    """Collects the lanes. Seconds are counted from the start of the first one: a browser's numbers are too coarse for those of a long run."""

    def __init__(self, window: LaneWindow, groups: dict[int, Group], shown: Sequence[tuple[TicketStory, int]]) -> None:
        self._window, self._swaps, self._groups = window, window.swaps, groups
        self._blocks: dict[int, tuple[TicketStory, list[int]]] = {}
        for story, rollout in shown:
            self._blocks.setdefault(story.ticket, (story, []))[1].append(rollout)
        stories = [story for story, _ in self._blocks.values()]
        self._origin = min(story.start for story in stories)
        self._end = max(max(self._until(story) for story in stories), self._origin + 0.1)
        self._versions: set[int] = set()
        self._lags: set[int] = set()

    def _until(self, story: TicketStory) -> float:
        """Returns the end of what is drawn of a ticket: what is under way goes on to the end of these steps."""
        return story.end if story.over else max(story.end, self._window.end)

    def html(self) -> str:
        top = APART / 2
        labels: list[str] = []
        blocks: list[str] = []
        for place, (story, rollouts) in enumerate(self._blocks.values()):
            height = max(LEAST, LANE * len(rollouts))
            gone = ' data-gone="1"' * bool(story.gone)
            labels.append(
                f'<span style="top:{top + height / 2:.0f}px"><button type="button" data-ticket="{story.ticket}"{gone}'
                f' title="ticket {story.ticket}: open its rollouts">{story.ticket:,}</button></span>'
            )
            blocks += self._block(story, rollouts, top, height, place % 2 == 0)
            top += height + APART
        swaps = "".join(self._swap(t, top) for t in self._swaps.between(self._origin, self._end))
        return self._legend() + time_chart(
            whole=(0.0, self._end - self._origin),
            shown=(0.0, self._end - self._origin),
            origin=self._origin,
            height=top,
            labels="".join(labels),
            bars=f"{''.join(blocks)}{swaps}",
            below="",
            part=True,
        )

    def _block(
        self, story: TicketStory, rollouts: Sequence[int], top: float, height: float, ground: bool
    ) -> Iterator[str]:
        if ground:
            yield f'<rect class="ground" x="0" y="{top - APART / 2:g}" width="{self._end - self._origin:.3f}" height="{height + APART:g}"/>'
        gone = ' data-gone="1"' * bool(story.gone)
        for row, rollout in enumerate(rollouts):
            middle = top + (height - LANE * len(rollouts)) / 2 + LANE * (row + 0.5)
            scored = story.played is not None and rollout < len(story.played.lengths)
            which = f' data-rollout="{rollout}"' if scored else ""
            yield f'<g class="lane" data-ticket="{story.ticket}"{which}{gone}>{"".join(self._lane(story, rollout, middle))}</g>'

    def _lane(self, story: TicketStory, rollout: int, middle: float) -> Iterator[str]:
        played, name = story.played, f"ticket {story.ticket}"
        if played is None:
            until = "still under way" if self._window.whole else "its end lies behind what was read"
            size = f"{name}: its rollouts are sampled and scored, {until}\nsince {duration(story.start)}"
            yield self._bar("flying", (story.start, self._until(story)), middle, 2, size)
            return
        if rollout >= len(played.lengths):
            reasons = list(Counter(played.failures).elements())
            words = f"{name}: a rollout that failed: {reasons[rollout - len(played.lengths)]}\nwhen was not recorded"
            yield self._bar("lost", (story.start, played.t), middle, 2, words)
            if story.gone:
                yield from self._outcome(story, middle)
            return
        name = f"{name}, rollout {rollout}"
        turns = story.turns_of(rollout)
        begun = turns[0][0] if turns else story.start
        if begun - story.start > SOON:
            yield self._bar(
                "queued",
                (story.start, begun),
                middle,
                2,
                f"{name}\nadmitted at {duration(story.start)}; first asked for {short_time(begun - story.start)} later",
            )
        ended = yield from self._sampling(story, rollout, middle, name)
        yield from self._waits(story, ended, middle, name)
        yield from self._outcome(story, middle)

    def _sampling(self, story: TicketStory, rollout: int, middle: float, name: str) -> Generator[str, None, float]:
        """Yields the turns of a rollout, and returns when the last one had ended."""
        assert story.played
        group, turns = self._groups.get(story.ticket), story.turns_of(rollout)
        journaled = group.scored[rollout].episode.turns if group and rollout < len(group.scored) else ()
        tokens, words = story.played.lengths[rollout], self._words(story, rollout, name)
        if not turns:
            end = story.played.t
            found = stretches((story.start, end), self._swaps, journaled, tokens)
            end = self._swaps.moment_of(found[-1].version + 1, story.start, end) or end if journaled and found else end
            yield from self._stretches(
                story, [*found[:-1], *(stretch._replace(end=end) for stretch in found[-1:])], middle, words
            )
            return end
        each = journaled if len(journaled) == len(turns) else ()
        before = 0.0
        for place, interval in enumerate(turns):
            own = each[place : place + 1]
            head = f"{words}\nturn {place + 1} of {len(turns)}" if len(turns) > 1 else words
            calls = "".join(f"\nafter {call}" for call in calls_of(each[place - 1])) if place and each else ""
            if place and interval[0] - before > 0:
                gap = f"{words}\n{short_time(interval[0] - before)} between turns {place} and {place + 1}{calls}"
                yield self._bar("tool", (before, interval[0]), middle, 2, gap)
            found = stretches(interval, self._swaps, own, tokens if len(turns) == 1 else 0)
            if place:
                yield self._mark("turn", interval[0], middle, f"{head} begins{calls}")
            if found and found[0].start - interval[0] > SOON:
                late = f"{head}\nno token before version {found[0].version} was live"
                yield self._bar("queued", (interval[0], found[0].start), middle, 2, late)
            yield from self._stretches(story, found, middle, head)
            before = max(before, interval[1])
        return before

    def _words(self, story: TicketStory, rollout: int, name: str) -> str:
        played = story.played
        assert played
        reward = f", reward {number(played.rewards[rollout])}" if rollout < len(played.rewards) else ""
        return f"{name}: {plural(played.lengths[rollout], 'token')}{reward}"

    def _stretches(
        self, story: TicketStory, found: Iterable[VersionStretch], middle: float, words: str
    ) -> Iterator[str]:
        at = story.step.report.step if story.step else self._swaps.live_at(story.end)
        for stretch in found:
            lag = max(0, at - stretch.version)
            self._versions.add(stretch.version)
            self._lags.add(lag)
            count = f"{plural(stretch.tokens, 'token')} of " if stretch.tokens else ""
            mixed = ", mixed weights" if stretch.mixed else ""
            tip = f"{words}\n{count}version {stretch.version}, lag {lag}{mixed}\n{duration(stretch.start)}, {short_time(stretch.end - stretch.start)}"
            kind = f"v{stretch.version % COLOURS} {lag_class(lag)}{' mixed' * stretch.mixed}"
            yield self._bar(kind, (stretch.start, stretch.end), middle, BAR, tip)

    def _waits(self, story: TicketStory, ended: float, middle: float, name: str) -> Iterator[str]:
        """Yields what a rollout waits for behind its last token: its group, its score, its step."""
        assert story.played
        ready, sampled = story.played.t, max(ended, story.sampled)
        if sampled - ended > SOON:
            yield self._bar(
                "others",
                (ended, sampled),
                middle,
                2,
                f"{name}\nwaits {short_time(sampled - ended)} for the others of its group",
            )
        if ready - sampled > SOON:
            yield self._bar("scoring", (sampled, ready), middle, 4, f"{name}\nscored in {short_time(ready - sampled)}")
        if story.played.outcome != "ready":
            return
        end = (
            story.step.t - story.step.report.seconds
            if story.step
            else story.gone.t
            if story.gone
            else self._until(story)
        )
        if end - ready > SOON:
            what = (
                "the trainer"
                if story.over
                else "the trainer, still"
                if self._window.whole
                else "the trainer; its step lies behind what was read"
            )
            yield self._bar("ready", (ready, end), middle, 2, f"{name}\nwaits {short_time(end - ready)} for {what}")

    def _outcome(self, story: TicketStory, middle: float) -> Iterator[str]:
        if story.step:
            row = story.step
            tip = f"ticket {story.ticket}\ntrained by step {row.report.step + 1}, in {short_time(row.report.seconds)}"
            yield self._bar("trains", (row.t - row.report.seconds, row.t), middle, BAR, tip)
        elif story.gone:
            reason = story.gone.reason.replace("_", " ")
            tip = f"ticket {story.ticket}\n{story.gone.outcome}: {reason}\n{story.gone.detail[:200]}".rstrip()
            yield self._mark("death", story.gone.t, middle, tip)

    def _bar(self, kind: str, interval: tuple[float, float], middle: float, height: float, tip: str) -> str:
        left, right = (moment - self._origin for moment in interval)
        return (
            f'<rect class="{kind}" x="{left:.3f}" y="{middle - height / 2:g}" width="{max(0.0, right - left):.3f}" height="{height:g}"'
            f' data-tip="{escape(tip)}"/>'
        )

    def _mark(self, kind: str, t: float, middle: float, tip: str) -> str:
        at = f"{t - self._origin:.3f}"
        return (
            f'<line class="{kind}" x1="{at}" x2="{at}" y1="{middle - BAR / 2:g}" y2="{middle + BAR / 2:g}"'
            f' data-tip="{escape(tip)}"/>'
        )

    def _swap(self, t: float, height: float) -> str:
        at = f"{t - self._origin:.3f}"
        tip = f"{duration(t)}\nversion {self._swaps.live_at(t)} live"
        return f'<line class="swap" x1="{at}" x2="{at}" y1="0" y2="{height:g}" data-tip="{tip}"/>'

    def _legend(self) -> str:
        versions = sorted(self._versions)
        by_version = [(f"v{version % COLOURS}", f"version {version}") for version in versions[:COLOURS]]
        more = f"<span>… to version {versions[-1]}: colours are used again</span>" if len(versions) > COLOURS else ""
        by_lag = [
            (kind, lag_name(kind, lag))
            for lag in sorted({min(lag, LAST) for lag in self._lags})
            for kind in [lag_class(lag)]
        ]
        others = [
            *(
                ("queued", "no token yet"),
                ("tool", "between turns"),
                ("others", "waits for its group"),
                ("scoring", "scored"),
            ),
            *(
                ("ready", "waits for the trainer"),
                ("trains", "its step"),
                ("death", "dropped or failed"),
                ("swap", "new weights live"),
            ),
        ]
        return f'<div class="keys lane-keys"><span class="keys version-keys">{_keys(by_version)}{more}</span><span class="keys lag-keys">{_keys(by_lag)}</span>{_keys(others)}</div>'


def _keys(keys: Iterable[tuple[str, str]]) -> str:
    return "".join(f'<span class="key"><i class="{kind}"></i>{text}</span>' for kind, text in keys)
