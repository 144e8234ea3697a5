"""The HTML of one run on the board: the parts of its report, made from the numbers as they are now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.observe.numbers.state import RunState
from headrace.observe.report import page, plots, sieves
from headrace.observe.report.data import ReportData, bins
from headrace.observe.report.lag_charts import kl_by_lag, lag_table


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


def part(name: str, run_dir: Path, state: RunState) -> str:
    """Returns a part of PARTS."""
    config = run_dir / "config.toml"
    data = ReportData(
        run_dir=run_dir,
        state=state,
        samples=(),
        config=config.read_text() if config.is_file() else "",
        bins=tuple(bins(state)) if name == "drawn" else (),
    )
    return PARTS[name](data)
