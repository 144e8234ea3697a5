"""The output of `headrace status`: a panel on a terminal, plain lines in a pipe."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import RenderableType
from rich.panel import Panel

from headrace.facts import run_state
from headrace.facts.health import Figure, Health, HealthRow, Standing, health
from headrace.facts.number_tables import StepColumns
from headrace.facts.run_state import RunState
from headrace.facts.texts import clip, duration, number, percent, plural, reward_text, short_time, size, sparkline
from headrace.facts.verdicts import equation, failings, reasons
from headrace.processes.health.live_status import LIVING, SILENT, LiveStatus, Status
from headrace.views.screen import live
from headrace.views.screen.console import Console
from headrace.views.screen.console import PrintableText as Text
from headrace.views.screen.layout import FAINT, GAP, Line, Lines, one_line
from headrace.views.screen.live import BAD, GOOD, WARN, line_of

MARKS = {
    "alive": ("●", GOOD),
    "starting": ("●", GOOD),
    "silent": ("●", WARN),
    "finished": ("✓", GOOD),
    "interrupted": ("✓", WARN),
    "paused": ("✗", WARN),
    "stopped": ("✗", BAD),
    "died": ("✗", BAD),
}
BORDERS = {"silent": "yellow", "paused": "yellow", "stopped": "red", "died": "red"}

WIDTH = 100
"""Columns of the panel at most."""
SHOWN = 8
"""Waits that are shown."""
CURVE = 10
"""Characters of the curve of a number."""
PROMPT = 60
"""Characters of a prompt, which loses its middle: prompts of a task differ at their end."""


def show(console: Console, name: str, status: Status, state: RunState, columns: StepColumns | None = None) -> None:
    """`columns`: the numbers of the run by step, for the curves."""
    if console.is_terminal:
        console.print(panel(name, status, state, columns))
        return
    for label, parts in lines_of(name, status, state, columns):
        text = (" " * GAP).join(part.plain for part in parts if part.plain)
        console.print(f"{label:<14}{text}", soft_wrap=True)


def panel(name: str, status: Status, state: RunState, columns: StepColumns | None = None) -> RenderableType:
    border = BORDERS.get(status.life, "cyan")
    lines = Lines(lines_of(name, status, state, columns), label_width=12)
    return Panel(lines, width=WIDTH, box=box.ROUNDED, border_style=border, padding=(0, 1))


def lines_of(name: str, status: Status, state: RunState, columns: StepColumns | None = None) -> Sequence[Line]:
    lines: list[Line] = [("run", _title(name, state)), ("state", [_state(status)])]
    lines += _health(health(state, columns, Standing(status.words, status.mark)))
    if status.live:
        lines.append(("processes", _processes(status, status.live)))
    if state.joined:
        lines.append(
            (
                "joined",
                [
                    Text(f"{who} on {worker.host} (process {worker.pid})")
                    for who, worker in sorted(state.joined.items())
                ],
            )
        )
    if state.started:
        lines += [
            ("step", _step(status, state)),
            ("engine", live.engine(state)),
            *line_of(state),
            ("trainer", live.trainer(state)),
            *live.weights(state),
            ("tickets", [_tickets(state)]),
            *_use(state),
        ]
        lines += [("", [Text(reason, FAINT)]) for reason in reasons(state.accounting)]
        lines += _scorers(state)
        lines.append(("checkpoint", _checkpoint(state)))
        lines += _troubles(state)
    lines += _waits(status)
    lines += [("death" if n == 0 else "", [_death(state, n)]) for n in range(len(state.deaths[-2:]))]
    lines += _warnings(state)
    if status.live and status.live.picture:
        lines.append(("stacks", [Text(status.live.picture)]))
    return lines


def _health(found: Health) -> list[Line]:
    """Returns verdict and remedy, a prompt then and now, and the six rows."""
    lines: list[Line] = [("verdict", [Text(found.sentence, live.TICKS[found.mark][1])])]
    if found.remedy:
        lines.append(("do", [Text(found.remedy, "bold")]))
    if (seen := found.prompt) and seen.now:
        lines.append(
            (
                "one prompt",
                [
                    Text(live.short(one_line(seen.prompt), PROMPT)),
                    Text(f"step {seen.then_step} {hits(seen.then.rewards)}"),
                    Text(f"step {seen.now_step} {hits(seen.now.rewards)}"),
                ],
            )
        )
    return lines + [(row.title, _row(row, found.remedy)) for row in found.rows]


def hits(rewards: Sequence[float]) -> str:
    """Draws rewards of 0 and 1 as circles; of others it returns the mean."""
    if set(rewards) <= {0.0, 1.0} and len(rewards) <= 16:
        return "".join("●" if reward else "○" for reward in rewards)
    return f"mean reward {reward_text(sum(rewards) / len(rewards))}"


def _row(row: HealthRow, said: str) -> list[Text]:
    """Returns the mark and the numbers of a row, and its remedy if it is not that of the verdict. `said`: the latter."""
    mark, style = live.TICKS[row.mark]
    parts, shown = [Text(mark, style)], [figure for figure in row.figures if _tells(figure)]
    for figure, following in itertools.zip_longest(shown, shown[1:]):
        parts.append(_figure(figure, "" if following and following.window == figure.window else figure.window))
    return [*parts, Text(f"→ {row.remedy}", WARN)] if row.remedy and row.remedy != said else parts


def _tells(figure: Figure) -> bool:
    """Returns whether a number is worth its place: the state stands above, and nothing failed or was dropped in most runs."""
    return figure.name != "state" and (figure.name, figure.text) not in (("failed", "0 %"), ("dropped", "0 %"))


def _figure(figure: Figure, window: str) -> Text:
    """`window`: what this number and those before it are of; empty if the next number says so."""
    style = {"warn": WARN, "bad": BAD}.get(figure.mark, "")
    text = Text(f"{figure.name} ", FAINT).append(figure.text, style or "not dim")
    if len(figure.curve) > 1:
        text.append(f" {sparkline(figure.curve, CURVE, figure.scale)}", "cyan not dim")
    return text.append(f" ({window})", FAINT) if window else text


def _title(name: str, state: RunState) -> list[Text]:
    return [Text(name, "bold"), Text(state.started.headline if state.started else "", FAINT)]


def _state(status: Status) -> Text:
    mark, style = MARKS[status.life]
    return Text(f"{mark} ", style).append(clip(status.words, 600), style if status.life != "alive" else "bold")


def _processes(status: Status, live: LiveStatus) -> list[Text]:
    text = Text(f"controller {live.pid}")
    for who, pid in live.workers.items():
        text.append(f", {who} {pid}")
    silent = "" if status.life == "alive" else f"last status {_ago(time.time() - live.written)}"
    return [text, Text(silent, FAINT)]


def _ago(seconds: float) -> str:
    return f"{duration(seconds)} ago" if seconds < 86400 else f"{plural(int(seconds // 86400), 'day')} ago"


def _step(status: Status, state: RunState) -> list[Text]:
    assert state.started is not None
    parts = [Text(f"{state.step} of {state.started.steps}", "bold")]
    if pace := run_state.step_seconds(state):
        parts.append(Text(f"{short_time(pace)} each"))
    spent = f"{duration(state.now)} so far"
    left = run_state.seconds_left(state) if status.life in LIVING else None
    parts.append(Text(f"{spent}, {duration(left)} left" if left else spent))
    if len(state.sessions) > 1:
        parts.append(Text(plural(len(state.sessions) - 1, "resume"), FAINT))
    return parts


def _tickets(state: RunState) -> Text:
    counts = state.accounting
    if counts.balance():
        return Text(f"✗ {equation(counts)}", BAD)
    return Text("✓ ", GOOD).append(equation(counts), "default")


def _use(state: RunState) -> list[Line]:
    """Returns a line about what the run's processes use of the machine; none where it was not read."""
    if state.used is None:
        return []
    parts = [
        Text(f"{kind} ", FAINT).append(f"{number(use.cores, 2)} cores, {size(use.memory)}", "not dim")
        for kind, use in state.used.processes.items()
    ]
    for gpu in state.used.gpus:
        busy = f"{percent(gpu.busy)}, " if gpu.busy >= 0 else ""
        parts.append(Text(f"gpu {gpu.index} ", FAINT).append(f"{busy}{size(gpu.memory)}", "not dim"))
    return [("machine", parts)]


