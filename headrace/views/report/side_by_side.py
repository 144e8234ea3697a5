"""Several runs compared: their final numbers, the settings that differ, and curves over each other. Data for a terminal, and a page made of
the report's parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from headrace.facts import run_state
from headrace.facts.kept_settings import CONTENTS, NOT_SET, settings_over
from headrace.facts.records import StepRow
from headrace.facts.texts import clip, dollars, duration, number, percent, reward_text
from headrace.facts.verdicts import comparable, gain_of
from headrace.views.report.data import Bin, ReportData
from headrace.views.report.page import THEME, document
from headrace.views.report.svg import Chart, extent, figure, table

# --- The settings in which runs differ, for the board and `headrace compare`.


NAME, MEASURED = "name", "chosen."
"""No settings that somebody would compare: the runs' names, and the speeds by which headrace chose the others."""
MAX_SETTING = 80
"""Characters of a setting in the table of differences."""


def settings_apart(runs: Mapping[str, Path]) -> dict[str, list[str]]:
    """Returns the values of each setting that is not the same in all runs, by the dotted name of the setting, in the order of `runs`: and what the files
    hold that a setting names in the same way in all."""
    flat = [settings_over(path, str) for path in runs.values()]
    keys = sorted(key for key in set().union(*flat) if key != NAME and not key.startswith(MEASURED))
    keys = [key for key in keys if not key.startswith(CONTENTS) or all(key in settings for settings in flat)]
    return {
        key: [settings.get(key, NOT_SET) for settings in flat]
        for key in keys
        if len({settings.get(key) for settings in flat}) > 1
    }


def differences(runs: Mapping[str, Path]) -> str:
    """Returns the table of the settings in which runs differ; a sentence if there are none."""
    rows = [
        (escape(key), *(escape(clip(value, MAX_SETTING)) for value in values))
        for key, values in settings_apart(runs).items()
    ]
    if not rows:
        return '<p class="empty">These runs have the same settings.</p>'
    return table(("setting", *runs), rows, "differences")


# --- side by side ------------------------------------------------------------


COLOURS = ("c1", "c2", "c3", "c4", "c5")
"""The classes of the runs' curves, so at most five runs."""


class ComparedRun(NamedTuple):
    data: ReportData
    life: str
    """Its state in a word: finished, alive, died."""


class ComparedCurve(NamedTuple):
    title: str
    value: Callable[[StepRow], float]
    note: str = ""


def _mean_length(row: StepRow) -> float:
    return sum(row.lengths) / len(row.lengths) if row.lengths else math.nan


CURVES = (
    ComparedCurve("Reward", lambda row: row.reward_drawn, "all groups drawn: the policy's mean"),
    ComparedCurve("Completion length", _mean_length, "tokens, mean of the trained completions"),
    ComparedCurve("Entropy", lambda row: row.report.entropy, "nats, mean over trained tokens"),
    ComparedCurve("KL(sampler ‖ trainer)", lambda row: row.report.kl, "k3 estimate, nats"),
    ComparedCurve("Gradient norm", lambda row: row.report.grad_norm, "before clipping"),
    ComparedCurve("Loss", lambda row: row.report.loss, "of the optimizer step; it need not fall when rewards rise"),
)


