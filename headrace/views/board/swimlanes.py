"""Rollouts over time: a lane for each, in blocks by ticket, drawn from its admission to the step that trained it or to the reason why none did.
Zoomed as the chart of the pools is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import get_args

from headrace.core.batches import Group
from headrace.facts.number_tables import StepColumns
from headrace.facts.rollout_view import calls_of
from headrace.facts.run_state import RunState
from headrace.facts.texts import duration, number, plural, short_time
from headrace.views.board.lane_facts import Kind, LaneWindow, TicketStory, VersionStretch, read_lanes, stretches
from headrace.views.board.paging import chosen, pager, steps_of, strip
from headrace.views.report.gantt import time_chart
from headrace.views.report.lag_charts import LAST, lag_class, lag_name

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
    below = "".join(f'<p class="note">{escape(one)}</p>' for one in notes)
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
    if any(one.played and one.played.lengths and not any(one.played.times) for one in window.stories):
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
                story, [*found[:-1], *(one._replace(end=end) for one in found[-1:])], middle, words
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
        for one in found:
            lag = max(0, at - one.version)
            self._versions.add(one.version)
            self._lags.add(lag)
            count = f"{plural(one.tokens, 'token')} of " if one.tokens else ""
            mixed = ", mixed weights" if one.mixed else ""
            tip = f"{words}\n{count}version {one.version}, lag {lag}{mixed}\n{duration(one.start)}, {short_time(one.end - one.start)}"
            kind = f"v{one.version % COLOURS} {lag_class(lag)}{' mixed' * one.mixed}"
            yield self._bar(kind, (one.start, one.end), middle, BAR, tip)

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
        left, right = (one - self._origin for one in interval)
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
        by_version = [(f"v{one % COLOURS}", f"version {one}") for one in versions[:COLOURS]]
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
