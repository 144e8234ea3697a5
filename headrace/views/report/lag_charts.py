"""The distance between sampler and trainer by lag: a table over the whole run, and curves."""

from __future__ import annotations

import math
from html import escape

from headrace.core.reports import LagStats
from headrace.facts.run_totals import over_steps
from headrace.facts.texts import number, percent
from headrace.views.report.axes import extent
from headrace.views.report.data import Bin, ReportData
from headrace.views.report.frame import hovers, note_of, of_steps, resumes
from headrace.views.report.svg import Chart, figure
from headrace.views.report.tables import table

LAST = 5
"""Highest lag with its own colour, in every chart and in the text of rollouts; it stands for all higher lags too."""
COLOURS = {"0": "lag0", "1": "lag1", "2": "lag2", "3+": "lag3", "swapped": "c5"}
HEAD = (
    "lag",
    "#tokens",
    "#mean ratio",
    "#KL (k3)",
    "#ESS",
    "#χ²",
    "#clipped",
    "#|Δ log-prob| p50",
    "#p90",
    "#p99",
    "#max",
)


def lag_class(lag: int, bound: float = math.inf) -> str:
    return "over" if lag > bound else f"lag{min(max(lag, 0), LAST)}"


def lag_name(name: str, lag: int) -> str:
    if name == "over":
        return "above the bound"
    return f"lag {lag} and more" if lag >= LAST else f"lag {lag}"


def lag_table(data: ReportData) -> str:
    """Returns the table; empty if no step reported statistics by lag."""
    stats = data.state.totals.by_lag.stats()
    if not stats:
        return ""
    rules = list(dict.fromkeys(rule for one in stats for rule in one.masked))
    head = [*HEAD, *(f"#masked: {rule}" for rule in rules)]
    note = (
        '<p class="note">Ratio = exp(trainer − sampler) of every token in the loss. "swapped": tokens of completions that were sampled '
        "by more than one version; the other rows do not include them.</p>"
    )
    return f"{table(head, [_cells(one, rules) for one in stats], 'lags')}{note}"


def _cells(one: LagStats, rules: list[str]) -> list[str]:
    gaps = [number(one.gaps.get(key, math.nan)) for key in ("p50", "p90", "p99", "max")]
    masked = [percent(one.masked.get(rule, 0.0)) for rule in rules]
    return [
        escape(_named(one.name)),
        f"{one.tokens:,}",
        number(one.ratio, 4),
        number(one.kl, 4),
        percent(one.ess),
        number(one.chi2),
        percent(one.clipped),
        *gaps,
        *masked,
    ]


def kl_by_lag(data: ReportData) -> str:
    """Draws k3 over steps, one line per lag."""
    names = sorted(data.state.totals.by_lag.of)
    if not names:
        return ""
    lines = {name: [(one.x, value) for one in data.bins if math.isfinite(value := _kl(one, name))] for name in names}
    within = (0.0, math.inf)
    chart = Chart(of_steps(data), extent((y for points in lines.values() for _, y in points), zero=True, within=within))
    for name, points in lines.items():
        chart.line(points, COLOURS[name])
    tips = {one.name: "\n".join(f"{_named(name)}: {number(_kl(one, name))}" for name in names) for one in data.bins}
    hovers(resumes(chart, data), data, lambda one: tips[one.name])
    legend = [(COLOURS[name], _named(name)) for name in names]
    return figure("KL(sampler ‖ trainer) by lag", chart.html("KL by lag"), legend, note_of(data, "k3 estimate, nats"))


def _named(name: str) -> str:
    return name if name == "swapped" else f"lag {name}"


def _kl(one: Bin, name: str) -> float:
    return next((stats.kl for stats in over_steps(one.rows) if stats.name == name), math.nan)
