"""The HTML of one run on the board: the parts of its report, made from the numbers as they are now. Of a long run, pools and distributions
are shown for some steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.facts.number_tables import StepColumns
from headrace.facts.run_state import RunState
from headrace.views.board.paging import chosen, pager, steps_of, strip
from headrace.views.board.step_windows import OF_POOLS, StepWindow, read_window
from headrace.views.report import page, plots, sieves
from headrace.views.report.data import ReportData, bins
from headrace.views.report.gantt import MAX_BARS
from headrace.views.report.lag_charts import kl_by_lag, lag_table

Steps = tuple[int, int] | None


def overview(data: ReportData) -> str:
    return page.headline(data.state) + page.banner(data.state) + page.cards(data.state)


def drawn(data: ReportData) -> str:
    """Returns what was drawn beside what was trained: lags, lengths, solve rates."""
    figures = [sieves.lengths(data.state), sieves.solve_rates(data.state)]
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


def part(name: str, run_dir: Path, state: RunState, columns: StepColumns, asked: Steps = None) -> str:
    """Returns a part of PARTS. `asked`: first and last step, for parts that show some steps of a long run."""
    long = steps_of(columns) > MAX_BARS or not state.whole
    if name == "pools" and long:
        return _some_pools(run_dir, state, columns, asked)
    if name == "drawn" and long:
        return _some_drawn(run_dir, state, columns, asked)
    return PARTS[name](_data(run_dir, state, bins_too=name == "drawn"))


def _data(run_dir: Path, state: RunState, bins_too: bool) -> ReportData:
    config = run_dir / "config.toml"
    return ReportData(
        run_dir=run_dir,
        state=state,
        samples=(),
        config=config.read_text() if config.is_file() else "",
        bins=tuple(bins(state)) if bins_too else (),
    )


def _some_pools(run_dir: Path, state: RunState, columns: StepColumns, asked: Steps) -> str:
    steps = steps_of(columns)
    first, last = chosen(steps, asked)
    shown = read_window(run_dir, state.started, first, last, kinds=OF_POOLS)
    head = strip(columns, first, shown.last) + pager(first, shown.last, steps) + _cut(shown)
    return head + page.pools(_data(run_dir, state, bins_too=False), shown.state)


def _some_drawn(run_dir: Path, state: RunState, columns: StepColumns, asked: Steps) -> str:
    steps = steps_of(columns)
    if asked is None:
        note = '<p class="note">Distributions and the table are of the whole run.</p>'
        return pager(1, steps, steps, whole=True) + note + drawn(_data(run_dir, state, bins_too=True))
    first, last = chosen(steps, asked)
    shown = read_window(run_dir, state.started, first, last)
    note = '<p class="note">Groups that were ready before the first of these steps are missing in the distributions of what was trained.</p>'
    head = pager(first, shown.last, steps, whole=True) + _cut(shown) + note
    return head + drawn(_data(run_dir, shown.state, bins_too=True))


def _cut(shown: StepWindow) -> str:
    words = "More steps would take too long to read at once."
    return f'<p class="note">{words}</p>' if shown.cut else ""
