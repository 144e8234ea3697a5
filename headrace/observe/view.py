"""The live view as one frame, built from a `RunState`. Nothing in it needs colour to be understood."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from headrace.observe import measures
from headrace.observe.layout import FAINT, Line, Lines, middle_out
from headrace.observe.records import Sample
from headrace.observe.state import RunState
from headrace.observe.text import bar, counted, number, percent, plural, sparkline, with_error
from headrace.observe.verdicts import before_and_after

GOOD, BAD, WARN = "bold green", "bold red", "yellow"
WIDTH = 120
"""Lines longer than this are not read."""
CURVE = 24
"""Characters of a sparkline."""
SAMPLE_HEIGHT, LEAST = 7, 5
"""Lines that a sample with its frame is given where there is room for several, and the fewest that it needs."""
BESIDE = 4 + 6 + 2
"""Characters of a sample's line that are frame and label."""


def frame(state: RunState) -> RenderableType:
    """Everything below the header."""
    if not state.started:
        return Text("")
    return Frame(_lines(state), tuple(state.samples), [one.message for one in state.warnings[-3:]])


def brief(state: RunState) -> RenderableType:
    """One of several pipelines in one view."""
    if not state.started:
        return Text("")
    lines = [("reward", reward(state)), ("lag", _lag(state)), ("trainer", trainer(state)), ("checks", _checks(state))]
    return Frame(lines, (), [one.message for one in state.warnings[-1:]])


class Frame:
    """Numbers, then warnings, then as many samples as the height leaves room for. Laid out when it is shown, by rich's thread:
    it has no part of the state, which goes on changing."""

    def __init__(self, lines: Sequence[Line], samples: Sequence[Sample], warnings: Sequence[str]) -> None:
        self._lines, self._samples, self._warnings = lines, samples, warnings

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.update_width(min(options.max_width, WIDTH))
        height = options.height or console.height
        above = options.update(height=None)
        lines = console.render_lines(Lines(self._lines), above, pad=False)
        yield from console.render(Lines(self._lines), above)
        rest = height - len(lines)
        for message in self._warnings:
            text = Text("! ", WARN).append_text(middle_out(message, options.max_width - 2, 3, console))
            rest -= len(text.plain.splitlines())
            yield text
        yield from self._panels(console, options.max_width, rest)

    def _panels(self, console: Console, width: int, height: int) -> list[Panel]:
        made: list[Panel] = []
        for left, sample in zip(range(len(self._samples), 0, -1), self._samples, strict=True):
            if height < LEAST:
                break
            share = height // max(1, min(height // SAMPLE_HEIGHT, left))
            made.append(sample_panel(sample, console, width, share))
            height -= len(console.render_lines(made[-1], console.options.update_width(width)))
        return made


def _lines(state: RunState) -> list[Line]:
    return [
        ("reward", reward(state)),
        ("lag", _lag(state)),
        ("engine", engine(state)),
        ("trainer", trainer(state)),
        ("groups", _groups(state)),
        ("checks", _checks(state)),
    ]


def reward(state: RunState) -> list[Text]:
    parts = [Text("no step yet", FAINT)]
    if state.rows:
        recent = measures.recent_reward(state)
        assert recent is not None
        curve = sparkline([row.reward_drawn for row in state.rows], CURVE)
        parts = [Text(f"{recent:.3f} ", "bold").append(curve, "green")]
    before, since = before_and_after(state)
    for name, one in (("before", before), ("now", since)):
        if one:
            parts.append(Text(f"held-out {name} {with_error(one.reward_mean, one.reward_sem)}", "bold"))
    return parts


def _lag(state: RunState) -> list[Text]:
    mean = measures.mean_lag(state)
    assert state.started is not None
    if mean is None:
        return [Text(f"no token trained yet, bound {state.started.max_lag}", FAINT)]
    parts = [Text(f"{number(mean, 2)} mean, {max(state.lags)} max, bound {state.started.max_lag}")]
    if max(state.lags) > state.started.max_lag:
        parts.append(Text("ABOVE THE BOUND", BAD))
    total = state.lags.total()
    for lag, count in sorted(state.lags.items())[:6]:
        part = Text(f"{lag} ", FAINT).append(f"{bar(count / total, 10)} ", "cyan")
        parts.append(part.append(percent(count / total), FAINT))
    return parts


