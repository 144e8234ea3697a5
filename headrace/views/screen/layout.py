"""Layout of the views in the width and height of a terminal: nothing is cut off except the middle of a long text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text as RichText

from headrace.views.screen.console import PrintableText as Text

LABEL, FAINT = "bold cyan", "dim"
GAP = 3
"""Spaces between two parts of a line."""

Line = tuple[str, Sequence[RichText]]
"""Label and parts; a line without a label continues the one above it."""


def flow(parts: Sequence[RichText], width: int) -> Text:
    """Puts the parts beside each other, and on the next line if there is no room. Empty parts are left out."""
    text, used = Text(), 0
    for part in parts:
        if not part.plain:
            continue
        if used and used + GAP + part.cell_len > width:
            text.append("\n")
            used = 0
        elif used:
            text.append(" " * GAP)
            used += GAP
        text.append_text(part)
        used += part.cell_len
    return text


class Lines:
    """Labels with their parts beside them, wrapped to the available width."""

    def __init__(self, lines: Sequence[Line], label_width: int = 9) -> None:
        self._lines, self._label_width = lines, label_width

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        label = max([self._label_width, *(len(label) for label, _ in self._lines)])
        table = Table.grid(padding=(0, 2))
        table.add_column(style=LABEL, width=label, no_wrap=True)
        table.add_column(overflow="fold")
        for name, parts in self._lines:
            table.add_row(name, flow(parts, options.max_width - label - 2))
        yield table


class HeaderAbove:
    """A header, and beneath it a renderable that gets the remaining height in `options.height`."""

    def __init__(self, header: RenderableType, rest: RenderableType) -> None:
        self._header, self._rest = header, rest

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        top = console.render_lines(self._header, options, pad=False)
        yield self._header
        yield Text("")
        yield from console.render(self._rest, options.update(height=max(1, console.height - len(top) - 2)))


def middle_out(text: str | Text, width: int, most: int, console: RichConsole) -> RichText:
    """Wraps text to at most `most` lines. A longer text is shortened to its beginning and its end, where the answer is."""
    text = text if isinstance(text, Text) else Text(text)
    lines = Text(one_line(text.plain), text.style).wrap(console, width, overflow="fold")
    if len(lines) <= most:
        return Text("\n").join(lines)
    tail = most // 3
    head = list(lines)[: most - tail]
    head[-1].rstrip()
    head[-1].truncate(width - 2)
    head[-1].append(" …", FAINT)
    return Text("\n").join([*head, *list(lines)[len(lines) - tail :]])


def one_line(text: str) -> str:
    return " ".join(text.split())


def without_marks(traceback: str) -> str:
    """Removes the lines of ^ from a traceback: they point into the line above them, which may be wrapped."""
    return "\n".join(line for line in traceback.splitlines() if line.strip(" ^~") or not line.strip())


def distinct(messages: Sequence[str], most: int) -> list[str]:
    """Returns the last messages, equal ones once with their count."""
    counts = Counter(messages)
    last = list(dict.fromkeys(reversed(messages)))[:most]
    return [f"{one} (× {counts[one]:,})" if counts[one] > 1 else one for one in reversed(last)]
