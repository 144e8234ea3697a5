"""The output of a run while it goes on: one live view on a terminal, or one line per step in a log."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

from headrace.facts import run_state
from headrace.facts.facts import (
    CheckpointSaved,
    Evaluated,
    FirstFailure,
    FirstText,
    GroupEnded,
    Planned,
    RunEnded,
    RunStarted,
    Warned,
    Withdrawn,
    WorkerJoined,
    WorkerLost,
)
from headrace.facts.records import MetricsFact, StepRow
from headrace.facts.run_state import RunState
from headrace.facts.texts import clip, duration, number, percent, plural, reward_text, short_time, with_error
from headrace.facts.verdicts import advices, measured_on, shares
from headrace.views.config import ObserveConfig
from headrace.views.screen.console import Console, LiveView
from headrace.views.screen.console import PrintableText as Text
from headrace.views.screen.layout import FAINT, LABEL, HeaderAbove, flow
from headrace.views.screen.live import WIDTH, brief, frame, padded

# --- The surface of a live view
# A terminal, or the output of a notebook cell. Both show the same view.


REFRESH = 4.0
"""Frames per second. A thread redraws, so that the clock moves while the event loop waits for a worker."""

NOTEBOOK_REFRESH = 2.0
"""Frames per second in a notebook, which sends each frame to a browser."""

COLUMNS = 104
"""Width of the view in a notebook."""

FRAME = (
    '<pre style="margin:0;padding:10px 14px;max-width:max-content;overflow-x:auto;border:1px solid #8884;border-radius:6px;'
    "font:12.5px/1.35 ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre\">{code}</pre>"
)
"""HTML of a frame. It sets no background, so that it fits light and dark notebooks."""

Update = Callable[[str], None]
"""Replaces the displayed HTML."""


class Screen(Protocol):
    """A surface that shows a view until it is stopped."""

    def stop(self) -> None:
        """Removes the view."""


def terminal_mode(config: ObserveConfig) -> str:
    """Returns `live`, `plain` or `off`."""
    if config.terminal != "auto":
        return config.terminal
    on_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return "live" if on_terminal or in_notebook() else "plain"


def in_notebook() -> bool:
    """Returns whether this process is a Jupyter kernel (JupyterLab, VS Code, Colab), whose cells show HTML."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


def open_screen(view: Callable[[], RenderableType], console: Console) -> Screen:
    """Starts a thread that draws the result of `view` repeatedly."""
    if in_notebook():
        return NotebookScreen(view, _display)
    live = LiveView(get_renderable=view, console=console, refresh_per_second=REFRESH, transient=True)
    live.start(refresh=True)
    return live


def _display(first: str) -> Update:
    from IPython.display import HTML, display  # available in every kernel

    handle = display(HTML(first), display_id=True)
    return lambda text: handle.update(HTML(text))


class NotebookScreen:
    """A view in one notebook display, updated in place."""

    def __init__(self, view: Callable[[], RenderableType], display: Callable[[str], Update]) -> None:
        """`display` shows the first HTML and returns the function that replaces it."""
        self._view, self._shown = view, as_html(view())
        self._update = display(self._shown)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="headrace-notebook", daemon=True)
        self._thread.start()

    def _draw(self) -> None:
        while not self._over.wait(1 / NOTEBOOK_REFRESH):
            text = as_html(self._view())
            if text != self._shown:
                self._update(text)
                self._shown = text

    def stop(self) -> None:
        """Stops the thread and empties the display; may be called twice. The summary and the report take its place."""
        if not self._over.is_set():
            self._over.set()
            self._thread.join()
            self._update("")


def as_html(view: RenderableType) -> str:
    """Returns the view as HTML with inline styles."""
    console = Console(
        record=True,
        file=io.StringIO(),
        width=COLUMNS,
        force_terminal=True,
        force_jupyter=False,
        color_system="truecolor",
    )
    console.print(view)
    return console.export_html(inline_styles=True, code_format=FRAME)


# --- terminal ------------------------------------------------------------