def _idle(share: float | None) -> Text:
    if share is None:
        return Text("idle      ?", FAINT)
    return Text(f"idle {percent(share):>5}", WARN if share > 0.5 else "")


def _rate(rate: float | None) -> Text:
    return Text(f"{rate:6,.0f} tok/s" if rate is not None else "     ? tok/s")


def engine(state: RunState) -> list[Text]:
    idle, rate = state.engine.recent()
    parts = [_rate(rate), _idle(idle)]
    parts.append(Text(sparkline([span.sampled for span in state.engine.spans[-16:]], 16), "cyan"))
    if last := state.engine.last:
        parts.append(Text(f"{last.running} running, {last.waiting} waiting, kv {percent(last.kv_used)}"))
    return parts


def trainer(state: RunState) -> list[Text]:
    parts = [_rate(measures.trainer_rate(state, 10)), _idle(measures.recent_trainer_idle(state))]
    if not state.rows:
        return parts
    report = state.rows[-1].report
    parts.append(Text(sparkline([row.report.seconds for row in state.rows[-16:]], 16), "cyan"))
    numbers = f"grad {number(report.grad_norm)}, entropy {number(report.entropy)}, clip {percent(report.clip_fraction)}"
    return [*parts, Text(numbers)]


def _groups(state: RunState) -> list[Text]:
    counts, started = state.tickets, state.started
    assert started is not None
    parts = [
        Text(f"{len(counts.flying)} generating, {len(counts.ready)} ready or training, of {started.slots} slots"),
        Text(f"{counts.trained:,} trained"),
    ]
    for name, ended, style in (("dropped", counts.dropped, ""), ("failed", counts.failed, WARN)):
        if ended:
            parts.append(Text(f"{ended.total():,} {name} ({counted(ended)})", style))
    return parts


def _checks(state: RunState) -> list[Text]:
    parts = []
    failed = sum(not check.ok for check in state.checks)
    if failed:
        parts.append(Text(f"{failed} IDENTITY PROBES FAILED", BAD))
    worst = max((check.max_abs_diff for check in state.checks), default=None)
    ok = len(state.checks) - failed
    probed = f"identity {ok} ok (max diff {number(worst)})" if worst is not None else "identity not probed yet"
    parts.append(Text(probed))
    gap = measures.mean_swap(state)
    if gap is not None:
        parts.append(Text(f"{plural(len(state.swaps), 'swap')}, mean gap {1000 * gap:.2g} ms"))
    if state.deaths:
        parts.append(Text(plural(len(state.deaths), "death"), WARN))
    if state.checkpoints:
        parts.append(Text(f"checkpoint {state.checkpoints[-1].step}", FAINT))
    return parts


def sample_panel(sample: Sample, console: Console, width: int, height: int) -> Panel:
    """In at most so many lines."""
    versions = f"version {sample.first_version}"
    if sample.last_version != sample.first_version:
        versions = f"versions {sample.first_version} to {sample.last_version}"
    cut = ", cut off" if sample.stop == "length" else ""
    title = f"step {sample.step}, reward {number(sample.reward)}, {plural(sample.tokens, 'token')}{cut}, {versions}"
    inside, room = width - BESIDE, height - 2
    prompt = middle_out(sample.prompt, inside, max(1, room // 3), console)
    room -= len(prompt.plain.splitlines())
    output = middle_out(sample.text or "(empty)", inside, max(1, room), console)
    lines: list[Line] = [("prompt", [prompt]), ("output", [output])]
    return Panel(Lines(lines, label_width=6), title=Text(title), title_align="left", border_style=FAINT, width=width)


def padded(renderable: RenderableType) -> Padding:
    return Padding(renderable, (0, 1))