def _troubles(state: RunState) -> list[Line]:
    lines: list[Line] = []
    for failing in failings(state)[:3]:
        where = f"; the first: {clip(failing.first.detail, 240)}" if failing.first else ""
        lines.append(("failed", [Text(f"{failing.kind}, {plural(failing.rollouts, 'rollout')}{where}", WARN)]))
    return lines


def _scorers(state: RunState) -> list[Line]:
    """Returns a line for everything that gives rewards over the network, and for every function that failed."""
    shown = {name: scorer for name, scorer in state.scorers.items() if scorer.what != "function" or scorer.failures}
    return [
        (
            "rewards" if n == 0 else "",
            [Text(f"{name} ({scorer.what}): {scorer.words}", WARN if scorer.failures else "")],
        )
        for n, (name, scorer) in enumerate(shown.items())
    ]


def _checkpoint(state: RunState) -> list[Text]:
    good = [checkpoint for checkpoint in state.checkpoints if not checkpoint.error]
    if not good:
        return [Text("none yet", FAINT)]
    parts = [Text(f"step {good[-1].step}"), Text(f"at {duration(good[-1].t)}", FAINT)]
    if state.checkpoints[-1].error:
        parts.append(Text(f"the one of step {state.checkpoints[-1].step} could not be written", WARN))
    return parts


def _waits(status: Status) -> list[Line]:
    if status.live is None:
        return []
    waits = status.live.waits
    times = Counter((wait.owner, wait.what) for wait in waits)
    lines: list[list[Text]] = []
    for owner, what in list(times)[:SHOWN]:
        longest = max(wait.seconds for wait in waits if (wait.owner, wait.what) == (owner, what))
        text = Text(f"{longest:6.1f} s  ", WARN if longest > SILENT else "").append(f"{owner}, for {what}", "default")
        count = times[owner, what]
        lines.append([text, Text(f"× {count}" if count > 1 else "", FAINT)])
    if len(times) > SHOWN:
        lines.append([Text(f"and {len(times) - SHOWN} others", FAINT)])
    label = "waits" if status.life in LIVING else "waited"
    return [(label if n == 0 else "", line) for n, line in enumerate(lines)]


def _death(state: RunState, place: int) -> Text:
    death = state.deaths[-2:][place]
    return Text(f"[{duration(death.t)}] the {death.who} process {clip(death.how, 200)}", WARN)


def _warnings(state: RunState) -> list[Line]:
    true = run_state.open_warnings(state)
    label, past = plural(len(true), "warning"), len(state.warnings) - len(true)
    lines: list[Line] = [
        (label if n == 0 else "", [Text(f"[{duration(warning.t)}] {clip(warning.message, 600)}", WARN)])
        for n, warning in enumerate(true[-3:])
    ]
    return [*lines, ("" if lines else "warnings", [Text(f"{past} no longer true", FAINT)])] if past else lines
