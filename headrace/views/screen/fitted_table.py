"""A table that fits into the width it gets: texts wrap, the least important columns are left out, and no number is ever cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, JustifyMethod, RenderResult
from rich.table import Table

from headrace.views.screen.console import PrintableText as Text
from headrace.views.screen.layout import FAINT

GAP = 2
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
        self._rows.append(([one if isinstance(one, Text) else Text(one) for one in cells], style))

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
        return sum(self._least(at, whole) for at in columns) + GAP * (len(columns) - 1)

    def _least(self, at: int, whole: bool = False) -> int:
        """The width without which a number would be cut, or a text wrapped too often."""
        column = self._columns[at]
        cells = [cells[at] for cells, _ in self._rows]
        counted = max((one.cell_len for one in cells if column.number or _is_number(one.plain)), default=0)
        word = min(max(map(len, column.title.split()), default=0), LEAST)
        text = min(max((one.cell_len for one in cells), default=0), column.whole if whole else LEAST)
        return max(word, counted, text)

    def _wanted(self, at: int) -> int:
        return max([Text(self._columns[at].title).cell_len, *(cells[at].cell_len for cells, _ in self._rows)])

    def _part(self, columns: Sequence[int], width: int) -> Table:
        room = width - GAP * (len(columns) - 1)
        whole = self._width(columns, whole=True) <= width
        widths = {at: self._least(at, whole) for at in columns}
        wanted = {at: self._wanted(at) for at in columns}
        while sum(widths.values()) < room and (short := [at for at in columns if widths[at] < wanted[at]]):
            widths[min(short, key=widths.__getitem__)] += 1
        for _ in range(sum(widths.values()) - room):  # a terminal that is narrower than two columns
            widest = max(columns, key=widths.__getitem__)
            widths[widest] = max(1, widths[widest] - 1)
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style=FAINT)
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
