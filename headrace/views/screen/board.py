"""The terminal of a run that trains several adapters: all of them in one view, or one line per step with the adapter's name."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Group, RenderableType

from headrace.facts.facts import Evaluated, RunEnded, RunStarted
from headrace.facts.records import MetricsFact, StepRow
from headrace.facts.run_state import RunState
from headrace.facts.texts import duration
from headrace.views.config import ObserveConfig
from headrace.views.screen.console import Console
from headrace.views.screen.console import PrintableText as Text
from headrace.views.screen.live import brief, padded
from headrace.views.screen.surface import REFRESH, open_screen, terminal_mode
from headrace.views.screen.terminal import Header, PlainLines


class Board:
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

    def __enter__(self) -> Board:
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


def open_board(config: ObserveConfig, names: Sequence[str]) -> Board:
    return Board(names, terminal_mode(config))
