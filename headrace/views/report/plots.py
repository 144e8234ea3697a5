"""The curves and histograms of the report. Each function returns one `<figure>`, or an empty string if there is nothing to show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from headrace.facts.records import StepRow
from headrace.facts.run_totals import trimmed
from headrace.facts.texts import number, percent, plural, reward_text, short_time, with_error
from headrace.views.report.axes import extent
from headrace.views.report.curves import agents, failures, held_out, lengths_over_steps, throughput
from headrace.views.report.data import Bin, ReportData
from headrace.views.report.frame import hovers, note_of, of_steps, resumes
from headrace.views.report.lag_charts import kl_by_lag, lag_class, lag_name
from headrace.views.report.sieves import lengths, solve_rates
from headrace.views.report.svg import Chart, figure

POSITIVE = (0.0, math.inf)
SHARE = (0.0, 1.0)


def all_plots(data: ReportData) -> str:
    if not data.bins:
        return '<p class="empty">No optimizer step was trained: there is nothing to plot.</p>' + lengths(data.state)
    return "".join([*_learning(data), *_staleness(data), *_trainer(data)])


def _learning(data: ReportData) -> Sequence[str]:
    return (
        reward(data),
        agents(data),
        held_out(data),
        failures(data),
        lengths_over_steps(data),
        lengths(data.state),
        solve_rates(data.state),
    )


def _staleness(data: ReportData) -> Sequence[str]:
    kl = curve(data, "KL(sampler ‖ trainer)", "c4", lambda row: row.report.kl, "k3 estimate, nats", within=POSITIVE)
    return lag(data), kl_by_lag(data) or kl, ratio(data), met_a_swap(data), thrown(data), pauses(data), throughput(data)


def _trainer(data: ReportData) -> Sequence[str]:
    return (
        curve(
            data,
            "Loss",
            "c1",
            lambda row: row.report.loss,
            "of the optimizer step; it need not fall when rewards rise",
        ),
        curve(
            data,
            "Entropy",
            "c1",
            lambda row: row.report.entropy,
            "nats, mean over trained tokens",
            within=POSITIVE,
        ),
        curve(
            data,
            "Clip fraction",
            "c2",
            lambda row: row.report.clip_fraction,
            "share of tokens clipped",
            zero=True,
            within=SHARE,
        ),
        curve(data, "Gradient norm", "c1", lambda row: row.report.grad_norm, "before clipping", zero=True),
        curve(data, "Learning rate", "c3", lambda row: row.report.lr, "", zero=True),
    )


def curve(
    data: ReportData,
    title: str,
    colour: str,
    value: Callable[[StepRow], float],
    note: str,
    *,
    zero: bool = False,
    within: tuple[float, float] = (-math.inf, math.inf),
) -> str:
    """Draws one number per step. `within`: its possible values; a share is written in per cent."""
    points = [(one.x, one.mean(value)) for one in data.bins]
    share = within == SHARE
    chart = Chart(of_steps(data), extent((y for _, y in points), zero=zero, within=within), percent=share)
    resumes(chart.line(points, colour), data)
    hovers(chart, data, lambda one: f"{title.lower()} {(percent if share else number)(one.mean(value))}")
    return figure(title, chart.html(title), note=note_of(data, note))


def reward(data: ReportData) -> str:
    """Draws the reward of all drawn rollouts, of the trained ones with their spread, and on held-out prompts."""
    drawn = [(one.x, one.mean(lambda row: row.reward_drawn)) for one in data.bins]
    middle = [(one.x, one.mean(lambda row: row.reward_mean)) for one in data.bins]
    spread = [one.mean(lambda row: row.reward_std) for one in data.bins]
    evals = [one for one in data.state.evals if math.isfinite(one.reward_mean)]
    least, most = data.range_of_rewards
    # One standard deviation would extend beyond every reward if most rewards are equal.
    lower = [(x, max(y - s, least)) for (x, y), s in zip(middle, spread, strict=True)]
    upper = [(x, min(y + s, most)) for (x, y), s in zip(middle, spread, strict=True)]
    seen = [y for _, y in [*lower, *upper, *drawn]] + [one.reward_mean for one in evals]
    low, high = of_steps(data)
    ends = min([low, *(one.step for one in evals)]), max([high, *(one.step + 0.5 for one in evals)])
    chart = Chart(ends, extent(seen, within=(least, most)))
    chart.band(lower, upper, "c5").line(middle, "c5").line(drawn, "c1")
    resumes(chart, data)
    chart.dots([(one.step, one.reward_mean) for one in evals], "c2", [one.reward_sem for one in evals])
    hovers(chart, data, _reward_tip)
    legend = [("c1", "all groups drawn: the policy's mean"), ("c5", "trained groups: mean, ± std of rollouts")]
    if evals:
        legend.append(("c2", "held-out prompts: mean ± standard error"))
    note = "Groups without contrast are not trained, so easy prompts leave the mean of the trained groups as the policy gets better."
    return figure("Reward", chart.html("Reward"), legend, note_of(data, note), wide=True)


def _reward_tip(one: Bin) -> str:
    lines = [
        f"drawn {reward_text(one.mean(lambda row: row.reward_drawn))}",
        f"trained {with_error(one.mean(lambda row: row.reward_mean), one.mean(lambda row: row.reward_std))}",
    ]
    names = sorted({name for row in one.rows for name in row.components})
    if len(names) > 1:
        for name in names:
            mean = one.mean(lambda row, name=name: row.components.get(name, math.nan))  # type: ignore[misc]
            lines.append(f"{name} {reward_text(mean)}")
    return "\n".join(lines)


def lag(data: ReportData) -> str:
    """Draws the shares of trained tokens by lag, stacked; lags above the bound have their own colour."""
    bound = data.state.started.max_lag if data.state.started else math.inf
    chart = Chart(of_steps(data), (0.0, 1.0), percent=True)
    for one in data.bins:
        counts, base = one.lags(), 0.0
        total = sum(counts.values())
        for step in sorted(counts):
            share = counts[step] / total
            chart.box(one.first - 0.5, one.last + 0.5, base, base + share, lag_class(step, bound))
            base += share
    hovers(resumes(chart, data), data, _lag_tip)
    present = sorted({lag_class(step, bound): step for step in sorted(data.state.lags, reverse=True)}.items())
    legend = [(name, lag_name(name, step)) for name, step in present]
    return figure("Lag of the trained tokens", chart.html("Lag"), legend, note_of(data, f"the bound is {bound}"))


def _lag_tip(one: Bin) -> str:
    counts = one.lags()
    total = sum(counts.values()) or 1
    return "\n".join(f"lag {step}: {percent(count / total)}" for step, count in sorted(counts.items()))


def thrown(data: ReportData) -> str:
    """Draws trimmed tokens per step; nothing if none were trimmed."""
    if not data.state.started or not data.state.totals.trimmed:
        return ""
    bound = data.state.started.max_lag
    return curve(
        data, "Trimmed tokens", "c2", lambda row: trimmed(row, bound), "older than the bound: context only", zero=True
    )


def met_a_swap(data: ReportData) -> str:
    """Draws the share of completions that were sampled by more than one version."""
    if not any(row.swapped for one in data.bins for row in one.rows):
        return ""

    def share(row: StepRow) -> float:
        return row.swapped / len(row.lengths) if row.lengths else math.nan

    note = "share of the trained completions"
    return curve(data, "Completions that met a swap", "c4", share, note, zero=True, within=SHARE)


def pauses(data: ReportData) -> str:
    """Draws how long each swap held generation back, if any did."""
    swaps = [swap for swap in data.state.swaps if swap.pause]
    if not swaps:
        return ""
    points = [(float(swap.update.version), swap.pause) for swap in swaps]
    low, high = of_steps(data)
    ends = min([low, *(x - 0.5 for x, _ in points)]), max([high, *(x + 0.5 for x, _ in points)])
    chart = Chart(ends, extent((y for _, y in points), zero=True), x_label="version").dots(points, "c2")
    for swap in swaps:
        tip = f"version {swap.update.version}\n{short_time(swap.pause)}, {plural(swap.interrupted, 'rollout')} interrupted"
        chart.hover(swap.update.version - 0.5, swap.update.version + 0.5, tip)
    return figure("Generation held back by swaps", chart.html("Pauses"), (), "seconds")


def ratio(data: ReportData) -> str:
    means = [(one.x, one.mean(lambda row: row.report.ratio_mean)) for one in data.bins]
    tops = [(one.x, one.most(lambda row: row.report.ratio_max)) for one in data.bins]
    chart = Chart(of_steps(data), extent([1.0, *(y for _, y in means + tops)], within=POSITIVE)).rule(1.0)
    chart.line(tops, "c5").line(means, "c1")
    hovers(
        resumes(chart, data),
        data,
        lambda one: (
            f"mean {number(one.mean(lambda row: row.report.ratio_mean), 4)}\n"
            f"max {number(one.most(lambda row: row.report.ratio_max))}"
        ),
    )
    legend = [("c1", "mean"), ("c5", "max")]
    return figure("Ratio trainer / sampler", chart.html("Ratio"), legend, note_of(data, "dashed: on policy"))
