"""The output of `headrace inspect`: one line per rollout of a step, and some rollouts token by token, coloured by lag."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, Group, RenderableType, RenderResult

from headrace.core.reports import TrainReport
from headrace.facts.rollout_view import CONTEXT, RolloutView, span_list
from headrace.facts.texts import clip, counted, number, plural
from headrace.facts.verdicts import judged
from headrace.views.screen.console import Console
from headrace.views.screen.console import PrintableText as Text
from headrace.views.screen.layout import FittedTable, TableColumn, no_room_for, one_line

LAG_STYLES = ("green", "cyan", "bright_blue", "magenta", "bright_magenta", "red")
"""Colours by lag, the last one for all higher lags. They match those of the report, as far as a terminal has them."""
WIDE = 0.5
"""|trainer - sampler| in nats from which a token is underlined."""


def show(
    console: Console,
    views: Sequence[RolloutView],
    *,
    chosen: Sequence[RolloutView],
    report: TrainReport,
    source: str,
    tokens: bool = False,
) -> None:
    """Prints a step. `chosen`: the rollouts to show token by token; `tokens`: also as a table of tokens. `source`: where the trainer's
    log-probs come from, or why there are none."""
    console.print(_headline(views, report))
    console.print(_lag_lines(report))
    if len(views) > 1:
        console.print(_Overview(views))
    for view in chosen:
        console.print(rollout(view))
        if tokens:
            console.print(_token_table(view))
    console.print(_legend(chosen, source))


def _headline(views: Sequence[RolloutView], report: TrainReport) -> Text:
    tickets = len({view.ticket for view in views})
    return Text(f"Step {report.step + 1}", "bold").append(
        f": {plural(tickets, 'group')}, {plural(len(views), 'rollout')}, made version "
        f"{report.version} · loss {number(report.loss)} · gradient {number(report.grad_norm)} · KL {number(report.kl)} · "
        f"{report.loss_tokens:,} tokens in the loss",
        "not bold",
    )


def _lag_lines(report: TrainReport) -> RenderableType:
    """Shows |trainer - sampler| by lag, as the trainer reported it at the step."""
    table = _table("lag", "#tokens", "#|Δ| p50", "#p90", "#p99", "#max", "left out by rule")
    for lag in report.lags:
        gaps = [number(lag.gaps[key]) if key in lag.gaps else "-" for key in ("p50", "p90", "p99", "max")]
        rules = ", ".join(f"{name} {share:.1%}" for name, share in lag.masked.items())
        table.add_row(lag.name, f"{lag.tokens:,}", *gaps, rules)
    return table if report.lags else Text("")


ROOM = 40
"""Fewest characters for a rollout's text beside its numbers; with less room it goes beneath them."""

SPARE = ("versions", "stop", "lag", "tokens", "|Δ| mean", "advantage")
"""Columns in the order in which they are left out on a terminal that is too narrow for all."""


class _Overview:
    """One line per rollout on a wide terminal; on a narrow one its numbers, and its text beneath them."""

    def __init__(self, views: Sequence[RolloutView]) -> None:
        gaps = any(view.trainer for view in views)
        self._views = views
        self._head = ["ticket", "rollout", "reward", "advantage", "tokens", "stop", "versions", "lag"]
        self._head += ["|Δ| mean"] if gaps else []
        self._rows = [_numbers(view, gaps) for view in views]

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        columns, out = list(zip(self._head, *self._rows, strict=True)), list[str]()
        for name in SPARE:
            if sum(max(map(len, column)) + 1 for column in columns) > options.max_width:
                columns, out = [column for column in columns if column[0] != name], [*out, name]
        widths = [max(map(len, column)) for column in columns]
        texts = [_text_of(view) for view in self._views]
        beside = options.max_width - sum(widths) - len(widths) - 1
        fits = beside >= min(ROOM, max(map(len, texts)))
        head, *rows = zip(*columns, strict=True)
        yield Text(_justified(head, widths) + "  text" * fits, "dim")
        for cells, text in zip(rows, texts, strict=True):
            numbers = _justified(cells, widths)
            lines = [f"{numbers}  {text}"] if fits else [numbers, f"  {text}"]
            yield from (Text(line, no_wrap=True, overflow="ellipsis") for line in lines)
        if out:
            yield no_room_for(out)


def _text_of(view: RolloutView) -> str:
    reasons = {why: count for why, count in view.reasons.items() if why != CONTEXT}
    return (f"[not in the loss: {counted(reasons)}] " if reasons else "") + one_line(view.text)


def _numbers(view: RolloutView, gaps: bool) -> list[str]:
    versions = sorted({span.version for span in view.spans})
    return [
        str(view.ticket),
        str(view.rollout),
        number(view.reward),
        "-" if math.isnan(view.advantage) else f"{view.advantage:+.3f}",
        str(len(view.sampled)),
        view.stop,
        str(versions[0]) if len(versions) == 1 else f"{versions[0]} to {versions[-1]}" if versions else "-",
        str(max(view.lags, default=0)),
        *([number(view.gap)] if gaps else []),
    ]


