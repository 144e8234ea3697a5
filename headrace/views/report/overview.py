"""The Overview of report, board and notebook: the verdict, the reward over steps, minutes or tokens, one prompt then and now, and the six rows
of `docs/healthy.md`. All of it is drawn from values of `facts/health.py`; all text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

import numpy as np

from headrace.facts.facts import WarmStarted
from headrace.facts.health import Figure, Health, HealthRow, ThenAndNow, health
from headrace.facts.number_tables import MINUTES, STEP, TOKENS, StepColumns
from headrace.facts.run_state import RunState
from headrace.facts.texts import number, reward_text, with_error
from headrace.facts.verdicts import measured_on, stretches
from headrace.views.report.data import ReportData
from headrace.views.report.rollouts import held_out_samples, hits
from headrace.views.report.svg import Chart, extent, figure

MARKS = {"good": "✓", "warn": "!", "bad": "✗", "unknown": "–"}
WORDS = {"good": "all right", "warn": "look here", "bad": "wrong", "unknown": "not measured yet"}
"""The marks for a screen reader."""
IN_REPORT = {
    "moves": "#pools",
    "learnable": "#rollouts",
    "learns": "#curves",
    "stable": "#curves",
    "tokens": "#curves",
    "lost": "#accounting",
}
"""The section of a report that has more about a row."""
ON_BOARD = {
    "moves": "#tab-pools",
    "learnable": "#tab-samples",
    "learns": "#tab-curves",
    "stable": "#tab-curves",
    "tokens": "#tab-drawn",
    "lost": "#tab-accounting",
}
"""The tab of the board that has more about a row. The board's script follows such links."""


def overview(data: ReportData, links: Mapping[str, str]) -> str:
    """Returns the Overview. `links`: IN_REPORT or ON_BOARD."""
    found = health(data.state, data.columns, data.standing)
    prompt = _prompt(found.prompt) if found.prompt else ""
    front = _reward(data.state, data.columns) + prompt
    return (
        f"{_verdict(found)}"
        + (f'<div class="front{"" if prompt else " alone"}">{front}</div>' if front else "")
        + (_warm_start(data.state.warm) if data.state.warm else "")
        + f'<div class="health">{"".join(_row(row, links[row.key], found.remedy) for row in found.rows)}</div>'
        + held_out_samples(data.state)
    )


def _verdict(found: Health) -> str:
    remedy = f"<p>→ {escape(found.remedy)}</p>" if found.remedy else ""
    return (
        f'<div class="verdict {found.mark}"><i title="{WORDS[found.mark]}">{MARKS[found.mark]}</i>'
        f"<div><b>{escape(found.sentence)}</b>{remedy}</div></div>"
    )


# --- The six rows


def _row(row: HealthRow, link: str, said: str) -> str:
    """`said`: the remedy of the verdict, which is not repeated."""
    figures = "".join(map(_figure, row.figures))
    remedy = f'<p class="remedy">→ {escape(row.remedy)}</p>' if row.remedy and row.remedy != said else ""
    return (
        f'<div class="row {row.mark}"><i title="{WORDS[row.mark]}">{MARKS[row.mark]}</i>'
        f'<a href="{link}" title="{escape(row.question)}">{escape(row.title)}</a><div class="numbers">{figures}</div>{remedy}</div>'
    )


def _figure(given: Figure) -> str:
    window = f"<small>{escape(given.window)}</small>" if given.window else ""
    return (
        f'<span class="figure {given.mark}"><small>{escape(given.name)}</small>'
        f"<b>{escape(given.text)}</b>{_spark(given)}{window}</span>"
    )


ACROSS, TALL = 72, 18
"""Size of a small curve."""


def _spark(given: Figure) -> str:
    """Draws the curve of a number, and of solve rates a bar for each range."""
    values, (low, high) = given.curve, given.scale
    if len(values) < 2:
        return ""
    tall = [TALL * (value - low) / (high - low) for value in values]
    if given.bars:
        wide = ACROSS / len(tall)
        drawn = "".join(
            f'<rect x="{i * wide + 1:.1f}" y="{TALL - y:.1f}" width="{wide - 2:.1f}" height="{max(y, 0.5):.1f}"/>'
            for i, y in enumerate(tall)
        )
    else:
        apart = ACROSS / (len(tall) - 1)
        path = "L".join(f"{i * apart:.1f} {TALL - y:.1f}" for i, y in enumerate(tall))
        drawn = f'<path d="M{path}"/>'
    return f'<svg class="spark" viewBox="-1 -1 {ACROSS + 2} {TALL + 2}" aria-hidden="true">{drawn}</svg>'


# --- The reward


AXES = {STEP: ("steps", "optimizer steps"), MINUTES: ("minutes", "minutes"), TOKENS: ("tokens", "tokens trained")}
POINTS = 300
SMOOTH = 8
"""A line is smoothed over this part of the steps."""


