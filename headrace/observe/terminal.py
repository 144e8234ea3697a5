"""What a person sees while the run goes on: one live view on a terminal, one line per step in a log."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from headrace.observe import measures
from headrace.observe.facts import CheckpointSaved, Evaluated, RunEnded, RunStarted, Warned, WorkerLost
from headrace.observe.records import MetricsFact, StepRow
from headrace.observe.screen import REFRESH, open_screen
from headrace.observe.state import RunState
from headrace.observe.text import clip, duration, number, percent, plural, short_time, with_error
from headrace.observe.view import FAINT, LABEL, WIDTH, frame, padded


class Header:
    """Name, phase, progress and clocks. Rendered anew at every refresh, unlike the frame beneath."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spinner = Spinner("dots", style="cyan")
        self.update(RunState())

    def update(self, state: RunState) -> None:
        self._updated, self._t = self._clock(), state.now
        self._started, self._step = state.started, state.step
        self._phase, self._left = measures.phase(state), measures.seconds_left(state)

    def __rich__(self) -> RenderableType:
        passed = self._clock() - self._updated
        title = Table.grid(expand=False, padding=(0, 1))
        title.add_column(no_wrap=True, width=WIDTH - 14, overflow="ellipsis")
        title.add_column(justify="right", width=12)
        name = Text("headrace ", LABEL)
        if self._started:
            name.append(f"{self._started.name}  ", "bold").append(self._started.headline, FAINT)
        title.add_row(name, Text(duration(self._t + passed)))
        line = Table.grid(padding=(0, 1))
        line.add_row(self._spinner, self._bar(passed), Text(self._words(passed)))
        return Group(title, line)

    def _bar(self, passed: float) -> ProgressBar:
        known = self._started is not None and (self._step > 0 or self._left is not None)
        total = self._started.steps if self._started and known else None
        return ProgressBar(total=total, completed=self._step, width=44, animation_time=passed, complete_style="cyan")

    def _words(self, passed: float) -> str:
        if not self._started:
            return self._phase
        left = "" if self._left is None else f", {duration(max(0.0, self._left - passed))} left"
        return f"step {self._step}/{self._started.steps}, {self._phase}{left}"


class LiveTerminal:
    """Facts build the frame (at most `REFRESH` times a second); rich's thread shows it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._header = Header()
        self._frame: RenderableType = Text("")
        self._built = -1.0
        self._screen = open_screen(self._view, self._console)

    def _view(self) -> RenderableType:
        return padded(Group(self._header, Text(""), self._frame))

    def record(self, fact: MetricsFact, state: RunState) -> None:
        now = time.monotonic()
        if now - self._built >= 1 / REFRESH or isinstance(fact, (StepRow, RunStarted, Evaluated, RunEnded)):
            self._header.update(state)
            self._frame = frame(state)
            self._built = now

    def close(self) -> None:
        self._screen.stop()


class PlainTerminal:
    """One line per step, and one for everything else a reader of a log should know."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True, force_jupyter=False)
        self._console.print("headrace: loading the model", markup=False)

    def record(self, fact: MetricsFact, state: RunState) -> None:
        line = plain_line(fact, state)
        if line:
            self._console.print(f"[{duration(fact.t)}] {line}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass


def plain_line(fact: MetricsFact, state: RunState) -> str:
    """Empty for facts that have no line of their own."""
    match fact:
        case RunStarted():
            resumed = f", resumed at step {fact.resumed_at}" if fact.resumed_at else ""
            return f"{fact.name}: {fact.headline}; {plural(fact.steps, 'step')}{resumed}"
        case StepRow():
            return step_line(fact, state)
        case Evaluated():
            mean = with_error(fact.reward_mean, fact.reward_sem)
            return f"held-out reward {fact.phase} (step {fact.step}): {mean} on {plural(fact.prompts, 'prompt')}"
        case CheckpointSaved():
            return f"checkpoint of step {fact.step}: {fact.error or f'saved in {short_time(fact.seconds)}'}"
        case WorkerLost():
            return f"WARNING the {fact.who} process {fact.how} (death {fact.deaths}, {fact.requests_reissued} requests re-issued)"
        case Warned():
            return f"WARNING {clip(fact.message, 1000)}"
        case RunEnded():
            return f"ended at step {fact.step}: {fact.reason}"
    return ""


def step_line(row: StepRow, state: RunState) -> str:
    report, (engine_idle, rate) = row.report, state.engine.recent()
    trainer_idle, left = measures.recent_trainer_idle(state), measures.seconds_left(state)
    parts = [
        f"step {report.version}/{state.started.steps if state.started else '?'}",
        f"reward {row.reward_drawn:.3f}",
        f"lag {max(row.lags, default=0)}",
        f"entropy {number(report.entropy)}",
        f"grad {number(report.grad_norm)}",
        f"{report.seconds:.1f} s + wait {row.wait_seconds:.1f} s",
        f"engine {rate:.0f} tok/s" if rate is not None else "",
        f"idle {percent(engine_idle)} / {percent(trainer_idle)}" if engine_idle is not None else "",
        f"{duration(left)} left" if left else "",
        f"SKIPPED {report.skipped}" if report.skipped else "",
    ]
    return "  ".join(part for part in parts if part)