def final_numbers(run: ComparedRun) -> dict[str, str]:
    """Returns the last numbers of a run by their names, as texts; "–" if the run has none."""
    state = run.data.state
    total = state.shares.total
    engine, trainer = run_state.idle_shares(state)
    measured = [
        evaluation
        for evaluation in comparable(state.evals)
        if evaluation.prompts and math.isfinite(evaluation.reward_mean)
    ]
    held_out = [
        f"{reward_text(evaluation.reward_mean)} ± {reward_text(evaluation.reward_sem)}" for evaluation in measured
    ]
    sets = {_in_set(name): gain_of(evals) for name, evals in state.sets.items()}
    return {
        "state": run.life,
        "steps": f"{state.step:,} of {state.started.steps:,}" if state.started else "–",
        "time": duration(state.now),
        "reward of the last steps": _or_dash(run_state.recent_reward(state), "{:.3f}"),
        "held-out reward, first": held_out[0] if held_out else "–",
        "held-out reward, last": held_out[-1] if len(held_out) > 1 else "–",
        **sets,
        "tokens trained": f"{state.totals.tokens:,}",
        "tokens a second sampled": _or_dash(state.engine.rate, "{:,.0f}"),
        "tokens a second trained": _or_dash(run_state.trainer_rate(state), "{:,.0f}"),
        "engine idle": percent(engine) if engine is not None else "–",
        "trainer idle": percent(trainer) if trainer is not None else "–",
        "mean lag": _or_dash(run_state.mean_lag(state), "{:.2f}"),
        "largest lag": str(max(state.lags)) if state.lags else "–",
        "rollouts cut off": percent(total.truncated_share),
        "rollouts failed": percent(total.failed_share),
        "groups without contrast": percent(total.no_contrast_share),
        "groups dropped otherwise": percent(total.dropped_share),
        **dict.fromkeys(COST_ROWS, "–"),
        **{name: dollars(value) for name, value in run_state.cost_numbers(state).items() if name in COST_ROWS},
    }


def _in_set(name: str) -> str:
    return f"held-out reward, {name}"


COST_ROWS = ("cost", "cost a step", "cost of a million trained tokens")


def compared_numbers(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """Returns the last numbers of all runs by name. Costs that no run has are left out; an evaluation set stands if one of the runs has it."""
    columns = [final_numbers(run) for run in runs]
    names = list(columns[0])
    place = names.index("tokens trained")
    names[place:place] = [name for name in dict.fromkeys(itertools.chain(*columns)) if name not in names]
    rows = {name: [column.get(name, "–") for column in columns] for name in names}
    return {name: values for name, values in rows.items() if name not in COST_ROWS or set(values) != {"–"}}


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def comparison_page(runs: Mapping[str, ComparedRun]) -> str:
    """Returns a page that needs no network. `runs`: two to five, by the names that the page gives them."""
    head = f'<header><div class="top"><h1>{escape(" · ".join(runs))}</h1>{THEME}</div></header>'
    settings = differences({name: run.data.run_dir for name, run in runs.items()})
    body = (
        f"<section><h2>Settings that differ</h2>{settings}</section>"
        f"<section><h2>Last numbers</h2>{_numbers(runs)}</section>"
        f'<section><h2>Curves</h2><div class="figures">{_curves(runs)}</div></section>'
    )
    return document(f"{len(runs)} runs", head + body, "Made by headrace from the files of these runs.")


def _numbers(runs: Mapping[str, ComparedRun]) -> str:
    rows = [(escape(name), *map(escape, values)) for name, values in compared_numbers(list(runs.values())).items()]
    return table(("", *(f"#{name}" for name in runs)), rows)


def _curves(runs: Mapping[str, ComparedRun]) -> str:
    if not any(run.data.bins for run in runs.values()):
        return '<p class="empty">No optimizer step was trained: there is nothing to plot.</p>'
    return "".join(_overlaid(curve, runs) for curve in CURVES)


def _overlaid(curve: ComparedCurve, runs: Mapping[str, ComparedRun]) -> str:
    lines = [[(each.x, each.mean(curve.value)) for each in run.data.bins] for run in runs.values()]
    steps = [edge for run in runs.values() for each in run.data.bins for edge in (each.first - 0.5, each.last + 0.5)]
    chart = Chart((min(steps), max(steps)), extent(y for line in lines for _, y in line))
    for line, colour in zip(lines, COLOURS, strict=False):
        chart.line(line, colour)
    longest = max((run.data.bins for run in runs.values()), key=len)
    for each in longest:
        chart.hover(each.first - 0.5, each.last + 0.5, _tip(curve, each, runs))
    return figure(curve.title, chart.html(curve.title), list(zip(COLOURS, runs, strict=False)), curve.note)


def _tip(curve: ComparedCurve, at: Bin, runs: Mapping[str, ComparedRun]) -> str:
    lines = [at.name]
    for name, run in runs.items():
        near: Sequence[Bin] = [each for each in run.data.bins if each.first <= at.x <= each.last]
        lines.append(f"{name} {number(near[0].mean(curve.value)) if near else '–'}")
    return "\n".join(lines)
