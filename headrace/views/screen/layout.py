"""Layout of the views in the width and height of a terminal: nothing is cut off except the middle of a long text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, JustifyMethod, RenderableType, RenderResult
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
    return [f"{text} (× {counts[text]:,})" if counts[text] > 1 else text for text in reversed(last)]


# --- A table that fits into the width it gets
# Texts wrap, the least important columns are left out, and no number is ever cut.


COLUMN_GAP = 2
"""Spaces between two columns."""

LEAST = 12
"""Characters that a column has at least, if its text or title is as long."""


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """One column of a `FittedTable`."""

    title: str
    number: bool = False
    """Whether its cells stand at the right, each on one line. Otherwise they are texts and wrap."""
    whole: int = LEAST
    """Texts of up to so many characters stay on one line, as long as columns can be left out instead."""
    spare: int = 0
    """The column with the highest value is the first to be left out; none with 0 is."""


def numbers(*titles: str) -> list[TableColumn]:
    return [TableColumn(title=title, number=True) for title in titles]


def texts(*titles: str) -> list[TableColumn]:
    return [TableColumn(title=title) for title in titles]


class FittedTable:
    """If there is no room even for what cannot be left out, the columns go beneath each other, each part with the first one again. Columns
    without any word are not shown."""

    def __init__(self, columns: Sequence[TableColumn]) -> None:
        self._columns = columns
        self._rows: list[tuple[list[Text], str]] = []

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        assert len(cells) == len(self._columns)
        self._rows.append(([cell if isinstance(cell, Text) else Text(cell) for cell in cells], style))

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        width, left, out = options.max_width, [at for at in range(len(self._columns)) if self._wanted(at)], []
        while self._width(left, whole=True) > width and any(self._columns[at].spare for at in left):
            out.append(max(left, key=lambda at: self._columns[at].spare))
            left.remove(out[-1])
        parts: list[list[int]] = [left[:1]]
        for at in left[1:]:
            if len(parts[-1]) > 1 and self._width([*parts[-1], at]) > width:
                parts.append(left[:1])
            parts[-1].append(at)
        for number, part in enumerate(parts):
            yield from [Text("")] * (number > 0)
            yield self._part(part, width)
        if out:
            yield no_room_for([self._columns[at].title for at in sorted(out)])

    def _width(self, columns: Sequence[int], whole: bool = False) -> int:
        return sum(self._least(at, whole) for at in columns) + COLUMN_GAP * (len(columns) - 1)

    def _least(self, at: int, whole: bool = False) -> int:
        """The width without which a number would be cut, or a text wrapped too often."""
        column = self._columns[at]
        cells = [cells[at] for cells, _ in self._rows]
        counted = max((cell.cell_len for cell in cells if column.number or _is_number(cell.plain)), default=0)
        word = min(max(map(len, column.title.split()), default=0), LEAST)
        text = min(max((cell.cell_len for cell in cells), default=0), column.whole if whole else LEAST)
        return max(word, counted, text)

    def _wanted(self, at: int) -> int:
        return max([Text(self._columns[at].title).cell_len, *(cells[at].cell_len for cells, _ in self._rows)])

    def _part(self, columns: Sequence[int], width: int) -> Table:
        room = width - COLUMN_GAP * (len(columns) - 1)
        whole = self._width(columns, whole=True) <= width
        widths = {at: self._least(at, whole) for at in columns}
        wanted = {at: self._wanted(at) for at in columns}
        while sum(widths.values()) < room and (short := [at for at in columns if widths[at] < wanted[at]]):
            widths[min(short, key=widths.__getitem__)] += 1
        for _ in range(sum(widths.values()) - room):  # a terminal that is narrower than two columns
            widest = max(columns, key=widths.__getitem__)
            widths[widest] = max(1, widths[widest] - 1)
        table = Table(box=None, padding=(0, COLUMN_GAP, 0, 0), pad_edge=False, header_style=FAINT)
        for at in columns:
            justify: JustifyMethod = "right" if self._columns[at].number else "left"
            table.add_column(self._columns[at].title, width=widths[at], justify=justify, overflow="fold")
        for cells, style in self._rows:
            table.add_row(*(cells[at] for at in columns), style=style)
        return table


def no_room_for(names: Sequence[str]) -> Text:
    return Text(f"no room for {', '.join(names)}: a wider terminal or a pipe has all columns", FAINT)


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", ""))
    except ValueError:
        return False
    return True
