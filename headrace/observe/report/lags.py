"""How far sampler and trainer are apart, lag by lag: a table over the whole run and curves."""

from __future__ import annotations

import math
from html import escape

from headrace.observe.lags import over_steps
from headrace.observe.report.data import Bin, ReportData
from headrace.observe.report.svg import Chart, extent, figure
from headrace.observe.text import number, percent
from headrace.reports import LagStats

COLOURS = {"0": "c1", "1": "c2", "2": "c3", "3+": "c4", "swapped": "c5"}
HEAD = ("lag", "tokens", "mean ratio", "KL (k3)", "ESS", "χ²", "clipped", "|Δ log-prob| p50", "p90", "p99", "max")


def lag_table(data: ReportData) -> str:
    """Empty where no step told of it."""
    stats = over_steps(data.state.rows)
    if not stats:
        return ""
    rules = list(dict.fromkeys(rule for one in stats for rule in one.masked))
    head = "".join(f"<th>{escape(name)}</th>" for name in (*HEAD, *(f"masked: {rule}" for rule in rules)))
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in _cells(one, rules))}</tr>" for one in stats)
    note = (
        '<p class="note">Ratio = exp(trainer − sampler), of every token in the loss. "swapped": tokens of completions that more than '
        "one version sampled; the other rows leave them out.</p>"
    )
    return f'<div class="scroll"><table class="lags"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}'


def _cells(one: LagStats, rules: list[str]) -> list[str]:
    gaps = [number(one.gaps.get(key, math.nan)) for key in ("p50", "p90", "p99", "max")]
    masked = [percent(one.masked.get(rule, 0.0)) for rule in rules]
    return [
        escape(one.name),
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
    """k3 over steps, one line a lag."""
    names = [one.name for one in over_steps(data.state.rows)]
    if not names:
        return ""
    lines = {name: [(one.x, value) for one in data.bins if math.isfinite(value := _kl(one, name))] for name in names}
    low, high = data.bins[0].first - 0.5, data.bins[-1].last + 0.5
    chart = Chart((low, high), extent((y for points in lines.values() for _, y in points), zero=True))
    for name, points in lines.items():
        chart.line(points, COLOURS.get(name, "c6"))
    for one in data.bins:
        tip = "\n".join(f"lag {name}: {number(_kl(one, name))}" for name in names)
        chart.hover(one.first - 0.5, one.last + 0.5, f"{one.name}\n{tip}")
    legend = [(COLOURS.get(name, "c6"), name) for name in names]
    return figure("KL(sampler ‖ trainer) by lag", chart.svg("KL by lag"), legend, "k3 estimate, nats")


def _kl(one: Bin, name: str) -> float:
    return next((stats.kl for stats in over_steps(one.rows) if stats.name == name), math.nan)