class Header:
    """Name, phase, progress and clocks. It is rendered at every refresh, unlike the view beneath it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spinner = Spinner("dots", style="cyan")
        self.update(RunState())

    def update(self, state: RunState) -> None:
        self._updated, self._t = self._clock(), state.now
        self._started, self._step = state.started, state.step
        self._phase, self._left = run_state.phase(state), run_state.seconds_left(state)

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        passed, width = self._clock() - self._updated, min(options.max_width, WIDTH)
        name = [Text("headrace ", LABEL)]
        if self._started:
            name = [name[0].append(self._started.name, "bold"), Text(self._started.headline, FAINT)]
        title = Table.grid(padding=(0, 1))
        title.add_column(width=width - 9, overflow="fold")
        title.add_column(justify="right", width=8)
        title.add_row(flow(name, width - 9), Text(duration(self._t + passed)))
        words = Text(self._words(passed))
        line = Table.grid(padding=(0, 1))
        line.add_row(self._spinner, self._bar(passed, width - words.cell_len - 4), words)
        yield from (title, line)

    def _bar(self, passed: float, room: int) -> ProgressBar:
        known = self._started is not None and (self._step > 0 or self._left is not None)
        total = self._started.steps if self._started and known else None
        width = min(44, max(4, room))
        return ProgressBar(total=total, completed=self._step, width=width, animation_time=passed, complete_style="cyan")

    def _words(self, passed: float) -> str:
        if not self._started:
            return self._phase
        left = "" if self._left is None else f", {duration(max(0.0, self._left - passed))} left"
        return f"step {self._step}/{self._started.steps}, {self._phase}{left}"


class LiveTerminal:
    """The live view as a sink. Facts rebuild the view at most `REFRESH` times a second; rich's thread shows it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._header = Header()
        self._frame: RenderableType = Text("")
        self._built = -1.0
        self._screen = open_screen(self._view, self._console)

    def _view(self) -> RenderableType:
        return padded(HeaderAbove(self._header, self._frame))

    def record(self, fact: MetricsFact, state: RunState) -> None:
        now = time.monotonic()
        if now - self._built >= 1 / REFRESH or isinstance(
            fact, (StepRow, RunStarted, FirstText, Planned, Evaluated, RunEnded)
        ):
            self._header.update(state)
            self._frame = frame(state)
            self._built = now

    def close(self) -> None:
        self._screen.stop()


