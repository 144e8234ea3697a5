"""The console of all views. What headrace colours is coloured; every other character arrives as it would be read.

Text of users may hold anything: markup of rich (`[red]`) and names of emoji (`:fire:`) are never read as such, and what would steer the
terminal is replaced (`printing.py`). So no view has to escape anything, and a view colours with `PrintableText`, not with markup.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import IO, Any

import rich.console
import rich.text
from rich.console import ConsoleDimensions, ConsoleRenderable
from rich.live import Live
from rich.segment import ControlType, Segment

from headrace.core.printing import lenient, printable

UNBOUNDED = 1 << 16
"""Columns of a pipe or a file: lines stay whole, so that they can be searched."""


class Console(rich.console.Console):
    """rich's console for text of users. A pipe or a file has no width unless one is given (`width`, or the variable COLUMNS)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)
        if not (self.is_terminal or self.is_jupyter or options.get("width") or os.environ.get("COLUMNS")):
            self.width = UNBOUNDED

    @property  # type: ignore[misc]  # nobody sets it
    def file(self) -> IO[str]:
        """The stream that is written to, beneath a guard that would take our colours out."""
        stream = super().file
        return lenient(getattr(stream, "unguarded", stream))

    def render_str(self, text: str, **how: Any) -> rich.text.Text:
        return super().render_str(printable(text), **how)

    def render(self, renderable: Any, options: rich.console.ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields the pieces of anything that is shown, printable. Only what moves the cursor of a live view passes as it is."""
        for piece in super().render(renderable, options):
            yield piece if piece.control else Segment(printable(piece.text), piece.style)


class PrintableText(rich.text.Text):
    """rich's text, printable from the start, so that it is measured as it is shown."""

    def __init__(self, text: str = "", style: Any = "", **how: Any) -> None:
        super().__init__(printable(text), style, **how)

    def append(self, text: rich.text.Text | str, style: Any = None) -> PrintableText:
        super().append(printable(text) if isinstance(text, str) else text, style)
        return self


# --- A view that is redrawn in its place


class LiveView(Live):
    """rich's live view, for a terminal whose size may change. rich goes up by the lines that it has drawn, which are others after a resize: the
    terminal wraps them anew, pushes some out above, or takes some back. So whatever the terminal shows is erased before the next frame. What it
    has pushed out stays in its history."""

    _size: ConsoleDimensions | None = None

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        drawn, size, before = self._live_render, self.console.size, self._size
        self._size = size
        if drawn._shape is None or before in (None, size):
            return super().process_renderables(renderables)
        drawn._shape = None  # the next frame begins where the cursor is
        return [_ERASED, *super().process_renderables(renderables)]


class _Erased:
    """Erases every line of the terminal by itself, and goes to the first place: what is erased at once, some terminals keep in their history."""

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> Iterable[Segment]:
        lines = "\x1b[1B".join(["\x1b[2K"] * console.size.height)
        yield Segment(f"\x1b[H{lines}\x1b[H", None, [(ControlType.HOME,)])


_ERASED = _Erased()
