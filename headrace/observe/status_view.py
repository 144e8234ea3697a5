"""A status for people: a panel on a terminal, plain lines in a pipe."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.observe import measures, view
from headrace.observe.state import RunState
from headrace.observe.status import LIVING, SILENT, Live, Status
from headrace.observe.text import clip, duration, plural, short_time
from headrace.observe.verdicts import equation, reasons
from headrace.observe.verdicts import lag as lag_verdict
from headrace.observe.view import BAD, FAINT, GOOD, LABEL, WARN, WIDTH

MARKS = {
    "alive": ("●", GOOD),
    "starting": ("●", GOOD),
    "silent": ("●", WARN),
    "finished": ("✓", GOOD),
    "interrupted": ("✓", WARN),
    "stopped": ("✗", BAD),
    "died": ("✗", BAD),
}
BORDERS = {"silent": "yellow", "stopped": "red", "died": "red"}

Lines = Sequence[tuple[str, Text]]

SHOWN = 8
"""Waits."""


def show(console: Console, name: str, status: Status, state: RunState) -> None:
    if console.is_terminal:
        console.print(panel(name, status, state))
        return
    for label, text in lines_of(name, status, state):
        console.print(f"{label:<12}{text.plain}", markup=False, highlight=False, soft_wrap=True)


def panel(name: str, status: Status, state: RunState) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style=LABEL, min_width=10, no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in lines_of(name, status, state):
        table.add_row(label, text)
    border = BORDERS.get(status.life, "cyan")
    return Panel(Group(table), width=WIDTH, box=box.ROUNDED, border_style=border, padding=(0, 1))


def lines_of(name: str, status: Status, state: RunState) -> Lines:
    """Label and text; a line without a label goes on with the one above it."""
    lines = [("run", _title(name, state)), ("state", _state(status))]
    if status.live:
        lines.append(("processes", _processes(status, status.live)))
    if state.started:
        lines += [("step", _step(status, state)), ("reward", view.reward(state)), ("lag", _lag(state))]
        lines += [("engine", view.engine(state)), ("trainer", view.trainer(state)), ("tickets", _tickets(state))]
        lines += [("", Text(one, FAINT)) for one in reasons(state.accounting)]
        lines.append(("checkpoint", _checkpoint(state)))
    lines += _waits(status)
    lines += [("death" if n == 0 else "", _death(state, n)) for n in range(len(state.deaths[-2:]))]
    lines += _warnings(state)
    if status.live and status.live.picture:
        lines.append(("stacks", Text(status.live.picture)))
    return lines


def _title(name: str, state: RunState) -> Text:
    text = Text(name, "bold")
    return text.append(f"  {state.started.headline}", FAINT) if state.started else text


def _state(status: Status) -> Text:
    mark, style = MARKS[status.life]
    return Text(f"{mark} ", style).append(clip(status.words, 600), style if status.life != "alive" else "bold")


def _processes(status: Status, live: Live) -> Text:
    text = Text(f"controller {live.pid}")
    for who, pid in live.workers.items():
        text.append(f", {who} {pid}")
    if status.life != "alive":
        text.append(f"   last word {_ago(time.time() - live.written)}", FAINT)
    return text


def _ago(seconds: float) -> str:
    return f"{duration(seconds)} ago" if seconds < 86400 else f"{plural(int(seconds // 86400), 'day')} ago"


def _step(status: Status, state: RunState) -> Text:
    assert state.started is not None
    text = Text(f"{state.step} of {state.started.steps}", "bold")
    if pace := measures.step_seconds(state):
        text.append(f"   {short_time(pace)} each", "not bold")
    text.append(f"   {duration(state.now)} so far", "not bold")
    if (left := measures.seconds_left(state)) and status.life in LIVING:
        text.append(f", {duration(left)} left", "not bold")
    if len(state.sessions) > 1:
        text.append(f"   {plural(len(state.sessions) - 1, 'resume')}", FAINT)
    return text


def _lag(state: RunState) -> Text:
    verdict = lag_verdict(state)
    return Text(verdict.value, BAD if verdict.mood == "bad" else "").append(f"   {verdict.detail}", FAINT)


def _tickets(state: RunState) -> Text:
    counts = state.accounting
    if counts.balance():
        return Text(f"✗ {equation(counts)}", BAD)
    return Text("✓ ", GOOD).append(equation(counts), "default")


def _checkpoint(state: RunState) -> Text:
    good = [one for one in state.checkpoints if not one.error]
    if not good:
        return Text("none yet", FAINT)
    text = Text(f"step {good[-1].step}").append(f"   at {duration(good[-1].t)}", FAINT)
    if state.checkpoints[-1].error:
        text.append(f"   that of step {state.checkpoints[-1].step} could not be written", WARN)
    return text


def _waits(status: Status) -> list[tuple[str, Text]]:
    if status.live is None:
        return []
    waits = status.live.waits
    times = Counter((one.owner, one.what) for one in waits)
    lines: list[Text] = []
    for owner, what in list(times)[:SHOWN]:
        longest = max(one.seconds for one in waits if (one.owner, one.what) == (owner, what))
        text = Text(f"{longest:6.1f} s  ", WARN if longest > SILENT else "")
        text.append(f"{owner}, for {what}", "default")
        if (count := times[owner, what]) > 1:
            text.append(f"   × {count}", FAINT)
        lines.append(text)
    if len(times) > SHOWN:
        lines.append(Text(f"and {len(times) - SHOWN} others", FAINT))
    label = "waits" if status.life in LIVING else "waited"
    return [(label if n == 0 else "", line) for n, line in enumerate(lines)]


def _death(state: RunState, place: int) -> Text:
    one = state.deaths[-2:][place]
    return Text(f"[{duration(one.t)}] the {one.who} process {clip(one.how, 200)}", WARN)


def _warnings(state: RunState) -> list[tuple[str, Text]]:
    last = state.warnings[-3:]
    label = plural(len(state.warnings), "warning")
    return [
        (label if n == 0 else "", Text(f"[{duration(one.t)}] {clip(one.message, 240)}", WARN))
        for n, one in enumerate(last)
    ]
