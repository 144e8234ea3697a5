"""Curves beside the reward: the shares of groups and completions that are not trained, the lengths of completions, the throughput of
both pools, and the held-out reward."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

from headrace.facts.facts import Evaluated
from headrace.facts.run_totals import EngineSpan
from headrace.facts.texts import clip, number, percent, with_error
from headrace.facts.verdicts import measured_on
from headrace.views.report.axes import extent
from headrace.views.report.data import Bin, ReportData
from headrace.views.report.frame import hovers, note_of, of_steps, resumes
from headrace.views.report.svg import Chart, figure

Line = tuple[str, str, Callable[[Bin], float]]
"""Colour, name, value."""

MAX_NOTE = 300
COLOURS = 6
"""Colours of curves, which are used again for more."""


def failures(data: ReportData) -> str:
    """Draws the shares of drawn groups and rollouts that were cut off or never trained."""
    lines: list[Line] = [
        ("c2", "rollouts cut off at max_tokens", lambda one: _known(one.ended.truncated_share)),
        ("c5", "groups without contrast", lambda one: _known(one.ended.no_contrast_share)),
        ("c4", "groups dropped for other reasons", lambda one: _known(one.ended.dropped_share)),
        ("over", "rollouts failed", lambda one: _known(one.ended.failed_share)),
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
        ("c1", "drawn", lambda one: _share(one.ended.tokens, one.ended.completions)),
        ("c5", "trained", _trained_length),
    ]
    return _lines(data, "Completion length", lines, "tokens, mean")


def _trained_length(one: Bin) -> float:
    return _share(sum(sum(row.lengths) for row in one.rows), sum(len(row.lengths) for row in one.rows))


def throughput(data: ReportData) -> str:
    """Draws tokens per second of both pools, from the end of one step to the end of the next."""
    sampled = _Sampled(data.state.engine.spans)
    lines: list[Line] = [("c3", "sampled", sampled.rate), ("c1", "trained", _trained_rate)]
    return _lines(data, "Tokens a second", lines, "tokens of a step divided by its time, waiting included")


def _trained_rate(one: Bin) -> float:
    return _share(sum(row.report.loss_tokens for row in one.rows), sum(end - start for start, end in one.spans))


def agents(data: ReportData) -> str:
    """Draws the rewards of each agent, where an episode has several: in a game their sum says nothing. Empty if there is one agent."""
    names = dict.fromkeys(turn.agent for one in data.samples for turn in one.graph)
    lines: list[Line] = [
        (f"c{place % COLOURS + 1}", name, partial(_of_agent, name))
        for place, name in enumerate(name for name in names if name)
    ]
    note = "sum of the rewards that an agent's own turns were given; mean over the trained rollouts"
    return _lines(data, "Reward of each agent", lines, note, any_sign=True) if lines else ""


def _of_agent(name: str, one: Bin) -> float:
    """Rewards of a role are named `role.name`."""
    own = [[value for reward, value in row.components.items() if reward.startswith(f"{name}.")] for row in one.rows]
    known = [sum(values) for values in own if values]
    return _share(sum(known), len(known))


def held_out(data: ReportData) -> str:
    """Draws every evaluation with its error, and notes prompts without a reward; nothing if there are fewer than two evaluations."""
    evals = data.state.evals
    if len(evals) < 2:
        return ""
    low, high = of_steps(data)
    ends = min([low, *(one.step - 0.5 for one in evals)]), max([high, *(one.step + 0.5 for one in evals)])
    sides = [one.reward_mean + sign * one.reward_sem for one in evals for sign in (-1, 1)]
    chart = Chart(ends, extent([*sides, *(one.reward_mean for one in evals)], within=data.range_of_rewards))
    points = [(float(one.step), one.reward_mean) for one in evals]
    chart.line(points, "c2").dots(points, "c2", [one.reward_sem for one in evals])
    for one in evals:
        chart.hover(one.step - 0.5, one.step + 0.5, f"step {one.step}, {one.phase}\n{_measured(one)}")
    failed = [f"step {one.step} on {measured_on(one)}" for one in evals if one.failures]
    note = f"mean ± standard error; {'; '.join(failed) if failed else 'no prompt failed'}"
    return figure("Held-out reward", chart.html("Held-out reward"), note=clip(note, MAX_NOTE))


def _measured(one: Evaluated) -> str:
    return f"{with_error(one.reward_mean, one.reward_sem)}\non {measured_on(one)}"


class _Sampled:
    """The tokens that the engine had sampled by any moment, and for how long it was observed; interpolated between samples."""

    def __init__(self, spans: Sequence[EngineSpan]) -> None:
        self._spans = spans
        self._ends = [span.end for span in spans]
        self._tokens = [0, *accumulate(span.sampled for span in spans)]
        self._seconds = [0.0, *accumulate(span.end - span.start for span in spans)]

    def rate(self, one: Bin) -> float:
        """Returns sampled tokens per second; NaN if nothing was measured."""
        ends = [(self._by(start), self._by(end)) for start, end in one.spans]
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
    values = {name: [value(one) for one in data.bins] for _, name, value in lines}
    shown = [line for line in lines if not share or any(one > 0 for one in values[line[1]])] or lines[:1]
    every = [one for _, name, _ in shown for one in values[name]]
    if not any(map(math.isfinite, every)):
        return ""
    within = (0.0, 1.0) if share else (-math.inf if any_sign else 0.0, math.inf)
    chart = Chart(of_steps(data), extent(every, zero=True, within=within), percent=share)
    for colour, name, _ in shown:
        chart.line([(one.x, y) for one, y in zip(data.bins, values[name], strict=True)], colour)
    write = percent if share else number

    def tip(one: Bin) -> str:
        texts = [f"{name}: {write(found)}" for _, name, value in lines if math.isfinite(found := value(one))]
        return "\n".join(texts) or "nothing ended"

    hovers(resumes(chart, data), data, tip)
    return figure(title, chart.html(title), [(colour, name) for colour, name, _ in shown], note_of(data, note))
