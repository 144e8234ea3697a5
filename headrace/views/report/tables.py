"""Tables that also fit on a phone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(head: Sequence[str], rows: Iterable[Sequence[str]], name: str = "") -> str:
    """Returns a table. Cells are HTML; columns whose heading starts with # are numbers.

    A phone shows each row as a block: texts on separate lines, then the numbers with the names of their columns.
    """
    classes = ["num" if one.startswith("#") else "" for one in head]
    names = [escape(one.lstrip("#")) for one in head]
    top = "".join(f'<th class="{kind}">{one}</th>' for one, kind in zip(names, classes, strict=True))
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{kind}" data-head="{one}">{cell}</td>'
            for cell, kind, one in zip(row, classes, names, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table class="{name}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
