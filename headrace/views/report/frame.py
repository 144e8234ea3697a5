"""The common parts of all charts over optimizer steps: range, tooltips, marks of resumes, and the note about averaged steps."""

from __future__ import annotations

from collections.abc import Callable

from headrace.facts.run_state import stride_of
from headrace.views.report.data import Bin, ReportData
from headrace.views.report.svg import Chart


def of_steps(data: ReportData) -> tuple[float, float]:
    return data.bins[0].first - 0.5, data.bins[-1].last + 0.5


def note_of(data: ReportData, note: str) -> str:
    """Returns the note, with the number of steps per point if that is more than one."""
    per = len(data.bins[0].rows)
    stride = 1 if data.state.whole else stride_of(data.state.totals.steps)
    parts = (
        note.rstrip("."),
        f"one step in {stride:,} is drawn" if stride > 1 else "",
        f"each point is the mean of {per} steps" if per > 1 else "",
    )
    return "; ".join(part for part in parts if part)


def hovers(chart: Chart, data: ReportData, tip: Callable[[Bin], str]) -> Chart:
    for one in data.bins:
        chart.hover(one.first - 0.5, one.last + 0.5, f"{one.name}\n{tip(one)}")
    return chart


def resumes(chart: Chart, data: ReportData) -> Chart:
    for start in data.state.sessions[1:]:
        done = [row.report.step + 1 for row in data.state.rows if row.t <= start]
        chart.mark(done[-1] + 0.5 if done else data.bins[0].first - 0.5, "resumed")
    return chart
