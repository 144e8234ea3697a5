"""The output of `headrace plan`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from headrace.commands.plan.answer import Answer, PlanRequest, answer, unused_memory, with_sizes
from headrace.commands.plan.rates import hardware
from headrace.commands.plan.rates.mesh import Traffic, in_flight, pipeline_memory, sent, waiting
from headrace.commands.plan.rates.rates import (
    BFLOAT16,
    StepSizes,
    Travel,
    changed_share,
    difference,
    pays_below,
    step_sizes,
    whole,
)
from headrace.commands.plan.sweep import Option, bias, bottleneck, recommendation
from headrace.core.printing import echo
from headrace.facts.texts import number, short_time
from headrace.run.rehearsal.memory_needs import step_activations
from headrace.run.worker.engine_loop import HOLD
from headrace.trainer.parallel import LOOPS, ParallelConfig
from headrace.views import report as report_package
from headrace.views.report.plots import lag_class
from headrace.views.report.svg import Chart, extent, figure
from headrace.views.report.svg import table as page_table


def print_plan(request: PlanRequest, price: float, as_json: bool, picture: Path | None) -> int:
    """Prints the answer, and writes the page with charts to `picture` if given. Returns the exit code."""
    request = with_sizes(request)
    found = answer(request, _progress)
    echo(
        json.dumps(report(found, request.travel(), price, request.config.train.steps), indent=1)
        if as_json
        else text(found, request, price)
    )
    if picture:
        picture.write_text(draw(found, request.config.name, price), encoding="utf-8")
        echo(f"the page with charts is in {picture}", err=True)
    return 0


def _progress(line: str) -> None:
    echo(line, err=True)


def text(found: Answer, request: PlanRequest, price: float) -> str:
    asked, run_steps = found.asked, request.config.train.steps
    scenario, prediction = asked.scenario, asked.prediction
    lines = [
        f"rates: {scenario.rates.source or 'as given'}; completions {scenario.completions.words}; prompts {scenario.prompts.words}",
        *(f"note: {note}" for note in found.notes),
        "",
        *_details(asked, price, run_steps),
        *([f"  {idle}"] if (idle := unused_memory(request)) else []),
        *controller_work(scenario.replicas, prediction.tokens_per_second),
        *([sizes.words] if (sizes := sizes_of(asked, request)) else []),
        *_weights(request),
        *_ranks(request, asked.scenario.rates.trainer.gpus),
        *_piped(request, asked),
        *(f"  {alternative.words}" for alternative in (found.turns, found.lending) if alternative),
    ]
    if biased := bias(prediction):
        lines.append(f"  {biased}")
    if found.recommended:
        lines += ["", *table(found.choices, price, found.recommended), ""]
        lines.append(f"recommended: {recommendation(found.recommended, found.choices)}")
    return "\n".join(lines)


def _details(choice: Option, price: float, run_steps: int) -> list[str]:
    prediction = choice.prediction
    lags = ", ".join(f"{lag}: {share:.0%}" for lag, share in prediction.lags.items())
    total = prediction.seconds_per_step * run_steps
    lines = [
        choice.name,
        f"  {short_time(prediction.seconds_per_step)} a step, {number(prediction.tokens_per_second)} trained tokens/s"
        + (f" ({number(prediction.tokens_per_gpu)} a GPU)" if prediction.gpus > 2 else ""),
        f"  {bottleneck(prediction)}",
        f"  an engine decodes {prediction.running:.1f} sequences at once while it works",
        f"  lag of trained tokens {prediction.lag_mean:.2f} on average ({lags})",
        f"  {run_steps} steps take {short_time(total)}" + _cost(choice, price, run_steps),
    ]
    if prediction.dropped:
        lines.append("  dropped: " + ", ".join(f"{count} × {reason}" for reason, count in prediction.dropped.items()))
    return lines


MESSAGE, TOKEN = 75e-6, 0.25e-6
"""Seconds of one CPU core for a message of a fleet's engine and for each token, of which a completion is made at the end: measured by
`benchmarks/pass_messages.py` (`--ends 2048`, an AMD EPYC). Groups and their texts come on top."""

MESSAGES = 1 / HOLD
"""Messages of an engine in a second while it holds outputs back for as long as it may."""


def controller_work(engines: int, tokens: float) -> list[str]:
    """Returns a line on the controller's work for a fleet that samples so many tokens a second, and whether that is too much for one process."""
    if engines == 1:
        return []
    share = engines * MESSAGES * MESSAGE + tokens * TOKEN
    return [
        f"  the controller needs {share:.1%} of a core to receive the tokens of {engines} engines"
        + ("; above half a core they come late: use rollout hosts on a bus (orchestration.bus)" if share > 0.5 else "")
    ]


