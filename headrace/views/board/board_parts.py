"""The HTML of one run on the board: the parts of its report, made from the numbers as they are now. Of a long run, pools and distributions
are shown for some steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path

import numpy as np

from headrace.facts.health import Standing
from headrace.facts.kept_settings import resolved_config
from headrace.facts.number_tables import Numbers, StepColumns
from headrace.facts.run_state import RunState
from headrace.facts.texts import percent
from headrace.views.board.followed_run import OF_POOLS, StepWindow, read_window
from headrace.views.report import page, plots
from headrace.views.report.data import ReportData, bins
from headrace.views.report.distributions import over_time
from headrace.views.report.gantt import MAX_BARS
from headrace.views.report.overview import ON_BOARD
from headrace.views.report.plots import kl_by_lag, lag_table

# --- Tabs of long runs
# Which steps are shown, and the strip of the whole run from which they are chosen.


STRIP = 240
"""Bars of the strip at most."""
AT_FIRST = 40
"""Steps that are shown of the pools before others are chosen."""
LANES = (("engine", "busy"), ("trainer", "steps"))
HEIGHT = 22


def steps_of(columns: StepColumns) -> int:
    """Returns the steps that the numbers of a run have."""
    return int(columns.series("time/step_seconds")[0].max(initial=0))


def chosen(steps: int, asked: tuple[int, int] | None, at_first: int = AT_FIRST) -> tuple[int, int]:
    """Returns the first and the last step to be shown, both from 1 to `steps`; the newest `at_first` if none were asked for."""
    if asked is None:
        return max(1, steps - at_first + 1), steps
    first = min(max(1, asked[0]), steps)
    return first, min(max(first, asked[1]), steps)


def pager(first: int, last: int, steps: int, *, whole: bool = False) -> str:
    """Returns the buttons and fields by which steps are chosen. `whole`: whether all of them can be shown together."""
    width = last - first + 1
    buttons = [
        (1, width, "first"),
        (max(1, first - width), max(width, first - 1), "◀ earlier"),
        (min(steps - width + 1, last + 1), min(steps, last + width), "later ▶"),
        (steps - width + 1, steps, "newest"),
    ]
    made = "".join(
        f'<button type="button" data-steps="{max(1, left)}-{right}"{" disabled" * ((left, right) == (first, last))}>{text}</button>'
        for left, right, text in buttons
    )
    if whole:
        all_here = " disabled" * (width == steps)
        made = f'<button type="button" data-steps=""{all_here}>whole run</button>{made}'
    fields = "".join(
        f'<input type="number" min="1" max="{steps}" value="{value}" aria-label="{name} step">'
        for name, value in (("first", first), ("last", last))
    )
    return f'<form class="toolbar pager"><span>steps {fields} of {steps:,}</span><button>show</button>{made}</form>'


def strip(columns: StepColumns, first: int, last: int) -> str:
    """Draws how busy both pools were over the whole run, as bars that are chosen by a click; empty without such numbers."""
    steps = steps_of(columns)
    shares = [(name, look, _busy(columns, name, steps)) for name, look in LANES]
    if not any(len(counts) for _, _, counts in shares):
        return ""
    lanes = []
    for place, (name, look, counts) in enumerate(shares):
        top = place * (HEIGHT + 4)
        lanes.append(f'<rect class="ground" x="0" y="{top}" width="{steps}" height="{HEIGHT}"/>')
        lanes += [
            f'<rect class="{look}" x="{left}" y="{top + HEIGHT - tall:.1f}" width="{right - left}" height="{tall:.1f}"'
            f' data-step="{(left + right) // 2 + 1}" data-tip="{escape(_tip(left, right, name, busy))}"/>'
            for left, right, busy in counts
            for tall in [max(1.0, HEIGHT * busy)]
        ]
    height = len(shares) * (HEIGHT + 4)
    here = f'<rect class="window" x="{first - 1}" y="0" width="{last - first + 1}" height="{height}"/>'
    return (
        f'<div class="strip"><svg viewBox="0 0 {steps} {height}" preserveAspectRatio="none" height="{height}" shape-rendering="crispEdges">{"".join(lanes)}{here}</svg></div>'
        '<p class="note">The whole run: how much of the time engine (above) and trainer were busy. Click to see the steps of a place.</p>'
    )


def _tip(left: int, right: int, name: str, busy: float) -> str:
    return f"steps {left + 1:,} to {right:,}\n{name} busy {percent(busy)}"


def _busy(columns: StepColumns, name: str, steps: int) -> list[tuple[int, int, float]]:
    """Returns the steps before and at the end of each bar, and the share of their time in which a pool worked."""
    places, values = columns.series("time/engine_idle")
    if name == "engine":
        at, busy = places, 1 - values
    else:
        at, seconds = columns.series("time/step_seconds")
        waited_at, waits = columns.series("time/wait_seconds")
        if not np.array_equal(at, waited_at):
            return []
        busy = seconds / np.maximum(seconds + waits, 1e-9)
    ends = np.unique(np.linspace(0, steps, min(STRIP, steps) + 1).astype(int))
    cuts = np.searchsorted(at, ends, side="right")
    return [
        (int(ends[i]), int(ends[i + 1]), min(1.0, max(0.0, float(busy[cuts[i] : cuts[i + 1]].mean()))))
        for i in range(len(ends) - 1)
        if cuts[i] < cuts[i + 1]
    ]


# --- board parts ------------------------------------------------------------


Steps = tuple[int, int] | None


def overview(data: ReportData) -> str:
    return page.headline(data.state) + page.banner(data) + page.first_screen(data, ON_BOARD)


def drawn(data: ReportData) -> str:
    """Returns what was drawn beside what was trained: lags, lengths, solve rates."""
    figures = [*over_time(data.columns, data.groups), plots.lengths(data.state), plots.solve_rates(data.state)]
    if data.bins:
        staleness = (plots.lag, kl_by_lag, plots.ratio, plots.met_a_swap, plots.thrown, plots.pauses)
        figures += [draw(data) for draw in staleness]
    return f'<div class="figures">{"".join(figures)}</div>{lag_table(data)}'


PARTS: Mapping[str, Callable[[ReportData], str]] = {
    "overview": overview,
    "pools": page.pools,
    "drawn": drawn,
    "accounting": page.accounting,
    "warnings": page.warnings,
    "setup": page.setup,
}


def part(
    name: str,
    run_dir: Path,
    state: RunState,
    numbers: Numbers,
    *,
    asked: Steps = None,
    standing: Standing | None = None,
) -> str:
    """Returns a part of PARTS. `asked`: first and last step, for parts that show some steps of a long run. `standing`: the state of the
    run's process."""
    columns = numbers.columns
    long = steps_of(columns) > MAX_BARS or not state.whole
    if name == "pools" and long:
        return _some_pools(run_dir, state, numbers, asked)
    if name == "drawn" and long:
        return _some_drawn(run_dir, state, numbers, asked)
    data = _with(_data(run_dir, state, bins_too=name == "drawn"), numbers)
    return PARTS[name](dataclasses.replace(data, standing=standing))