def _reward(state: RunState, columns: StepColumns | None) -> str:
    """Returns the figure of the reward with a chart for each axis, of which the page shows one; empty if nothing was measured."""
    # All prompts of an evaluation may have failed.
    measured = any(math.isfinite(evaluation.reward_mean) for evaluation in state.evals)
    if columns is None or not (len(columns.series("reward/drawn")[0]) or measured):
        return ""
    steps = len(columns.series("reward/drawn")[0])
    window = max(1, steps // SMOOTH)
    charts = "".join(
        f'<div data-of="{over}"{"" if over == STEP else " hidden"}>{_chart(state, columns, over, window)}</div>'
        for over in AXES
    )
    buttons = "".join(
        f'<button type="button" data-over="{over}" aria-pressed="{str(over == STEP).lower()}">{name}</button>'
        for over, (name, _) in AXES.items()
    )
    drawn = "drawn" + (f", mean of {window} steps" if window > 1 else "")
    keys = [("c2", "held out, ± standard error")] if state.evals else []
    keys += [("c1", drawn)] if steps else []
    return figure("Reward, held out and drawn", f'<div class="over">{buttons}</div>{charts}', keys)


def _chart(state: RunState, columns: StepColumns, over: str, window: int) -> str:
    raw = columns.drawn("reward/drawn", over, points=POINTS)
    smooth = columns.drawn("reward/drawn", over, window=window, points=POINTS)
    evals = [evaluation for evaluation in state.evals if math.isfinite(evaluation.reward_mean)]
    at = _places(state, columns, over)
    sides = [
        evaluation.reward_mean + sign * error
        for evaluation in evals
        for error in [evaluation.reward_sem if math.isfinite(evaluation.reward_sem) else 0.0]
        for sign in (-1, 1)
    ]
    xs = [*raw.x.tolist(), *at]
    # The band of single steps may be cut: the smoothed line and the held-out dots are what the chart is for.
    chart = Chart(
        (min(0.0, *xs), max(xs)), extent([*sides, *raw.y.tolist()]), x_label=AXES[over][1], whole=over != MINUTES
    )
    if window > 1:
        chart.line(_points(raw.x, raw.y), "c1 raw")
    chart.line(_points(smooth.x, smooth.y), "c1")
    places = iter(at)
    for alike in stretches(evals):
        means = [(next(places), evaluation.reward_mean) for evaluation in alike]
        chart.line(means, "c2 raw").dots(means, "c2", [evaluation.reward_sem for evaluation in alike])
    _hovers(chart, raw.x, raw.y, over)
    half = 0.012 * (max(xs) - min(0.0, *xs))
    for x, evaluation in zip(at, evals, strict=True):
        words = f"held out {with_error(evaluation.reward_mean, evaluation.reward_sem)}\nstep {evaluation.step}, {measured_on(evaluation)}"
        chart.hover(x - half, x + half, words)
    return chart.html(f"Reward over {AXES[over][1]}")


def _places(state: RunState, columns: StepColumns, over: str) -> list[float]:
    """Returns the x of each evaluation. The one before training is at its own minute, and at 0 tokens."""
    evals = [evaluation for evaluation in state.evals if math.isfinite(evaluation.reward_mean)]
    if over == STEP:
        return [float(evaluation.step) for evaluation in evals]
    if over == MINUTES:
        return [evaluation.t / 60 for evaluation in evals]
    steps, tokens = columns.series(TOKENS)
    if not len(steps):
        return [0.0] * len(evals)
    return [float(np.interp(evaluation.step, steps, tokens, left=0.0)) for evaluation in evals]


def _points(x: np.ndarray, y: np.ndarray) -> list[tuple[float, float]]:
    return list(zip(x.tolist(), y.tolist(), strict=True))


def _hovers(chart: Chart, x: np.ndarray, y: np.ndarray, over: str) -> None:
    if not len(x):
        return
    edges = [x[0], *((x[1:] + x[:-1]) / 2), x[-1]]
    for place, value in enumerate(y):
        where = f"{over} {number(float(x[place]), 4)}" if over != MINUTES else f"minute {x[place]:.1f}"
        chart.hover(float(edges[place]), float(edges[place + 1]), f"{where}\ndrawn {reward_text(float(value))}")


def _warm_start(done: WarmStarted) -> str:
    """Returns the figure of the losses before the run."""
    lost = [(float(step), loss) for step, loss in enumerate(done.losses)]
    held = [(done.steps * epoch / done.epochs, loss) for epoch, loss in enumerate(done.held_out)]
    chart = Chart(
        (0.0, float(done.steps)), extent([loss for _, loss in lost + held]), x_label="steps of the warm start"
    )
    chart.line(lost, "c1").line(held, "c2 raw").dots(held, "c2")
    keys = [("c1", "rows of a step"), *([("c2", "held-out rows")] if held else [])]
    drawing = chart.html("Loss over the steps of the warm start")
    trained = "answers" if done.loss == "ce" else "pairs"
    return figure(f"Warm start: loss of the {trained}, {done.unit}", drawing, keys, note=f"{done.words}.")


# --- One prompt then and now


def _prompt(seen: ThenAndNow) -> str:
    parts = [(seen.then_step, seen.then)] + ([(seen.now_step, seen.now)] if seen.now else [])
    rows = "".join(
        f'<div class="look"><p class="note">step {step} {hits(look.rewards)}</p><pre>{escape(look.text) or "(empty)"}</pre></div>'
        for step, look in parts
    )
    note = "Held out, never trained. " + ("" if seen.now else "It is asked again at the next evaluation. ")
    return (
        f'<div class="then"><b>One prompt{", then and now" if seen.now else ""}</b>'
        f'<pre class="asked">{escape(seen.prompt)}</pre>{rows}<p class="note">{note}The text is that of the first rollout.</p></div>'
    )
