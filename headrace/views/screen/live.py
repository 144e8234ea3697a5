"""The live view, built from a `RunState`. It can be understood without colour."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.panel import Panel

from headrace.facts import run_state
from headrace.facts.facts import MemberMoved, MemberSample
from headrace.facts.health import health
from headrace.facts.records import Sample
from headrace.facts.run_state import RunState
from headrace.facts.texts import bar, clip, counted, number, percent, plural, reward_text, sparkline, with_error
from headrace.facts.verdicts import (
    advices,
    before_and_after,
    experience_words,
    failings,
    judged,
    measured_on,
    pool_shares,
    shares,
    weight_sync,
)
from headrace.views.screen.console import PrintableText as Text
from headrace.views.screen.layout import FAINT, Line, Lines, distinct, middle_out, without_marks

# --- The members of a fleet, as lines that fit into 80 columns.


STYLES = {"serving": "green", "away": "yellow", "lost": "bold red"}
NAME = 27
"""Characters of a name; a longer one loses its middle."""
WHY = 160


def table(members: Sequence[MemberSample]) -> list[Text]:
    """A heading, then a line for each member, and one more with the reason for those that do not serve."""
    width = min(NAME, max([len("member"), *(len(member.name) for member in members)]))
    lines = [Text(f"{'member':<{width}}  state    version  requests   tok/s     tokens  left", FAINT)]
    for member in members:
        line = Text(f"{short(member.name, width):<{width}}  ")
        line.append(f"{member.state:<7}", STYLES.get(member.state, ""))
        version = str(member.version) if member.version >= 0 else "-"
        rate = f"{member.rate:,.0f}" if member.state == "serving" else "-"
        lines.append(
            line.append(f"  {version:>7}  {member.running:>8}  {rate:>6}  {member.tokens:>9,}  {member.absences:>4}")
        )
        if member.why and member.state != "serving":
            lines.append(Text(f"  {clip(member.why, WHY)}", FAINT))
    return lines


def short(name: str, width: int) -> str:
    """The name in `width` characters: its end tells servers on one machine apart, its beginning machines."""
    if len(name) <= width:
        return name
    half = (width - 1) // 2
    return f"{name[:half]}…{name[len(name) - (width - 1 - half) :]}"


def line_of(state: RunState) -> list[Line]:
    """One line about all members, where there are several."""
    if len(state.members) < 2:
        return []
    serving = [member for member in state.members if member.state == "serving"]
    missing = any(member.state not in ("serving", "resting") for member in state.members)
    parts = [Text(f"{len(serving)} of {len(state.members)} serve", "yellow" if missing else "")]
    for member in state.members:
        rate = (
            f"{member.rate:,.0f} tok/s, {plural(member.running, 'request')}"
            if member.state == "serving"
            else member.state
        )
        parts.append(
            Text(f"{short(member.name.removeprefix('http://'), NAME)} ", FAINT).append(
                rate, STYLES.get(member.state, "")
            )
        )
    return [("members", parts)]


def absences(moves: Sequence[MemberMoved]) -> str:
    """How often members left, and what became of their requests; empty if none did."""
    left = [move for move in moves if move.state in ("away", "lost")]
    if not left:
        return ""
    names = sorted({move.member for move in left})
    back = sum(move.state == "serving" for move in moves)
    lost = sum(move.state == "lost" for move in left)
    words = f"{', '.join(names)} left {plural(len(left), 'time')}, came back {plural(back, 'time')}"
    words += f", {lost} for good" if lost else ""
    moved = sum(move.requests for move in left)
    return f"{words}; {plural(moved, 'request')} went on elsewhere from {plural(sum(move.tokens for move in left), 'token')}"


# --- live ------------------------------------------------------------


GOOD, BAD, WARN = "bold green", "bold red", "yellow"
TICKS = {"good": ("✓", GOOD), "warn": ("!", WARN), "bad": ("✗", BAD), "unknown": ("–", FAINT)}
"""Mark and style of a judgement."""
WIDTH = 120
"""Longest line of the view."""
CURVE = 24
"""Characters of a sparkline."""
SAMPLE_HEIGHT, LEAST = 7, 5
"""Lines of a sample with its border if there is room for several, and the fewest that it needs."""
BESIDE = 4 + 6 + 2
"""Characters of a sample's line that are border and label."""

Trace = tuple[str, str]
"""Title and text of a traceback."""


def frame(state: RunState) -> RenderableType:
    """Returns everything below the header."""
    if not state.started:
        return Text("")
    return StateView(_lines(state), _samples(state), _notes(state), _trace(state))


def brief(state: RunState) -> RenderableType:
    """Returns the short view of one adapter among several."""
    if not state.started:
        return Text("")
    lines = [("reward", reward(state)), ("lag", _lag(state)), ("trainer", trainer(state)), ("checks", _checks(state))]
    return StateView(lines, (), _notes(state)[:1])