def _with(data: ReportData, numbers: Numbers) -> ReportData:
    return dataclasses.replace(data, columns=numbers.columns, groups=numbers.groups.rows.view)


def _data(run_dir: Path, state: RunState, bins_too: bool) -> ReportData:
    return ReportData(
        run_dir=run_dir,
        state=state,
        samples=(),
        config=resolved_config(run_dir),
        bins=tuple(bins(state)) if bins_too else (),
    )


def _some_pools(run_dir: Path, state: RunState, numbers: Numbers, asked: Steps) -> str:
    columns = numbers.columns
    steps = steps_of(columns)
    first, last = chosen(steps, asked)
    shown = read_window(run_dir, state.started, first, last, kinds=OF_POOLS)
    head = strip(columns, first, shown.last) + pager(first, shown.last, steps) + _cut(shown)
    return head + page.pools(_with(_data(run_dir, state, bins_too=False), numbers), shown.state)


def _some_drawn(run_dir: Path, state: RunState, numbers: Numbers, asked: Steps) -> str:
    steps = steps_of(numbers.columns)
    if asked is None:
        note = '<p class="note">Distributions and the table are of the whole run.</p>'
        return pager(1, steps, steps, whole=True) + note + drawn(_with(_data(run_dir, state, bins_too=True), numbers))
    first, last = chosen(steps, asked)
    shown = read_window(run_dir, state.started, first, last)
    note = '<p class="note">Groups that were ready before the first of these steps are missing in the distributions of what was trained.</p>'
    head = pager(first, shown.last, steps, whole=True) + _cut(shown) + note
    return head + drawn(_data(run_dir, shown.state, bins_too=True))


def _cut(shown: StepWindow) -> str:
    words = "More steps would take too long to read at once."
    return f'<p class="note">{words}</p>' if shown.cut else ""
