"""The plan as a page with charts: throughput and idle shares of every setting tried, and the lag of the recommended one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from headrace.commands.plan.answer import Answer
from headrace.commands.plan.sweep import Option, bottleneck, recommendation
from headrace.facts.texts import number, short_time
from headrace.views import report as report_package
from headrace.views.report.plots import lag_class
from headrace.views.report.svg import Chart, extent, figure, table

_STYLE = Path(report_package.__file__).parent / "style.css"


def draw(found: Answer, name: str, price: float) -> str:
    """Returns a self-contained HTML page."""
    chosen = found.recommended or found.asked
    figures = [_lags(chosen), _pace(chosen)]
    if found.recommended:
        figures = [
            _throughput(found.choices, chosen),
            _idle(found.choices, chosen),
            *_splits(found.choices, chosen),
            *figures,
        ]
    listed = _listed(found.choices, chosen, price) if found.recommended else ""
    message = recommendation(chosen, found.choices) if found.recommended else bottleneck(chosen.prediction)
    scenario = chosen.scenario
    facts = [
        scenario.rates.source,
        f"completions {scenario.completions.words}",
        f"{short_time(chosen.prediction.seconds_per_step)} a step",
        f"{number(chosen.prediction.tokens_per_second)} trained tokens/s",
        *([f"{chosen.prediction.cost(price, 1):,.2f} a step"] if price else []),
    ]
    meta = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)} · plan</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE.read_text(encoding='utf-8')}</style></head><body><main><header><div class='top'><h1>{escape(name)}</h1></div>"
        f'<p class="headline">{escape(message)}</p><p class="meta">{meta}</p></header>'
        f'<section><div class="figures">{"".join(figures)}</div>{listed}</section>'
        "<footer>Simulated by headrace plan: the real pipeline in virtual time.</footer></main></body></html>"
    )


def _throughput(choices: Sequence[Option], best: Option) -> str:
    bars = _bars(choices, best, lambda choice: choice.prediction.tokens_per_second)
    legend = [("c1", "tried"), ("c2", "recommended")]
    return figure("Trained tokens a second", bars, legend, "The settings are listed below by their numbers.", wide=True)


def _bars(choices: Sequence[Option], best: Option, value: Callable[[Option], float]) -> str:
    values = [value(choice) for choice in choices]
    chart = Chart((0.4, len(values) + 0.6), extent(values, zero=True), x_label="setting")
    for place, (choice, height) in enumerate(zip(choices, values, strict=True), 1):
        chart.box(place - 0.35, place + 0.35, 0.0, height, "c2" if choice is best else "c1")
        chart.hover(place - 0.5, place + 0.5, f"{choice.name}\n{number(height)}")
    return chart.html("Settings")


def _listed(choices: Sequence[Option], best: Option, price: float) -> str:
    heads = ["#setting", "", "#tokens/s", "#s a step", "#engine idle", "#trainer idle", "#mean lag"]
    heads += ["#cost a step"] if price else []
    return table(heads, [_row(place, choice, choice is best, price) for place, choice in enumerate(choices, 1)])


def _row(place: int, choice: Option, best: bool, price: float) -> list[str]:
    prediction = choice.prediction
    cells = [
        str(place),
        choice.name,
        f"{prediction.tokens_per_second:,.0f}",
        f"{prediction.seconds_per_step:,.2f}",
        f"{prediction.engine_idle:.0%}",
        f"{prediction.trainer_idle:.0%}",
        f"{prediction.lag_mean:.2f}",
        *([f"{prediction.cost(price, 1):,.2f}"] if price else []),
    ]
    return [f"<b>{escape(cell)}</b>" if best else escape(cell) for cell in cells]


def _idle(choices: Sequence[Option], best: Option) -> str:
    chart = Chart((0.4, len(choices) + 0.6), (0.0, 1.0), percent=True, x_label="setting")
    for place, choice in enumerate(choices, 1):
        chart.box(place - 0.35, place - 0.02, 0.0, choice.prediction.engine_idle, "c1")
        chart.box(place + 0.02, place + 0.35, 0.0, choice.prediction.trainer_idle, "c5")
    chart.mark(choices.index(best) + 1, "recommended")
    return figure("Idle share of both pools", chart.html("Idle"), [("c1", "engine"), ("c5", "trainer")], wide=True)


def _splits(choices: Sequence[Option], best: Option) -> list[str]:
    """Draws throughput by the trainer's GPUs: at the depth of the config, and at the recommended one."""
    lines = {}
    for name, like in (("as asked", choices[0].scenario), ("as recommended", best.scenario)):
        found = {
            float(choice.scenario.rates.trainer.gpus): choice.prediction.tokens_per_second
            for choice in choices
            if choice.scenario.staleness == like.staleness
        }
        if len(found) >= 3:
            lines[f"{name}: max_lag {like.staleness.max_lag}, window {like.staleness.window}"] = sorted(found.items())
    if not lines:
        return []
    points = [point for line in lines.values() for point in line]
    xs, ys = extent(x for x, _ in points), extent((y for _, y in points), zero=True)
    chart = Chart(xs, ys, x_label="GPUs of the trainer")
    legend = [(f"c{place}", name) for place, name in enumerate(lines, 1)]
    for (colour, _), line in zip(legend, lines.values(), strict=True):
        chart.line(line, colour).dots(line, colour)
    note = f"{best.scenario.gpus} GPUs; the others generate"
    return [figure("How the pools are split", chart.html("Splits"), legend, note)]


def _lags(choice: Option) -> str:
    lags = choice.prediction.lags
    chart = Chart((-0.6, max(lags) + 0.6), (0.0, 1.0), percent=True, x_label="lag, optimizer steps")
    for lag, share in lags.items():
        chart.box(lag - 0.35, lag + 0.35, 0.0, share, lag_class(lag))
        chart.hover(lag - 0.5, lag + 0.5, f"lag {lag}: {share:.0%}")
    return figure("Lag of the trained tokens", chart.html("Lag"), note=f"mean {choice.prediction.lag_mean:.2f}")


def _pace(choice: Option) -> str:
    points = [(float(step), seconds) for step, seconds in enumerate(choice.prediction.step_seconds, 1)]
    chart = Chart((0.5, len(points) + 0.5), extent((y for _, y in points), zero=True)).line(points, "c1")
    return figure("Seconds a step", chart.html("Pace"), note="the first steps fill the pipeline")