def sizes_of(asked: Option, request: PlanRequest) -> StepSizes | None:
    """The bytes that a step moves, where the model and the ranks of its trainer are known."""
    if not request.hardware or request.config.runs[0].lora.rank:
        return None
    scenario, prediction, config = asked.scenario, asked.prediction, request.config
    chip, model, gpus = hardware.gpu(request.hardware), request.shape, scenario.rates.trainer.gpus
    mesh = hardware.trainer_mesh(chip, model, gpus, config.train.microbatch, context=config.train.parallel.context)
    rows = scenario.staleness.groups_per_step * scenario.rollout.group_size
    return step_sizes(
        sampled=prediction.tokens_per_second * prediction.seconds_per_step,
        prompts=rows * scenario.prompts.mean_below(config.engine.context_length),
        parameters=model.parameters,
        mesh=mesh,
        weights="float32" if config.train.offload_optimizer else config.train.weights,
        way=config.weight_sync,
    )


def _weights(request: PlanRequest) -> list[str]:
    """The way of new weights, whole and as differences."""
    if not request.travel():
        return []
    parameters, share = request.shape.parameters, changed_share(request.config.train.learning_rate)
    full, less = whole(parameters, request.network), difference(parameters, request.network, share)
    return [
        f"  new weights: {gigabytes(full.bytes)} whole, {short_time(full.seconds)} at {request.network / 1e9:g} GB/s; as differences "
        f"({share:.2%} of the values change) {gigabytes(less.bytes)}, {short_time(less.fetch)}, and {short_time(less.compare + less.apply)} of "
        f"work of one core: less in all below {pays_below(parameters, share) / 1e9:.1f} GB/s"
    ]


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


def _ranks(request: PlanRequest, gpus: int) -> list[str]:
    """The ranks of the trainer: their mesh, their memory, and what travels between them."""
    if not request.hardware or gpus < 2:
        return []
    chip, model, train = hardware.gpu(request.hardware), request.shape, request.config.train
    tokens = train.microbatch
    mesh = hardware.trainer_mesh(chip, model, gpus, tokens, context=train.parallel.context)
    moved, memory = hardware.trainer_traffic(model, mesh), hardware.trainer_memory(model, mesh)
    size, waits = moved.microbatch(tokens), moved.together(tokens)
    computes = 2 * request.passes * model.active * tokens / (hardware.trains(model) * chip.compute * mesh.tensor)
    names = ("replicate", "context", "tensor", "expert")
    others = [f", {name} = {getattr(mesh, name)}" for name in names if getattr(mesh, name) > 1]
    together = f", and waits for {waits / 1e9:.1f} GB of hidden states" if waits else ""
    between = f"; copies exchange {moved.copied / 1e9:.1f} GB a step" if mesh.replicate > 1 else ""
    between += f"; ranks sum gradients once a step, {gigabytes(moved.summed)}" if moved.summed else ""
    return [
        f"  trainer: {gpus} ranks (shard = {mesh.shard}{''.join(others)}); each holds {memory.held / 1e9:.1f} GB and gathers up to "
        f"{memory.gathered / 1e9:.1f} GB more, of {chip.memory / 1e9:.0f} GB",
        f"  a microbatch of {number(tokens)} tokens: a rank computes {short_time(computes)}, and receives {size / 1e9:.1f} GB meanwhile, "
        f"{short_time(size / hardware.link(chip, mesh))}{together}{between}",
        *_longest(request, mesh, moved),
    ]


def _piped(request: PlanRequest, asked: Option) -> list[str]:
    """The trainer's GPUs as a pipeline instead. Embedding and head count as two matrices of one size."""
    gpus, schedule = asked.scenario.rates.trainer.gpus, request.config.train.parallel.schedule
    if not request.hardware or gpus < 2:
        return []
    model, tokens = request.shape, request.config.train.microbatch
    if gpus * LOOPS[schedule] > model.layers:
        return []
    trained = asked.prediction.tokens_per_second * asked.prediction.seconds_per_step
    count = max(2, round(trained / tokens))
    memory = pipeline_memory(
        schedule,
        gpus,
        layers=model.layers,
        inner=model.parameters - model.outer,
        embedding=model.outer / 2,
        head=model.outer / 2,
        microbatches=count,
        tokens=tokens,
        hidden=model.hidden,
    )
    return [
        f"  as a pipeline of {gpus} (schedule = {schedule}): the fullest rank holds {gigabytes(memory.held)}, keeps "
        f"{in_flight(schedule, gpus, count):g} microbatches in flight ({gigabytes(memory.received)} of hidden states, and the activations of its "
        f"layers), and waits {waiting(schedule, gpus, count):.0%} of a step of {count} microbatches, for each of which "
        f"{gigabytes(sent(schedule, gpus, tokens, model.hidden))} are sent in all"
    ]