class StateView:
    """Numbers, notes, a traceback, then as many samples as fit into the height. It is laid out when rich's thread shows it, so it holds no
    reference to the state, which keeps changing."""

    def __init__(
        self, lines: Sequence[Line], samples: Sequence[Sample], notes: Sequence[Text], trace: Trace | None = None
    ) -> None:
        self._lines, self._samples, self._notes, self._trace = lines, samples, notes, trace

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        options = options.update_width(min(options.max_width, WIDTH))
        height, inside = options.height or console.height, options.update(height=None)
        above: list[RenderableType] = [Lines(self._lines)]
        height -= len(console.render_lines(above[0], inside, pad=False))
        for note in self._notes:
            lines = middle_out(note, inside.max_width, 3, console)
            if (count := len(lines.plain.splitlines())) <= height:
                above.append(lines)
                height -= count
        for part in above:
            yield from console.render(part, inside)
        if self._trace and height > LEAST:
            panel = _trace_panel(*self._trace, console, options.max_width, max(LEAST, height // 2))
            height -= len(console.render_lines(panel, inside))
            yield from console.render(panel, inside)
        for panel in self._panels(console, options.max_width, height):
            yield from console.render(panel, inside)

    def _panels(self, console: RichConsole, width: int, height: int) -> list[Panel]:
        made: list[Panel] = []
        for left, sample in zip(range(len(self._samples), 0, -1), self._samples, strict=True):
            if height < LEAST:
                break
            share = height // max(1, min(height // SAMPLE_HEIGHT, left))
            made.append(sample_panel(sample, console, width, share))
            height -= len(console.render_lines(made[-1], console.options.update_width(width)))
        return made


def _trace_panel(title: str, body: str, console: RichConsole, width: int, height: int) -> Panel:
    """Shows the last lines of a traceback, with the exception and its place."""
    lines = Text("\n".join(body.splitlines())).wrap(console, width - 4, overflow="fold")
    shown = Text("\n").join(list(lines)[2 - height :])
    return Panel(shown, title=Text(title), title_align="left", border_style=WARN, width=width)


def _samples(state: RunState) -> tuple[Sample, ...]:
    """Returns the samples of the last step; before the first step, the first completion."""
    first = state.first_text
    if state.samples or first is None:
        return tuple(state.samples)
    return (
        Sample(
            step=0,
            prompt=first.prompt,
            text=first.text,
            reward=math.nan,
            rewards={},
            tokens=first.tokens,
            stop=first.stop,
            first_version=first.version,
            last_version=first.version,
        ),
    )


def _lines(state: RunState) -> list[Line]:
    verdict = _verdict(state)
    told = any("held out" in part.plain for _, parts in verdict for part in parts)
    return [
        *verdict,
        *_chosen(state),
        *_warm_start(state),
        ("reward", reward(state, measured=not told)),
        ("lag", _lag(state)),
        ("engine", engine(state)),
        *line_of(state),
        ("trainer", trainer(state)),
        *weights(state),
        ("groups", _groups(state)),
        ("shares", _shares(state)),
        *_prompts(state),
        ("checks", _checks(state)),
    ]


def _verdict(state: RunState) -> list[Line]:
    """Returns whether it learns, in one sentence. What is to be done about it is an advice in the notes, or in `headrace status`."""
    if not state.rows:
        return []
    found = health(state)
    return [("verdict", [Text(found.sentence, TICKS[found.mark][1])])]


def _chosen(state: RunState) -> list[Line]:
    """Returns the chosen settings until the first step, and the last change of the number of steps."""
    assert state.started is not None
    plan: list[Line] = [("minutes", [Text(plan.message)]) for plan in state.planned[-1:]]
    if state.rows:
        return plan
    return [(name.removesuffix(" chosen"), [Text(why)]) for name, why in state.started.chosen.items()]


def _warm_start(state: RunState) -> list[Line]:
    """Returns the losses of the training on given answers before the run."""
    done = state.warm
    if done is None:
        return []
    parts = [
        Text(f"loss {done.losses[0]:.3f} → {done.losses[-1]:.3f} {done.unit} ").append(
            sparkline(done.losses, CURVE), "cyan"
        )
    ]
    if done.held_out:
        parts.append(Text(f"held-out {done.held_out[0]:.3f} → {done.held_out[-1]:.3f}"))
    if done.agreed:
        parts.append(Text(f"of held-out pairs {done.agreed[0]:.0%} → {done.agreed[-1]:.0%} agree"))
    return [("warm start", parts)]


def reward(state: RunState, measured: bool = True) -> list[Text]:
    """Returns the drawn reward, and with `measured` the held-out one, which a verdict may have said."""
    parts = [Text("no step yet", FAINT)]
    if state.rows:
        recent = run_state.recent_reward(state)
        assert recent is not None
        curve = sparkline([row.reward_drawn for row in state.spread], CURVE)
        parts = [Text(f"{reward_text(recent)} ", "bold").append(curve, "green")]
    before, since = before_and_after(state) if measured else (None, None)
    for name, evaluation in (("before", before), ("now", since)):
        if evaluation:
            part = Text(f"held-out {name} {with_error(evaluation.reward_mean, evaluation.reward_sem)}", "bold")
            if evaluation.failures and evaluation is (since or before):
                part.append(f" on {measured_on(evaluation)}", f"not bold {WARN}")
            parts.append(part)
    return parts


def _lag(state: RunState) -> list[Text]:
    mean = run_state.mean_lag(state)
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
    if words := experience_words(state):
        parts.append(Text(f"earlier rollouts {words}", FAINT))
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
    parts += _asleep(state, "engine")
    if last := state.engine.last:
        parts.append(Text(f"{last.running} running, {last.waiting} waiting, kv {percent(last.kv_used)}"))
    return parts


def _asleep(state: RunState, who: str) -> list[Text]:
    slept = state.naps.now.get(who)
    freed = f", {slept.report.memory / 2**30:.2g} GiB given back" if slept and slept.report.memory else ""
    return [Text(f"asleep{freed}", FAINT)] if slept else []


def trainer(state: RunState) -> list[Text]:
    parts = [_rate(run_state.trainer_rate(state, 10)), _idle(run_state.recent_trainer_idle(state))]
    parts += _asleep(state, "trainer")
    parts += [Text(words, FAINT)] if (words := state.naps.lent_words) else []
    if not state.rows:
        return parts
    report = state.rows[-1].report
    parts.append(Text(sparkline([row.report.seconds for row in state.rows[-16:]], 16), "cyan"))
    numbers = f"grad {number(report.grad_norm)}, entropy {number(report.entropy)}, clip {percent(report.clip_fraction)}"
    return [*parts, Text(numbers)]


def weights(state: RunState) -> list[Line]:
    """Shows the swaps, and what travels for each."""
    gap, sync = run_state.mean_swap(state), weight_sync(state)
    if gap is None:
        return []
    parts = [Text(f"{plural(state.swapped.count, 'swap')}, mean gap {1000 * gap:.2g} ms")]
    if sync.mood != "unknown":
        parts += [Text(sync.value), Text(sync.detail, FAINT)]
    return [("weights", parts)]


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


def _shares(state: RunState) -> list[Text]:
    """Shows shares over the last groups."""
    found = shares(state.shares.recent)
    return [Text(text, WARN if text.startswith("failed") else "") for text in found] or [Text("nothing lost", FAINT)]


def _prompts(state: RunState) -> list[Line]:
    """Shows the pools from which a curriculum has drawn."""
    chosen = state.choices
    return [("drawn from", [Text(pool_share) for pool_share in pool_shares(chosen)])] if chosen.draws else []


def _notes(state: RunState) -> list[Text]:
    """Returns the advice, then the last warnings that are still true, the newest first; with advice, only the newest warning."""
    advice = [f"→ {given.name}: {given.sentence}" for given in advices(state)]
    warnings = distinct([warning.message for warning in run_state.open_warnings(state)], 1 if advice else 3)
    return [Text(line, WARN) for line in (*advice, *(f"! {warning}" for warning in reversed(warnings)))]


def _trace(state: RunState) -> Trace | None:
    """Returns the traceback of the commonest failure."""
    for failing in failings(state)[:1]:
        if failing.first:
            title = f"{failing.first.reason}: {plural(failing.rollouts, 'rollout')} so far; the first, {failing.first.prompt_id}"
            return title, without_marks(failing.first.traceback) or failing.first.detail
    return None


def _checks(state: RunState) -> list[Text]:
    parts = []
    failed = len(state.probed.failed)
    if failed:
        parts.append(Text(f"{failed} IDENTITY PROBES FAILED", BAD))
    ok, widest = state.probed.count - failed, number(state.probed.widest)
    probed = f"identity {ok} ok (max diff {widest})" if state.probed.count else "identity not probed yet"
    parts.append(Text(probed))
    if state.deaths:
        parts.append(Text(plural(len(state.deaths), "death"), WARN))
    if (saved := run_state.saved_step(state)) is not None:
        parts.append(Text(f"checkpoint {saved}", FAINT))
    return parts


def sample_panel(sample: Sample, console: RichConsole, width: int, height: int) -> Panel:
    """Shows one rollout in at most `height` lines."""
    versions = f"version {sample.first_version}"
    if sample.last_version != sample.first_version:
        versions = f"versions {sample.first_version} to {sample.last_version}"
    cut = ", cut off" if sample.stop == "length" else ""
    step = f"step {sample.step}, reward {number(sample.reward)}" if sample.step else "the first completion"
    title = f"{step}, {plural(sample.tokens, 'token')}{cut}, {versions}"
    inside, room = width - BESIDE, height - 2
    words = judged(sample.answer, sample.extracted)
    answer = middle_out(words, inside, 1 if room < 5 else 2, console)
    room -= len(answer.plain.splitlines())
    prompt = middle_out(sample.prompt, inside, max(1, room // 3), console)
    room -= len(prompt.plain.splitlines())
    output = middle_out(sample.text or "(empty)", inside, max(1, room), console)
    lines: list[Line] = [("prompt", [prompt]), ("output", [output])]
    lines += [("scored", [answer])] if words else []
    return Panel(Lines(lines, label_width=6), title=Text(title), title_align="left", border_style=FAINT, width=width)


def padded(renderable: RenderableType) -> Padding:
    return Padding(renderable, (0, 1))
