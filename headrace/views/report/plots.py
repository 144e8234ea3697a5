"""The curves and histograms of the report. Each function returns one `<figure>`, or an empty string if there is nothing to show."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from itertools import accumulate

from headrace.core.reports import LagStats
from headrace.facts.facts import Evaluated
from headrace.facts.group_numbers import Histogram, Sieve, discarded
from headrace.facts.records import StepRow
from headrace.facts.run_state import RunState, stride_of
from headrace.facts.run_totals import EngineSpan, over_steps, trimmed
from headrace.facts.texts import clip, number, percent, plural, reward_text, short_time, with_error
from headrace.facts.verdicts import experience_words, measured_on, stretches
from headrace.views.report.data import Bin, ReportData
from headrace.views.report.distributions import over_time
from headrace.views.report.svg import Chart, extent, figure, table

# --- The common parts of all charts over optimizer steps
# Range, tooltips, marks of resumes, and the note about averaged steps.


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
    for point in data.bins:
        chart.hover(point.first - 0.5, point.last + 0.5, f"{point.name}\n{tip(point)}")
    return chart


def resumes(chart: Chart, data: ReportData) -> Chart:
    for start in data.state.sessions[1:]:
        done = [row.report.step + 1 for row in data.state.rows if row.t <= start]
        chart.mark(done[-1] + 0.5 if done else data.bins[0].first - 0.5, "resumed")
    return chart


# --- The distance between sampler and trainer by lag
# A table over the whole run, and curves.


LAST = 5
"""Highest lag with its own colour, in every chart and in the text of rollouts; it stands for all higher lags too."""
LAG_COLOURS = {"0": "lag0", "1": "lag1", "2": "lag2", "3+": "lag3", "swapped": "c5", "experience": "c6"}
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
    rules = list(dict.fromkeys(rule for row in stats for rule in row.masked))
    head = [*HEAD, *(f"#masked: {rule}" for rule in rules)]
    note = (
        '<p class="note">Ratio = exp(trainer − sampler) of every token in the loss. "swapped": tokens of completions that were sampled '
        'by more than one version; "experience": those of good rollouts of earlier groups, of any age. The other rows do not include them.</p>'
    )
    return f"{table(head, [_cells(row, rules) for row in stats], 'lags')}{note}"


def _cells(stats: LagStats, rules: list[str]) -> list[str]:
    gaps = [number(stats.gaps.get(key, math.nan)) for key in ("p50", "p90", "p99", "max")]
    masked = [percent(stats.masked.get(rule, 0.0)) for rule in rules]
    return [
        escape(_named(stats.name)),
        f"{stats.tokens:,}",
        number(stats.ratio, 4),
        number(stats.kl, 4),
        percent(stats.ess),
        number(stats.chi2),
        percent(stats.clipped),
        *gaps,
        *masked,
    ]


def kl_by_lag(data: ReportData) -> str:
    """Draws k3 over steps, one line per lag."""
    names = sorted(data.state.totals.by_lag.of)
    if not names:
        return ""
    lines = {
        name: [(point.x, value) for point in data.bins if math.isfinite(value := _kl(point, name))] for name in names
    }
    within = (0.0, math.inf)
    chart = Chart(of_steps(data), extent((y for points in lines.values() for _, y in points), zero=True, within=within))
    for name, points in lines.items():
        chart.line(points, LAG_COLOURS[name])
    tips = {
        point.name: "\n".join(f"{_named(name)}: {number(_kl(point, name))}" for name in names) for point in data.bins
    }
    hovers(resumes(chart, data), data, lambda point: tips[point.name])
    legend = [(LAG_COLOURS[name], _named(name)) for name in names]
    return figure("KL(sampler ‖ trainer) by lag", chart.html("KL by lag"), legend, note_of(data, "k3 estimate, nats"))


def _named(name: str) -> str:
    return name if name in ("swapped", "experience") else f"lag {name}"


def _kl(point: Bin, name: str) -> float:
    return next((stats.kl for stats in over_steps(point.rows) if stats.name == name), math.nan)


# --- Histograms that compare the groups that were drawn with those that were trained: by length, and by mean reward.


SLOTS = 40
"""Slots of a histogram at most."""
SIEVE_COLOURS = ("c1", "c6", "c5")
"""Blue is drawn and dark grey is trained, as in the curves."""


def lengths(state: RunState) -> str:
    top = max([*state.lengths.drawn.counts, *state.lengths.trained.counts, 1])
    width = max(1, math.ceil((top + 1) / SLOTS))
    note = " ".join(part for part in ("Share of completions.", _unfinished(state)) if part)
    return _histograms(
        "Completion lengths, drawn against trained", state.lengths, low=0.0, width=width, unit="tokens", note=note
    )


def solve_rates(state: RunState) -> str:
    values = [*state.solve_rates.drawn.counts, *state.solve_rates.trained.counts]
    if not values:
        return ""
    low, high = min(values), max(values)
    width = (high - low) / (SLOTS // 2) or 1.0
    note = "Share of groups. Groups whose rollouts are all right or all wrong have no gradient and are never trained."
    return _histograms(
        "Solve rates of prompts, drawn against trained",
        state.solve_rates,
        low=low,
        width=width,
        unit="mean reward",
        note=note,
    )


def _unfinished(state: RunState) -> str:
    count = sum(fate.unfinished for fate in discarded(state.fates))
    return f"{plural(count, 'group')} cancelled before completion: missing here." if count else ""


def _histograms(title: str, sieve: Sieve, *, low: float, width: float, unit: str, note: str) -> str:
    """Draws three bars per slot. A difference between the second and the third is a bias of the run."""
    named = (("drawn", sieve.drawn), ("could be trained", sieve.trainable), ("trained", sieve.trained))
    shares = [_shares(histogram, low, width) for _, histogram in named]
    if not any(shares):
        return ""
    last = max(slot for bars in shares for slot in bars)
    highest = max(share for bars in shares for share in bars.values())
    ends = (low, low + (last + 1) * width)
    chart = Chart(ends, (0.0, min(1.0, highest * 1.08)), percent=True, x_label=unit, whole=width == int(width))
    for index, bars in enumerate(shares):
        for slot, share in bars.items():
            left = low + (slot + 0.08 + 0.28 * index) * width
            chart.box(left, left + 0.28 * width, 0, share, SIEVE_COLOURS[index])
    for slot in range(last + 1):
        left = low + slot * width
        lines = [f"{name} {percent(bars.get(slot, 0.0))}" for (name, _), bars in zip(named, shares, strict=True)]
        chart.hover(left, left + width, "\n".join([f"{number(left)} to {number(left + width)} {unit}", *lines]))
    legend = [(colour, _legend(*entry)) for colour, entry in zip(SIEVE_COLOURS, named, strict=True)]
    return figure(title, chart.html(title), legend, note)


def _shares(histogram: Histogram, low: float, width: float) -> dict[int, float]:
    counts: Counter[int] = Counter()
    for value, count in histogram.counts.items():
        counts[int((value - low) / width)] += count
    return {slot: count / histogram.count for slot, count in sorted(counts.items())}


def _legend(name: str, histogram: Histogram) -> str:
    return (
        f"{name}: {histogram.count:,}, mean {number(histogram.mean)}" if histogram.mean is not None else f"{name}: none"
    )


# --- Curves beside the reward
# The shares of groups and completions that are not trained, the lengths of completions, the throughput of both pools, and the held-out
# reward.


Line = tuple[str, str, Callable[[Bin], float]]
"""Colour, name, value."""

MAX_NOTE = 300
SHARE_COLOURS = 6
"""Colours of curves, which are used again for more."""


def failures(data: ReportData) -> str:
    """Draws the shares of drawn groups and rollouts that were cut off or never trained."""
    lines: list[Line] = [
        ("c2", "rollouts cut off at max_tokens", lambda point: _known(point.ended.truncated_share)),
        ("c5", "groups without contrast", lambda point: _known(point.ended.no_contrast_share)),
        ("c4", "groups dropped for other reasons", lambda point: _known(point.ended.dropped_share)),
        ("over", "rollouts failed", lambda point: _known(point.ended.failed_share)),
    ]
    return _lines(
        data,
        "Cut off, without contrast, dropped, failed",
        lines,
        "of the groups that ended since the step before",
        share=True,
    )


def _known(share: float | None) -> float:
    return math.nan if share is None else share


def lengths_over_steps(data: ReportData) -> str:
    lines: list[Line] = [
        ("c1", "drawn", lambda point: _share(point.ended.tokens, point.ended.completions)),
        ("c5", "trained", _trained_length),
    ]
    return _lines(data, "Completion length", lines, "tokens, mean")


def _trained_length(point: Bin) -> float:
    return _share(sum(sum(row.lengths) for row in point.rows), sum(len(row.lengths) for row in point.rows))


def throughput(data: ReportData) -> str:
    """Draws tokens per second of both pools, from the end of one step to the end of the next."""
    sampled = _Sampled(data.state.engine.spans)
    lines: list[Line] = [("c3", "sampled", sampled.rate), ("c1", "trained", _trained_rate)]
    return _lines(data, "Tokens a second", lines, "tokens of a step divided by its time, waiting included")


def _trained_rate(point: Bin) -> float:
    return _share(sum(row.report.loss_tokens for row in point.rows), sum(end - start for start, end in point.spans))


def agents(data: ReportData) -> str:
    """Draws the rewards of each agent, where an episode has several: in a game their sum says nothing. Empty if there is one agent."""
    names = dict.fromkeys(turn.agent for sample in data.samples for turn in sample.graph)
    lines: list[Line] = [
        (f"c{place % SHARE_COLOURS + 1}", name, partial(_of_agent, name))
        for place, name in enumerate(name for name in names if name)
    ]
    note = "sum of the rewards that an agent's own turns were given; mean over the trained rollouts"
    return _lines(data, "Reward of each agent", lines, note, any_sign=True) if lines else ""


def _of_agent(name: str, point: Bin) -> float:
    """Rewards of a role are named `role.name`."""
    own = [[value for reward, value in row.components.items() if reward.startswith(f"{name}.")] for row in point.rows]
    known = [sum(values) for values in own if values]
    return _share(sum(known), len(known))


def held_out(data: ReportData) -> str:
    """Draws every evaluation of the held-out prompts, then of each further set, with its error, and notes prompts without a reward; nothing of
    a set that has fewer than two evaluations."""
    state = data.state
    first = _evaluations(data, state.evals, "Held-out reward", data.range_of_rewards)
    return first + "".join(_evaluations(data, evals, f"Held-out reward, {name}") for name, evals in state.sets.items())


def _evaluations(
    data: ReportData, evals: Sequence[Evaluated], title: str, within: tuple[float, float] = (-math.inf, math.inf)
) -> str:
    """`within`: the least and the largest reward that there can be."""
    if len(evals) < 2:
        return ""
    low, high = of_steps(data)
    ends = (
        min([low, *(evaluation.step - 0.5 for evaluation in evals)]),
        max([high, *(evaluation.step + 0.5 for evaluation in evals)]),
    )
    sides = [evaluation.reward_mean + sign * evaluation.reward_sem for evaluation in evals for sign in (-1, 1)]
    chart = Chart(ends, extent([*sides, *(evaluation.reward_mean for evaluation in evals)], within=within))
    for alike in (parts := stretches(evals)):
        points = [(float(evaluation.step), evaluation.reward_mean) for evaluation in alike]
        chart.line(points, "c2").dots(points, "c2", [evaluation.reward_sem for evaluation in alike])
    for evaluation in evals:
        chart.hover(
            evaluation.step - 0.5,
            evaluation.step + 0.5,
            f"step {evaluation.step}, {evaluation.phase}\n{_measured(evaluation)}",
        )
    failed = [f"step {evaluation.step} on {measured_on(evaluation)}" for evaluation in evals if evaluation.failures]
    note = f"mean ± standard error; {'; '.join(failed) if failed else 'no prompt failed'}"
    if others := [f"{alike[0].step}" for alike in parts[1:]]:
        note += f"; the reward means something else from step {' and '.join(others)} on, by a resume"
    return figure(title, chart.html(title), note=clip(note, MAX_NOTE))


def _measured(evaluation: Evaluated) -> str:
    return f"{with_error(evaluation.reward_mean, evaluation.reward_sem)}\non {measured_on(evaluation)}"


class _Sampled:
    """The tokens that the engine had sampled by any moment, and for how long it was observed; interpolated between samples."""

    def __init__(self, spans: Sequence[EngineSpan]) -> None:
        self._spans = spans
        self._ends = [span.end for span in spans]
        self._tokens = [0, *accumulate(span.sampled for span in spans)]
        self._seconds = [0.0, *accumulate(span.end - span.start for span in spans)]

    def rate(self, point: Bin) -> float:
        """Returns sampled tokens per second; NaN if nothing was measured."""
        ends = [(self._by(start), self._by(end)) for start, end in point.spans]
        tokens, seconds = (sum(after[i] - before[i] for before, after in ends) for i in (0, 1))
        return _share(tokens, seconds)

    def _by(self, t: float) -> tuple[float, float]:
        place = bisect_right(self._ends, t)
        tokens, seconds = float(self._tokens[place]), self._seconds[place]
        if place < len(self._spans) and t > (span := self._spans[place]).start:
            part = (t - span.start) / (span.end - span.start)
            return tokens + part * span.sampled, seconds + t - span.start
        return tokens, seconds


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _lines(
    data: ReportData, title: str, lines: Sequence[Line], note: str, *, share: bool = False, any_sign: bool = False
) -> str:
    """Draws one curve per line. A chart of shares leaves out curves that are always 0, except the first. `any_sign`: whether values may
    be negative."""
    values = {name: [value(point) for point in data.bins] for _, name, value in lines}
    shown = [line for line in lines if not share or any(y > 0 for y in values[line[1]])] or lines[:1]
    every = [y for _, name, _ in shown for y in values[name]]
    if not any(map(math.isfinite, every)):
        return ""
    within = (0.0, 1.0) if share else (-math.inf if any_sign else 0.0, math.inf)
    chart = Chart(of_steps(data), extent(every, zero=True, within=within), percent=share)
    for colour, name, _ in shown:
        chart.line([(point.x, y) for point, y in zip(data.bins, values[name], strict=True)], colour)
    write = percent if share else number

    def tip(point: Bin) -> str:
        texts = [f"{name}: {write(found)}" for _, name, value in lines if math.isfinite(found := value(point))]
        return "\n".join(texts) or "nothing ended"

    hovers(resumes(chart, data), data, tip)
    return figure(title, chart.html(title), [(colour, name) for colour, name, _ in shown], note_of(data, note))


# --- plots ------------------------------------------------------------


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
        *over_time(data.columns, data.groups),
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
    points = [(point.x, point.mean(value)) for point in data.bins]
    share = within == SHARE
    chart = Chart(of_steps(data), extent((y for _, y in points), zero=zero, within=within), percent=share)
    resumes(chart.line(points, colour), data)
    hovers(chart, data, lambda point: f"{title.lower()} {(percent if share else number)(point.mean(value))}")
    return figure(title, chart.html(title), note=note_of(data, note))


def reward(data: ReportData) -> str:
    """Draws the reward of all drawn rollouts, of the trained ones with their spread, and on held-out prompts."""
    drawn = [(point.x, point.mean(lambda row: row.reward_drawn)) for point in data.bins]
    middle = [(point.x, point.mean(lambda row: row.reward_mean)) for point in data.bins]
    spread = [point.mean(lambda row: row.reward_std) for point in data.bins]
    evals = [evaluation for evaluation in data.state.evals if math.isfinite(evaluation.reward_mean)]
    least, most = data.range_of_rewards
    # One standard deviation would extend beyond every reward if most rewards are equal.
    lower = [(x, max(y - s, least)) for (x, y), s in zip(middle, spread, strict=True)]
    upper = [(x, min(y + s, most)) for (x, y), s in zip(middle, spread, strict=True)]
    seen = [y for _, y in [*lower, *upper, *drawn]] + [evaluation.reward_mean for evaluation in evals]
    low, high = of_steps(data)
    ends = (
        min([low, *(evaluation.step for evaluation in evals)]),
        max([high, *(evaluation.step + 0.5 for evaluation in evals)]),
    )
    chart = Chart(ends, extent(seen, within=(least, most)))
    chart.band(lower, upper, "c5").line(middle, "c5").line(drawn, "c1")
    resumes(chart, data)
    chart.dots(
        [(evaluation.step, evaluation.reward_mean) for evaluation in evals],
        "c2",
        [evaluation.reward_sem for evaluation in evals],
    )
    hovers(chart, data, _reward_tip)
    legend = [("c1", "all groups drawn: the policy's mean"), ("c5", "trained groups: mean, ± std of rollouts")]
    if evals:
        legend.append(("c2", "held-out prompts: mean ± standard error"))
    note = "Groups without contrast are not trained, so easy prompts leave the mean of the trained groups as the policy gets better."
    return figure("Reward", chart.html("Reward"), legend, note_of(data, note), wide=True)


def _reward_tip(point: Bin) -> str:
    lines = [
        f"drawn {reward_text(point.mean(lambda row: row.reward_drawn))}",
        f"trained {with_error(point.mean(lambda row: row.reward_mean), point.mean(lambda row: row.reward_std))}",
    ]
    names = sorted({name for row in point.rows for name in row.components})
    if len(names) > 1:
        for name in names:
            mean = point.mean(lambda row, name=name: row.components.get(name, math.nan))  # type: ignore[misc]
            lines.append(f"{name} {reward_text(mean)}")
    return "\n".join(lines)


def lag(data: ReportData) -> str:
    """Draws the shares of trained tokens by lag, stacked; lags above the bound have their own colour. Beside it the age of what the bound is not for."""
    bound = data.state.started.max_lag if data.state.started else math.inf
    chart = Chart(of_steps(data), (0.0, 1.0), percent=True)
    for point in data.bins:
        counts, base = point.lags(), 0.0
        total = sum(counts.values())
        for step in sorted(counts):
            share = counts[step] / total
            chart.box(point.first - 0.5, point.last + 0.5, base, base + share, lag_class(step, bound))
            base += share
    hovers(resumes(chart, data), data, _lag_tip)
    present = sorted({lag_class(step, bound): step for step in sorted(data.state.lags, reverse=True)}.items())
    legend = [(name, lag_name(name, step)) for name, step in present]
    drawn = figure("Lag of the trained tokens", chart.html("Lag"), legend, note_of(data, f"the bound is {bound}"))
    return drawn + _experience(data)


def _lag_tip(point: Bin) -> str:
    counts = point.lags()
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


def _experience(data: ReportData) -> str:
    """Draws how old the good rollouts of earlier groups were that each step trained again; nothing if none was."""
    if not data.state.ages:
        return ""
    tokens = lambda row: sum(row.ages.values()) or math.nan  # noqa: E731
    age = lambda row: sum(age * count for age, count in row.ages.items()) / tokens(row)  # noqa: E731
    words = experience_words(data.state)
    return curve(data, "Age of earlier rollouts", "c6", age, f"mean over their tokens, steps; {words}", zero=True)


def met_a_swap(data: ReportData) -> str:
    """Draws the share of completions that were sampled by more than one version."""
    if not any(row.swapped for point in data.bins for row in point.rows):
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
    means = [(point.x, point.mean(lambda row: row.report.ratio_mean)) for point in data.bins]
    tops = [(point.x, point.most(lambda row: row.report.ratio_max)) for point in data.bins]
    chart = Chart(of_steps(data), extent([1.0, *(y for _, y in means + tops)], within=POSITIVE)).rule(1.0)
    chart.line(tops, "c5").line(means, "c1")
    hovers(
        resumes(chart, data),
        data,
        lambda point: (
            f"mean {number(point.mean(lambda row: row.report.ratio_mean), 4)}\n"
            f"max {number(point.most(lambda row: row.report.ratio_max))}"
        ),
    )
    legend = [("c1", "mean"), ("c5", "max")]
    return figure("Ratio trainer / sampler", chart.html("Ratio"), legend, note_of(data, "dashed: on policy"))