def _longest(request: PlanRequest, mesh: ParallelConfig, moved: Traffic) -> list[str]:
    """The activations of the longest row there can be, which has a microbatch of its own."""
    model, train, row = request.shape, request.config.train, request.config.engine.context_length
    kept = BFLOAT16 * row / mesh.context
    now, other = (
        step_activations(model, model.beside.critic, on) * kept for on in (train.gradient_checkpointing, True)
    )
    lines = [
        f"  a row of engine.context_length = {number(row)} tokens keeps {gigabytes(now)} of activations on "
        + ("its rank" if mesh.context == 1 else f"each of its {mesh.context} ranks")
        + ("" if train.gradient_checkpointing else f" ({gigabytes(other)} with train.gradient_checkpointing)")
    ]
    if mesh.context > 1:
        waits = moved.attended * train.microbatch
        seconds = short_time(waits / hardware.neighbours_link(hardware.gpu(request.hardware), mesh))
        lines.append(
            f"  attention brings a rank {gigabytes(waits)} more in a microbatch, and it waits for them: {seconds}"
        )
    return lines


def _cost(choice: Option, price: float, steps: int) -> str:
    return f" and cost {choice.prediction.cost(price, steps):,.2f} at {price:g} a GPU-hour" if price else ""


def table(choices: Sequence[Option], price: float, best: Option) -> list[str]:
    width = max(len(choice.name) for choice in choices)
    head = f"  {'setting':<{width}}  tokens/s    s a step  engine idle  trainer idle  mean lag" + (
        "  cost/step" if price else ""
    )
    lines = [head]
    for choice in choices:
        prediction = choice.prediction
        line = (
            f"{'>' if choice is best else ' '} {choice.name:<{width}}  {prediction.tokens_per_second:>8,.0f}  {prediction.seconds_per_step:>10,.2f}"
            f"  {prediction.engine_idle:>11.0%}  {prediction.trainer_idle:>12.0%}  {prediction.lag_mean:>8.2f}"
        )
        lines.append(line + (f"  {prediction.cost(price, 1):>9,.2f}" if price else ""))
    return lines


def report(found: Answer, travel: Travel | None, price: float, run_steps: int) -> dict[str, Any]:
    """Returns the answer as values for JSON. `travel`: the way of new weights, if it is known."""
    return {
        "rates": msgspec.to_builtins(found.asked.scenario.rates.source),
        "notes": list(found.notes),
        "weights": {"bytes": travel.bytes, "seconds": travel.seconds} if travel else None,
        "turns": {"seconds_per_step": found.turns.seconds_per_step, "change": found.turns.change}
        if found.turns
        else None,
        "lending": {"seconds_per_step": found.lending.seconds_per_step} if found.lending else None,
        "choices": [_entry(choice, price, run_steps) for choice in found.choices],
        "recommended": found.choices.index(found.recommended) if found.recommended else None,
        "reason": recommendation(found.recommended, found.choices)
        if found.recommended
        else bottleneck(found.asked.prediction),
    }


def _entry(choice: Option, price: float, run_steps: int) -> dict[str, Any]:
    scenario, prediction = choice.scenario, choice.prediction
    return {
        "max_lag": scenario.staleness.max_lag,
        "window": scenario.staleness.window,
        "max_running": scenario.rates.engine.max_running,
        "replicas": scenario.replicas,
        "replica_gpus": scenario.rates.engine.gpus,
        "trainer_gpus": scenario.rates.trainer.gpus,
        "cost": prediction.cost(price, run_steps),
        **msgspec.to_builtins(prediction),
    }


# --- The plan as a page with charts: throughput and idle shares of every setting tried, and the lag of the recommended one


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
    return page_table(heads, [_row(place, choice, choice is best, price) for place, choice in enumerate(choices, 1)])


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
