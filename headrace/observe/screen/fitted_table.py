"""A table that fits into the width it gets: texts wrap, the least important columns are left out, and no number is ever cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderResult
from rich.table import Table

from headrace.observe.screen.console import PrintableText as Text
from headrace.observe.screen.layout import FAINT

GAP = 2
"""Spaces between two columns."""

LEAST = 12
"""Columns of the terminal that a wrapped text needs, if it is as long."""


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """One column of a `FittedTable`."""

    title: str
    number: bool = False
    """Whether its cells stand at the right, each on one line. Otherwise they are texts and wrap."""
    spare: int = 0
    """The column with the highest value is the first to be left out; none with 0 is."""


def numbers(*titles: str) -> list[TableColumn]:
    return [TableColumn(title=title, number=True) for title in titles]


def texts(*titles: str) -> list[TableColumn]:
    return [TableColumn(title=title) for title in titles]


class FittedTable:
    """If there is no room even for what cannot be left out, the columns go beneath each other, each part with the first one again."""

    def __init__(self, columns: Sequence[TableColumn]) -> None:
        self._columns = columns
        self._rows: list[tuple[list[Text], str]] = []

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        assert len(cells) == len(self._columns)
        self._rows.append(([one if isinstance(one, Text) else Text(one) for one in cells], style))

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        width, left = options.max_width, list(range(len(self._columns)))
        while not self._fits(left, width) and any(self._columns[at].spare for at in left):
            left.remove(max(left, key=lambda at: self._columns[at].spare))
        parts: list[list[int]] = [left[:1]]
        for at in left[1:]:
            if len(parts[-1]) > 1 and not self._fits([*parts[-1], at], width):
                parts.append(left[:1])
            parts[-1].append(at)
        for number, part in enumerate(parts):
            yield from [Text("")] * (number > 0)
            yield self._part(part, width)
        if out := [one.title for at, one in enumerate(self._columns) if at not in left]:
            yield Text(f"no room for {', '.join(out)}: a wider terminal or a pipe has all columns", FAINT)

    def _fits(self, columns: Sequence[int], width: int) -> bool:
        return sum(self._least(at) for at in columns) + GAP * (len(columns) - 1) <= width

    def _least(self, at: int) -> int:
        longest = self._longest(at)
        return longest if self._columns[at].number else min(max(longest, len(self._columns[at].title)), LEAST)

    def _longest(self, at: int) -> int:
        return max((cells[at].cell_len for cells, _ in self._rows), default=0)

    def _part(self, columns: Sequence[int], width: int) -> Table:
        wanted = {at: max(self._longest(at), Text(self._columns[at].title).cell_len) for at in columns}
        widths = {at: self._least(at) for at in columns}
        spaces = GAP * (len(columns) - 1)
        while sum(widths.values()) + spaces < width and any(widths[at] < wanted[at] for at in columns):
            widths[max(columns, key=lambda at: wanted[at] - widths[at])] += 1
        while sum(widths.values()) + spaces > width and max(widths.values()) > 1:  # a terminal narrower than a number
            widths[
                max(
                    columns, key=lambda at: (not self._columns[at].number, widths[at]) if widths[at] > 1 else (False, 0)
                )
            ] -= 1
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style=FAINT)
        for at in columns:
            justify = "right" if self._columns[at].number else "left"
            table.add_column(self._columns[at].title, width=widths[at], justify=justify, overflow="fold")  # type: ignore[arg-type]
        for cells, style in self._rows:
            table.add_row(*(cells[at] for at in columns), style=style)
        return table
