"""The curves and histograms of the report. Each function: data in, one `<figure>` out, or empty when there is nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

from headrace.observe.measures import trimmed, trimmed_tokens
from headrace.observe.records import StepRow
from headrace.observe.report.data import Bin, ReportData
from headrace.observe.report.lags import kl_by_lag
from headrace.observe.report.sieves import lengths, solve_rates
from headrace.observe.report.svg import Chart, extent, figure
from headrace.observe.text import number, percent, percent_tick, plural, short_time, tick

MAX_LAGS = 6
"""Lags with a colour of their own; the last one stands for all above it too."""


def all_plots(data: ReportData) -> str:
    if not data.bins:
        return '<p class="empty">No optimizer step was trained: there is nothing to plot.</p>' + lengths(data.state)
    figures = [
        reward(data),
        lag(data),
        thrown(data),
        met_a_swap(data),
        pauses(data),
        lengths(data.state),
        solve_rates(data.state),
        curve(data, "Entropy", "c1", lambda row: row.report.entropy, "nats, mean over trained tokens"),
        ratio(data),
        curve(
            data,
            "Clip fraction",
            "c2",
            lambda row: row.report.clip_fraction,
            "share of tokens clipped",
            percent_tick,
            True,
        ),
        kl_by_lag(data) or curve(data, "KL(sampler ‖ trainer)", "c4", lambda row: row.report.kl, "k3 estimate, nats"),
        curve(data, "Gradient norm", "c1", lambda row: row.report.grad_norm, "before clipping", zero=True),
        curve(data, "Learning rate", "c3", lambda row: row.report.lr, "", zero=True),
    ]
    return "".join(figures)


def _width(data: ReportData) -> tuple[float, float]:
    return data.bins[0].first - 0.5, data.bins[-1].last + 0.5


def _binned(data: ReportData) -> str:
    per = len(data.bins[0].rows)
    return f"Each point is the mean of {per} steps" if per > 1 else ""


def _hovers(chart: Chart, data: ReportData, tip: Callable[[Bin], str]) -> Chart:
    for one in data.bins:
        chart.hover(one.first - 0.5, one.last + 0.5, f"{one.name}\n{tip(one)}")
    return chart


def _resumes(chart: Chart, data: ReportData) -> Chart:
    for start in data.state.sessions[1:]:
        done = [row.report.step + 1 for row in data.state.rows if row.t <= start]
        chart.mark(done[-1] + 0.5 if done else data.bins[0].first - 0.5, "resumed")
    return chart


def curve(
    data: ReportData,
    title: str,
    colour: str,
    value: Callable[[StepRow], float],
    note: str,
    text: Callable[[float], str] = tick,
    zero: bool = False,
) -> str:
    """One number a step."""
    points = [(one.x, one.mean(value)) for one in data.bins]
    chart = Chart(_width(data), extent((y for _, y in points), zero=zero), y_text=text).line(points, colour)
    _hovers(_resumes(chart, data), data, lambda one: f"{title.lower()} {text(one.mean(value))}")
    return figure(title, chart.svg(title), note="; ".join(part for part in (note, _binned(data)) if part))


def reward(data: ReportData) -> str:
    """Reward of all that was drawn, of what was trained with the spread of single rollouts, and on held-out prompts."""
    drawn = [(one.x, one.mean(lambda row: row.reward_drawn)) for one in data.bins]
    middle = [(one.x, one.mean(lambda row: row.reward_mean)) for one in data.bins]
    spread = [one.mean(lambda row: row.reward_std) for one in data.bins]
    lower = [(x, y - s) for (x, y), s in zip(middle, spread, strict=True)]
    upper = [(x, y + s) for (x, y), s in zip(middle, spread, strict=True)]
    evals = [one for one in data.state.evals if math.isfinite(one.reward_mean)]
    seen = [y for _, y in [*lower, *upper, *drawn]] + [one.reward_mean for one in evals]
    low, high = _width(data)
    ends = min([low, *(one.step for one in evals)]), max([high, *(one.step + 0.5 for one in evals)])
    chart = Chart(ends, extent(seen), width=1140, height=300)
    chart.band(lower, upper, "c5").line(middle, "c5").line(drawn, "c1")
    _resumes(chart, data)
    chart.dots([(one.step, one.reward_mean) for one in evals], "c2", [one.reward_sem for one in evals])
    _hovers(chart, data, _reward_tip)
    legend = [("c1", "all groups drawn: the policy's mean"), ("c5", "trained groups: mean, ± std of rollouts")]
    if evals:
        legend.append(("c2", "held-out prompts: mean ± standard error"))
    note = "Groups without contrast are not trained: as the policy gets better, easy prompts leave the mean of the trained ones."
    return figure("Reward", chart.svg("Reward"), legend, " ".join([note, _binned(data)]), wide=True)


def _reward_tip(one: Bin) -> str:
    lines = [
        f"drawn {one.mean(lambda row: row.reward_drawn):.3f}",
        f"trained {one.mean(lambda row: row.reward_mean):.3f} ± {one.mean(lambda row: row.reward_std):.3f}",
    ]
    names = sorted({name for row in one.rows for name in row.components})
    if len(names) > 1:
        lines += [f"{name} {one.mean(lambda row, n=name: row.components.get(n, math.nan)):.3f}" for name in names]  # type: ignore[misc]
    return "\n".join(lines)


def lag(data: ReportData) -> str:
    """Shares of trained tokens by lag, stacked; lags above the bound stand out."""
    bound = data.state.started.max_lag if data.state.started else math.inf
    chart = Chart(_width(data), (0.0, 1.0), y_text=percent_tick)
    for one in data.bins:
        counts, base = one.lags(), 0.0
        total = sum(counts.values())
        for step in sorted(counts):
            share = counts[step] / total
            chart.box(one.first - 0.5, one.last + 0.5, base, base + share, _lag_class(step, bound))
            base += share
    _hovers(_resumes(chart, data), data, _lag_tip)
    present = sorted({_lag_class(step, bound): step for step in sorted(data.state.lags, reverse=True)}.items())
    legend = [(name, _lag_name(name, step)) for name, step in present]
    return figure("Lag of the trained tokens", chart.svg("Lag"), legend, f"the bound is {bound}")


def _lag_class(step: int, bound: float) -> str:
    return "over" if step > bound else f"lag{min(step, MAX_LAGS - 1)}"


def _lag_name(name: str, step: int) -> str:
    if name == "over":
        return "above the bound"
    return f"{step} and more" if step >= MAX_LAGS - 1 else str(step)


def _lag_tip(one: Bin) -> str:
    counts = one.lags()
    total = sum(counts.values()) or 1
    return "\n".join(f"lag {step}: {percent(count / total)}" for step, count in sorted(counts.items()))


def thrown(data: ReportData) -> str:
    """Tokens trimmed, a step; nothing where none was."""
    if not data.state.started or not trimmed_tokens(data.state):
        return ""
    bound = data.state.started.max_lag
    return curve(
        data, "Trimmed tokens", "c2", lambda row: trimmed(row, bound), "older than the bound: context only", zero=True
    )


def met_a_swap(data: ReportData) -> str:
    """Share of the completions that more than one version sampled."""
    if not any(row.swapped for one in data.bins for row in one.rows):
        return ""

    def share(row: StepRow) -> float:
        return row.swapped / len(row.lengths) if row.lengths else math.nan

    return curve(data, "Completions that met a swap", "c4", share, "share of the trained ones", percent_tick, True)


def pauses(data: ReportData) -> str:
    """How long each swap held generation back, where one did."""
    swaps = [swap for swap in data.state.swaps if swap.pause]
    if not swaps:
        return ""
    points = [(float(swap.update.version), swap.pause) for swap in swaps]
    chart = Chart(_width(data), extent((y for _, y in points), zero=True), x_label="version").dots(points, "c2")
    for swap in swaps:
        tip = f"version {swap.update.version}\n{short_time(swap.pause)}, {plural(swap.interrupted, 'rollout')} interrupted"
        chart.hover(swap.update.version - 0.5, swap.update.version + 0.5, tip)
    return figure("Generation held back by swaps", chart.svg("Pauses"), (), "seconds")


def ratio(data: ReportData) -> str:
    means = [(one.x, one.mean(lambda row: row.report.ratio_mean)) for one in data.bins]
    tops = [(one.x, one.most(lambda row: row.report.ratio_max)) for one in data.bins]
    chart = Chart(_width(data), extent(y for _, y in means + tops)).rule(1.0, "on policy")
    chart.line(tops, "c5").line(means, "c1")
    _hovers(
        _resumes(chart, data),
        data,
        lambda one: (
            f"mean {number(one.mean(lambda row: row.report.ratio_mean), 4)}\n"
            f"max {number(one.most(lambda row: row.report.ratio_max))}"
        ),
    )
    return figure("Ratio trainer / sampler", chart.svg("Ratio"), [("c1", "mean"), ("c5", "max")], _binned(data))