class PlainTerminal:
    """The log as a sink: one line per step, and one for everything else that a reader should know."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(soft_wrap=True, force_jupyter=False)
        self._console.print("headrace: loading the model")
        self._lines = PlainLines()

    def record(self, fact: MetricsFact, state: RunState) -> None:
        for line in self._lines.of(fact, state):
            self._console.print(f"[{duration(fact.t)}] {line}", soft_wrap=True)

    def close(self) -> None:
        pass


QUIET = 30.0
"""Seconds without output after which a line reports the progress of the next step."""


class PlainLines:
    """The lines of the log of one run: one for each fact that has a line, one for each advice and each kind of failure, and one every
    `QUIET` seconds while a step is not finished."""

    def __init__(self) -> None:
        self._advised: set[str] = set()
        self._failed: set[str] = set()
        self._last = 0.0

    def of(self, fact: MetricsFact, state: RunState) -> list[str]:
        lines = [line] if (line := plain_line(fact, state)) and not self._known(fact) else []
        if isinstance(fact, (GroupEnded, StepRow)):
            lines += self._advice(state)
        if isinstance(fact, GroupEnded) and not lines and fact.t - self._last >= QUIET:
            lines = [waiting_line(state)]
        if lines:
            self._last = fact.t
        return lines

    def _known(self, fact: MetricsFact) -> bool:
        """Returns whether this failure was printed before: training and evaluation each record their first one."""
        if not isinstance(fact, FirstFailure) or fact.kind not in self._failed:
            self._failed |= {fact.kind} if isinstance(fact, FirstFailure) else set()
            return False
        return True

    def _advice(self, state: RunState) -> list[str]:
        found = [advice for advice in advices(state) if advice.name not in self._advised]
        self._advised |= {advice.name for advice in found}
        return [f"ADVICE {advice.name}: {advice.sentence}" for advice in found]


def waiting_line(state: RunState) -> str:
    """Formats the progress of the next step, with the shares of lost rollouts."""
    ready, wanted = len(state.tickets.ready), state.started.groups_per_step if state.started else 0
    parts = [
        f"step {state.step + 1}: {min(ready, wanted)} of {plural(wanted, 'group')} ready",
        *shares(state.shares.recent),
    ]
    return "  ".join(parts)


def plain_line(fact: MetricsFact, state: RunState) -> str:
    """Returns the line of a fact; empty for facts without one."""
    match fact:
        case RunStarted():
            resumed = f", resumed at step {fact.resumed_at}" if fact.resumed_at else ""
            chosen = [f"{name}: {why}" for name, why in fact.chosen.items()]
            return "\n    ".join([f"{fact.name}: {fact.headline}; {plural(fact.steps, 'step')}{resumed}", *chosen])
        case FirstText():
            return (
                ""
                if state.first_text not in (None, fact)
                else f"the first completion: {clip(' '.join(fact.text.split()), 400) or '(empty)'}"
            )
        case Planned():
            return f"PLAN {fact.message}"
        case StepRow():
            return step_line(fact, state)
        case Evaluated():
            mean = with_error(fact.reward_mean, fact.reward_sem)
            of = f" of {fact.name}" if fact.name else ""
            return f"held-out reward{of} {fact.phase} (step {fact.step}): {mean} on {measured_on(fact)}"
        case FirstFailure():
            where = "of a held-out prompt, " if fact.held_out else ""
            text = f"FAILED {fact.reason} (the first, {where}{fact.prompt_id}): {clip(fact.detail, 400)}"
            return "\n    ".join([text, *fact.traceback.splitlines()])
        case CheckpointSaved():
            stood = f"saved in {short_time(fact.seconds)} (training stood still for {short_time(fact.held)})"
            return f"checkpoint of step {fact.step}: {fact.error or stood}"
        case WorkerLost():
            again = f", {fact.requests_reissued} requests re-issued" if fact.requests_reissued else ""
            return f"WARNING the {fact.who} process {fact.how} (death {fact.deaths}{again})"
        case WorkerJoined():
            return f"the {fact.who} joined: process {fact.pid} on {fact.host}, from {fact.address}"
        case Warned():
            return f"WARNING {clip(fact.message, 1000)}"
        case Withdrawn():
            return _withdrawn(fact, state)
        case RunEnded():
            return f"ended at step {fact.step}: {fact.reason}"
    return ""


def _withdrawn(fact: Withdrawn, state: RunState) -> str:
    """Returns the line that takes warnings back; empty if there were none."""
    if state.withdrawn.get(fact.key) != fact.t:
        return ""
    last = [warning for warning in state.warnings if warning.key == fact.key][-1]
    return f"NO LONGER TRUE, since [{duration(last.t)}]: {clip(last.message, 160)}"


def step_line(row: StepRow, state: RunState) -> str:
    report, (engine_idle, rate) = row.report, state.engine.recent()
    trainer_idle, left = run_state.recent_trainer_idle(state), run_state.seconds_left(state)
    parts = [
        f"step {report.version}/{state.started.steps if state.started else '?'}",
        f"reward {reward_text(row.reward_drawn)}",
        f"lag {max(row.lags, default=0)}",
        f"entropy {number(report.entropy)}",
        f"grad {number(report.grad_norm)}",
        f"{report.seconds:.1f} s + wait {row.wait_seconds:.1f} s",
        f"engine {rate:.0f} tok/s" if rate is not None else "",
        f"idle {percent(engine_idle)} / {percent(trainer_idle)}" if engine_idle is not None else "",
        *shares(state.shares.recent),
        f"{duration(left)} left" if left else "",
        f"SKIPPED {report.skipped}" if report.skipped else "",
    ]
    return "  ".join(part for part in parts if part)


# --- The terminal of a run that trains several adapters
# All of them in one view, or one line per step with the adapter's name.


class TerminalBoard:
    """The shared view. `lane(name)` is the sink of one adapter's recorder. The board is a context that restores the screen at its end."""

    def __init__(self, names: Sequence[str], mode: str, console: Console | None = None) -> None:
        """`mode`: live, plain or off."""
        self._console = console or Console()
        self._lanes = {name: _Lane(lambda line, name=name: self._say(name, line)) for name in names}  # type: ignore[misc]
        self._mode = mode
        self._screen = open_screen(self._view, self._console) if mode == "live" else None

    def lane(self, name: str) -> _Lane:
        return self._lanes[name]

    def _view(self) -> RenderableType:
        return padded(Group(*(part for lane in self._lanes.values() for part in (*lane.parts, Text("")))))

    def _say(self, name: str, line: str) -> None:
        if self._mode == "plain":
            self._console.print(f"{name}: {line}", soft_wrap=True)

    def close(self) -> None:
        """Stops the view; may be called twice."""
        if self._screen:
            self._screen.stop()
        self._mode = "off"

    def __enter__(self) -> TerminalBoard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class _Lane:
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._header, self._built = say, Header(), -1.0
        self._lines = PlainLines()
        self.parts: Sequence[RenderableType] = (self._header,)

    def record(self, fact: MetricsFact, state: RunState) -> None:
        for line in self._lines.of(fact, state):
            self._say(f"[{duration(fact.t)}] {line}")
        now = time.monotonic()
        if now - self._built >= 1 / REFRESH or isinstance(fact, (StepRow, RunStarted, Evaluated, RunEnded)):
            self._header.update(state)
            self.parts, self._built = (self._header, brief(state)), now

    def close(self) -> None:
        pass


def open_board(config: ObserveConfig, names: Sequence[str]) -> TerminalBoard:
    return TerminalBoard(names, terminal_mode(config))
