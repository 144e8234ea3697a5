"""The live view as one frame, built from a `RunState`. Nothing in it needs colour to be understood."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.observe import measures
from headrace.observe.records import Sample
from headrace.observe.state import RunState
from headrace.observe.text import bar, clip, counted, number, percent, plural, sparkline, with_error
from headrace.observe.verdicts import before_and_after

LABEL, FAINT, GOOD, BAD, WARN = "bold cyan", "dim", "bold green", "bold red", "yellow"
WIDTH = 100


def frame(state: RunState) -> RenderableType:
    """Everything below the header."""
    if not state.started:
        return Text("")
    parts: list[RenderableType] = [_table(_lines(state))]
    if state.sample:
        parts.append(sample_panel(state.sample))
    parts += [Text(f"! {clip(one.message, 2 * WIDTH)}", style=WARN) for one in state.warnings[-3:]]
    return Group(*parts)


def brief(state: RunState) -> RenderableType:
    """One of several pipelines in one view."""
    if not state.started:
        return Text("")
    lines = [("reward", reward(state)), ("lag", _lag(state)), ("trainer", trainer(state)), ("checks", _checks(state))]
    return Group(_table(lines), *(Text(f"! {clip(one.message, WIDTH)}", style=WARN) for one in state.warnings[-1:]))


def _table(lines: Sequence[tuple[str, Text]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style=LABEL, min_width=9, no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=WIDTH - 13)
    for label, line in lines:
        table.add_row(label, line)
    return table


def _lines(state: RunState) -> list[tuple[str, Text]]:
    return [
        ("reward", reward(state)),
        ("lag", _lag(state)),
        ("engine", engine(state)),
        ("trainer", trainer(state)),
        ("in flight", _in_flight(state)),
        ("outcomes", _outcomes(state)),
        ("checks", _checks(state)),
    ]


def reward(state: RunState) -> Text:
    text = Text()
    if not state.rows:
        text.append("no step yet", FAINT)
    else:
        recent = measures.recent_reward(state)
        assert recent is not None
        text.append(f"{recent:.3f} ", "bold")
        text.append(sparkline([row.reward_drawn for row in state.rows], 28), "green")
    before, since = before_and_after(state)
    for name, one in (("before", before), ("now", since)):
        if one:
            text.append(f"   held-out {name} {with_error(one.reward_mean, one.reward_sem)}", "bold")
    return text


def _lag(state: RunState) -> Text:
    mean = measures.mean_lag(state)
    assert state.started is not None
    if mean is None:
        return Text(f"no token trained yet, bound {state.started.max_lag}", FAINT)
    text = Text(f"{number(mean, 2)} mean, {max(state.lags)} max, bound {state.started.max_lag}   ")
    total = state.lags.total()
    for lag, count in sorted(state.lags.items())[:6]:
        text.append(f"{lag} ", FAINT)
        text.append(f"{bar(count / total, 10)} ", "cyan")
        text.append(f"{percent(count / total)}  ", FAINT)
    if max(state.lags) > state.started.max_lag:
        text.append("ABOVE THE BOUND", BAD)
    return text


def _idle(share: float | None) -> Text:
    if share is None:
        return Text("idle      ?  ", FAINT)
    return Text(f"idle {percent(share):>5}  ", WARN if share > 0.5 else "")


def _rate(rate: float | None) -> str:
    return f"{rate:6,.0f} tok/s  " if rate is not None else "     ? tok/s  "


def engine(state: RunState) -> Text:
    idle, rate = state.engine.recent()
    text = Text(_rate(rate)).append_text(_idle(idle))
    text.append(f"{sparkline([span.sampled for span in state.engine.spans[-16:]], 16):<16}  ", "cyan")
    if last := state.engine.last:
        text.append(f"{last.running} running, {last.waiting} waiting, kv {percent(last.kv_used)}")
    return text


def trainer(state: RunState) -> Text:
    text = Text(_rate(measures.trainer_rate(state, 10))).append_text(_idle(measures.recent_trainer_idle(state)))
    if not state.rows:
        return text
    report = state.rows[-1].report
    text.append(f"{sparkline([row.report.seconds for row in state.rows[-16:]], 16):<16}  ", "cyan")
    text.append(
        f"grad {number(report.grad_norm)}, entropy {number(report.entropy)}, clip {percent(report.clip_fraction)}"
    )
    return text


def _in_flight(state: RunState) -> Text:
    counts, started = state.tickets, state.started
    assert started is not None
    text = f"{len(counts.flying)} groups generating, {len(counts.ready)} ready or training of {started.slots} slots"
    return Text(text)


def _outcomes(state: RunState) -> Text:
    counts = state.tickets
    text = Text(f"{plural(counts.trained, 'group')} trained")
    for name, ended, style in (("dropped", counts.dropped, ""), ("failed", counts.failed, WARN)):
        if ended:
            text.append(f", {ended.total():,} {name} ({counted(ended)})", style)
    return text


def _checks(state: RunState) -> Text:
    failed = sum(not check.ok for check in state.checks)
    text = Text()
    if failed:
        text.append(f"{failed} IDENTITY PROBES FAILED  ", BAD)
    worst = max((check.max_abs_diff for check in state.checks), default=None)
    ok = len(state.checks) - failed
    text.append(f"identity {ok} ok (max diff {number(worst)})" if worst is not None else "identity not probed yet")
    gap = measures.mean_swap(state)
    if gap is not None:
        text.append(f"   {len(state.swaps)} swaps, mean gap {1000 * gap:.2g} ms")
    if state.deaths:
        text.append(f"   {plural(len(state.deaths), 'death')}", WARN)
    if (saved := measures.saved_step(state)) is not None:
        text.append(f"   checkpoint {saved}", FAINT)
    return text


def sample_panel(sample: Sample) -> Panel:
    versions = f"version {sample.first_version}"
    if sample.last_version != sample.first_version:
        versions = f"versions {sample.first_version} to {sample.last_version}"
    title = f"step {sample.step}, reward {number(sample.reward)}, {sample.tokens} tokens, {versions}"
    body = Table.grid(padding=(0, 1))
    body.add_column(style=FAINT, width=1)
    body.add_column()
    body.add_row("?", Text(clip(sample.prompt, 180)))
    body.add_row(">", Text(clip(sample.text, 270) or "(empty)"))
    return Panel(body, title=title, title_align="left", border_style=FAINT, width=WIDTH)


def padded(renderable: RenderableType) -> Padding:
    return Padding(renderable, (0, 1))