def _justified(cells: Sequence[str], widths: Sequence[int]) -> str:
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def rollout(view: RolloutView) -> RenderableType:
    """Shows one rollout token by token."""
    rewards = ", ".join(f"{name} {number(value)}" for name, value in view.rewards.items())
    advantage = "" if math.isnan(view.advantage) and not view.judged else "advantage "
    advantage += view.advantage_words
    turns = f" · {view.turns} turns" if view.turns > 1 else ""
    head = Text(f"\nticket {view.ticket}, rollout {view.rollout}", style="bold")
    head.append(
        f" · {view.prompt_id} · reward {number(view.reward)} ({rewards}) · {advantage} · {view.stop}{turns}", "not bold"
    )
    facts = [f"spans: {span_list(view)}"]
    if words := judged(view.answer, view.extracted):
        facts.append(words)
    if view.reasons:
        facts.append(f"not in the loss: {counted(view.reasons)}")
    if not math.isnan(view.gap):
        facts.append(f"|trainer - sampler| mean {number(view.gap)}; the widest: {_widest(view)}")
    finite = [view.logprobs[place] for place in view.sampled if math.isfinite(view.logprobs[place])]
    if finite:
        facts.append(f"log-prob mean {sum(finite) / len(finite):.3f}, least {min(finite):.3f}")
    return Group(
        head,
        Text(f"prompt: {clip(view.prompt, 300)}", "dim"),
        *(Text(fact, "dim") for fact in (*(f"image: {path}" for path in view.images), *facts)),
        *(Text(line) for line in view.story),
        _tokens(view),
    )


def _tokens(view: RolloutView) -> Text:
    text = Text()
    for place, piece in enumerate(view.pieces):
        text.append(piece, _style(view, place))
    return text


def _token_table(view: RolloutView) -> FittedTable:
    table = _table(
        "#token", "#id", "", "#log-prob", *(["#trainer", "#Δ"] if view.trainer else []), "#lag", "#advantage", ""
    )
    for place, token in enumerate(view.tokens):
        trainer = view.trainer[place : place + 1]
        cells = [
            str(place),
            str(token),
            repr(view.pieces[place])[1:-1],
            f"{view.logprobs[place]:.4f}",
            *(f"{value:.4f}" for value in trainer),
            *(f"{value - view.logprobs[place]:+.4f}" for value in trainer),
            str(view.lags[place]),
            f"{view.advantages[place]:+.3f}" if view.advantages else "-",
            ", ".join(filter(None, (view.left_out[place], "mixed" * view.mixed[place]))),
        ]
        table.add_row(*cells, style=LAG_STYLES[min(max(view.lags[place], 0), len(LAG_STYLES) - 1)])
    return table


def _style(view: RolloutView, place: int) -> str:
    if view.left_out[place] == CONTEXT:
        return "dim"
    style = LAG_STYLES[min(max(view.lags[place], 0), len(LAG_STYLES) - 1)]
    if view.left_out[place]:
        style += " strike"
    if view.mixed[place]:
        style += " italic"
    if view.trainer and abs(view.trainer[place] - view.logprobs[place]) >= WIDE:
        style += " underline"
    return style


def _widest(view: RolloutView, count: int = 4) -> str:
    gaps = sorted(
        (
            (gap, i)
            for i in view.sampled
            if i < len(view.trainer) and math.isfinite(gap := view.trainer[i] - view.logprobs[i])
        ),
        key=lambda g: -abs(g[0]),
    )
    return ", ".join(
        f"{gap:+.3f} at {place} ({view.pieces[place].strip() or view.tokens[place]})" for gap, place in gaps[:count]
    )


def _legend(chosen: Sequence[RolloutView], source: str) -> RenderableType:
    lags = sorted({min(lag, len(LAG_STYLES) - 1) for view in chosen for lag in view.lags if lag >= 0})
    text = Text("\n")
    for lag in lags:
        text.append(f"lag {lag}{'+' * (lag == len(LAG_STYLES) - 1)} ", LAG_STYLES[lag])
    text.append("· struck out: not in the loss · italic: mixed weights", "dim")
    if any(CONTEXT in view.reasons for view in chosen):
        text.append(" · faint: between turns, not sampled", "dim")
    if any(view.trainer for view in chosen):
        text.append(f" · underlined: trainer and sampler {WIDE} nats apart or more", "dim")
    text.append(f"\n{source}", "dim")
    if any(not view.decoded for view in chosen):
        text.append("\nThe model's tokenizer is not available here: tokens are shown as ids.", "dim")
    return text


def _table(*names: str) -> FittedTable:
    """A name of a column of numbers begins with #."""
    return FittedTable([TableColumn(title=name.removeprefix("#"), number=name.startswith("#")) for name in names])
