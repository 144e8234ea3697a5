"""One way to write a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(head: Sequence[str], rows: Iterable[Sequence[str]], name: str = "") -> str:
    """Cells are HTML already; columns whose heading starts with # are numbers."""
    classes = ["num" if one.startswith("#") else "" for one in head]
    top = "".join(f'<th class="{kind}">{escape(one.lstrip("#"))}</th>' for one, kind in zip(head, classes, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for cell, kind in zip(row, classes, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table class="{name}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
