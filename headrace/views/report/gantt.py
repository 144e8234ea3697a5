"""Both pools over time: engine busy and idle, trainer stepping, publishing and waiting, swaps, evaluations; and what their processes use of the
machine.

Bars are in a nested coordinate system whose unit is the second, so that the page's script can zoom by changing its view box.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import pairwise

from headrace.facts.number_tables import MINUTES, Curve, StepColumns
from headrace.facts.run_state import RunState, train_seconds
from headrace.facts.run_totals import EngineSpan
from headrace.facts.texts import duration, number, percent, reward_text, short_time
from headrace.views.report.svg import Chart, clock_ticks, extent, figure

LANES = {"engine": (4, 34), "swaps": (42, 20), "trainer": (68, 34), "other": (108, 22)}
"""Lane -> top and height."""
HEIGHT = 134
MAX_BARS = 3000
"""Bars of one kind at most. In longer runs engine samples are merged, and only the last steps are drawn, which a note says."""


def gantt(run: RunState, part: RunState | None = None) -> str:
    """Draws a run, or a part of its facts."""
    state = part or run
    if not state.engine.spans and not state.rows:
        return '<p class="empty">Neither pool was sampled.</p>'
    start, end = _start(part) if part else 0.0, max(state.now, 1.0)
    left, right = (start, end) if part else _first_window(state, end)
    bars = "".join([*_engine(state), *_swaps(state), *_trainer(state), *_naps(state), *_others(state)])
    labels = "".join(
        f'<span style="top:{top + height / 2:.0f}px">{name}</span>' for name, (top, height) in LANES.items()
    )
    return time_chart(
        whole=(start, end),
        shown=(left, right),
        height=HEIGHT,
        labels=labels,
        bars=_ground(start, end) + bars,
        below=_legend(run, state),
        part=part is not None,
    )


def time_chart(
    *,
    whole: tuple[float, float],
    shown: tuple[float, float],
    height: float,
    labels: str,
    bars: str,
    below: str,
    part: bool,
    origin: float = 0.0,
) -> str:
    """Returns a chart over time that the page's script zooms. `whole`, `shown`: its seconds, and those that are seen at first. `bars`: SVG in
    seconds and pixels. `part`: whether the run is longer. `origin`: the second of the run at which its own begin."""
    left, right = shown
    return (
        f'<div class="gantt" data-start="{whole[0]}" data-end="{whole[1]:.3f}" data-origin="{origin:.3f}">{_controls(part)}'
        f'<div class="gantt-body"><div class="lanes">{labels}</div><svg class="gantt-svg" height="{height:g}"'
        f' viewBox="{left:.3f} 0 {right - left:.3f} {height:g}" preserveAspectRatio="none">{bars}</svg></div>'
        f'<div class="gantt-axis">{_axis(left + origin, right + origin)}</div>{below}</div>'
    )


def _start(part: RunState) -> float:
    began = [row.t - row.report.seconds - row.wait_seconds for row in part.rows[:1]]
    return max(0.0, min([*began, *(span.start for span in part.engine.spans[:1])]))


def _first_window(state: RunState, end: float) -> tuple[float, float]:
    """Returns the part that is shown first: all of a short run, else about twelve steps from its middle, so that bars are distinct."""
    if end <= 60 or len(state.rows) < 12:
        return 0.0, end
    middle = len(state.rows) // 2
    first, last = state.rows[max(0, middle - 6)], state.rows[min(len(state.rows) - 1, middle + 6)]
    return first.t - first.report.seconds - first.wait_seconds, last.t + 0.5


def _bar(start: float, end: float, *, lane: str, name: str, tip: str, share: float = 1.0) -> str:
    top, height = LANES[lane]
    tall = max(0.5, height * share)
    return (
        f'<rect class="{name}" x="{start:.3f}" y="{top + height - tall:.1f}" width="{max(0.0, end - start):.3f}"'
        f' height="{tall:.1f}" data-tip="{escape(tip)}"/>'
    )


def _ground(start: float, end: float) -> str:
    return "".join(
        f'<rect class="ground" x="{start:.3f}" y="{top}" width="{end - start:.3f}" height="{height}"/>'
        for top, height in (LANES["engine"], LANES["trainer"])
    )


def _engine(state: RunState) -> Iterable[str]:
    for span in _merged(state.engine.spans):
        seconds = span.end - span.start
        tip = (
            f"{_clock(span.start, span.end)}\nengine busy {percent(span.busy)}\n{span.sampled / seconds:,.0f} tokens a second"
            f"\n{span.running} running, {span.waiting} waiting"
        )
        yield _bar(span.start, span.end, lane="engine", name="busy", tip=tip, share=span.busy)


def _merged(spans: list[EngineSpan]) -> Iterable[EngineSpan]:
    """Joins neighbouring spans to at most `MAX_BARS`; their busy shares are weighted by time."""
    per = -(-len(spans) // MAX_BARS) or 1
    for i in range(0, len(spans), per):
        some = spans[i : i + per]
        seconds = sum(span.end - span.start for span in some)
        busy = sum(span.busy * (span.end - span.start) for span in some) / seconds
        last, sampled, prompt = some[-1], sum(span.sampled for span in some), sum(span.prompt for span in some)
        yield EngineSpan(
            start=some[0].start,
            end=last.end,
            busy=busy,
            sampled=sampled,
            prompt=prompt,
            running=last.running,
            waiting=last.waiting,
        )


def _swaps(state: RunState) -> Iterable[str]:
    top, height = LANES["swaps"]
    for swap in state.swaps[-MAX_BARS:]:
        tip = (
            f"{duration(swap.t)}\nversion {swap.update.version} live\ngeneration stopped for"
            f" {short_time(swap.load.swap_seconds)}\nverified in {short_time(swap.load.verify_seconds)} beside it"
        )
        yield (
            f'<line class="swap" x1="{swap.t:.3f}" x2="{swap.t:.3f}" y1="{LANES["engine"][0]}" y2="{top + height}"'
            f' data-tip="{escape(tip)}"/>'
        )


def _trainer(state: RunState) -> Iterable[str]:
    published = {swap.update.version: swap.update.seconds for swap in state.swaps}
    for row in state.rows[-MAX_BARS:]:
        began = row.t - row.report.seconds
        waited = f"step {row.report.step + 1}\nwaited {short_time(row.wait_seconds)} for its groups"
        yield _bar(began - row.wait_seconds, began, lane="trainer", name="waits", tip=waited, share=0.35)
        tip = f"step {row.report.step + 1}\ntrained {short_time(row.report.seconds)}, {row.report.loss_tokens:,} tokens"
        yield _bar(began, row.t, lane="trainer", name="steps", tip=f"{tip}\nreward {number(row.reward_drawn)}")
        if seconds := published.get(row.report.version, 0.0):
            tip = f"version {row.report.version}\npublished in {short_time(seconds)}"
            yield _bar(row.t, row.t + seconds, lane="trainer", name="publishes", tip=tip)


def _naps(state: RunState) -> Iterable[str]:
    """Yields the times in which a pool had no devices, because the other one had them."""
    for nap in (nap for nap in state.naps.over[-MAX_BARS:] if nap.who in LANES):
        freed = f"\n{nap.freed / 2**30:.2g} GiB given back" if nap.freed else ""
        tip = f"{_clock(nap.start, nap.end)}\nthe {nap.who} asleep{freed}"
        yield _bar(nap.start, nap.end, lane=nap.who, name="asleep", tip=tip, share=0.15)


def _others(state: RunState) -> Iterable[str]:
    for evaluation in state.evals:
        tip = f"held-out reward {evaluation.phase}\n{reward_text(evaluation.reward_mean)} in {short_time(evaluation.seconds)}"
        yield _bar(evaluation.t - evaluation.seconds, evaluation.t, lane="other", name="evals", tip=tip)
    for saved in state.checkpoints[-MAX_BARS:]:
        began, stood = saved.t - saved.seconds, f"training stood still for {short_time(saved.held)}"
        tip = f"checkpoint of step {saved.step}\n{saved.error or f'written in {short_time(saved.seconds)}, {stood}'}"
        yield _bar(began, saved.t, lane="other", name="saves", tip=tip)
        yield _bar(
            began, began + saved.held, lane="trainer", name="saves", tip=f"checkpoint of step {saved.step}\n{stood}"
        )
    top, height = LANES["other"]
    for death in state.deaths:
        tip = f"{duration(death.t)}\nthe {death.who} process {death.how}"
        yield f'<line class="death" x1="{death.t:.3f}" x2="{death.t:.3f}" y1="0" y2="{top + height}" data-tip="{escape(tip)}"/>'


def _clock(start: float, end: float) -> str:
    return f"{duration(start)} to {duration(end)}"


def _axis(left: float, right: float) -> str:
    """Returns the same ticks as the script makes, for readers without JavaScript."""
    return "".join(
        f'<span style="left:{100 * (t - left) / (right - left):.3f}%">{duration(t)}</span>'
        for t in clock_ticks(left, right)
    )


def _controls(part: bool) -> str:
    buttons = (
        ("all", "all of these steps" if part else "whole run"),
        ("in", "+"),
        ("out", "−"),
        ("left", "◀"),
        ("right", "▶"),
    )
    made = "".join(f'<button type="button" data-do="{do}">{text}</button>' for do, text in buttons)
    return (
        f'<div class="gantt-controls">{made}<span class="faint">drag to move<i>, Ctrl + wheel to zoom</i></span></div>'
    )


def _legend(run: RunState, state: RunState) -> str:
    """`state`: what is drawn of the run."""
    names = (
        ("busy", "engine busy (height is the share)"),
        ("swap", "new weights live"),
        ("steps", "training"),
        ("publishes", "publishing"),
        ("waits", "waiting for groups"),
        *([("asleep", "asleep: the other one has the devices")] if state.naps.over else []),
        ("evals", "evaluation"),
        ("saves", "checkpoint"),
        ("death", "worker died"),
    )
    keys = "".join(f'<span class="key"><i class="{name}"></i>{text}</span>' for name, text in names)
    cut = ""
    if len(state.rows) > MAX_BARS:
        cut = f'<p class="note">The last {MAX_BARS:,} of {len(state.rows):,} steps are drawn.</p>'
    spent = f'<p class="note">Training took {duration(train_seconds(run))} of {duration(run.now)}.</p>'
    return f'<div class="keys">{keys}</div>{spent}{cut}'


# --- What the processes use


USES = {
    "cores": ("Cores that processes use", ""),
    "gib": ("Memory that processes hold", " GiB"),
    "busy": ("GPU time", ""),
}
"""Title and unit of each chart, by the end of the names of its numbers."""


def machine_use(columns: StepColumns | None) -> str:
    """Returns a chart over minutes for each kind of use; empty where nothing was read."""
    figures = [_use(columns, kind, title, unit) for kind, (title, unit) in USES.items()] if columns else []
    return f'<div class="figures beneath">{"".join(figures)}</div>' if any(figures) else ""


def _use(columns: StepColumns, kind: str, title: str, unit: str) -> str:
    names = [name for name in columns.names if name.startswith("use/") and name.endswith(f"_{kind}")]
    drawn = {name[len("use/") : -len(kind) - 1]: columns.drawn(name, MINUTES, points=200) for name in names}
    drawn = {who: curve for who, curve in drawn.items() if len(curve.x) > 1}
    if not drawn:
        return ""
    ends = min(float(curve.x[0]) for curve in drawn.values()), max(float(curve.x[-1]) for curve in drawn.values())
    tops = extent([float(curve.y.max()) for curve in drawn.values()], zero=True)
    chart = Chart(ends, tops, x_label="minutes", whole=False, percent=kind == "busy")
    colours = {who: f"c{place % 5 + 1}" for place, who in enumerate(drawn)}
    for who, curve in drawn.items():
        chart.line(list(zip(curve.x.tolist(), curve.y.tolist(), strict=True)), colours[who])
    longest = max(drawn.values(), key=lambda curve: len(curve.x)).x.tolist()
    edges = [ends[0], *((a + b) / 2 for a, b in pairwise(longest)), ends[1]]
    for place, minute in enumerate(longest):
        told = [f"{who} {_near(curve, minute, kind)}{unit}" for who, curve in drawn.items()]
        chart.hover(edges[place], edges[place + 1], "\n".join([f"minute {minute:.1f}", *told]))
    keys = [(colours[who], who) for who in drawn]
    return figure(
        title,
        chart.html(title),
        keys,
        "on this machine, mean since the reading before" if kind == "cores" else unit.strip(),
    )


def _near(curve: Curve, minute: float, kind: str) -> str:
    value = float(curve.y[abs(curve.x - minute).argmin()])
    return percent(value) if kind == "busy" else number(value)
