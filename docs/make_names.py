"""Writes the table of other libraries' names into docs/coming_from.md, between its marks: `make docs`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headrace.settings.other_names import MEANINGS

TARGET = Path(__file__).with_name("coming_from.md")
BEGIN, END = "<!-- names: `make docs` -->\n", "<!-- end of names -->"


def rows() -> Iterator[str]:
    """Yields a row for each of our settings and difference, with the names that it has elsewhere."""
    named: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, one in MEANINGS.items():
        named.setdefault((one.ours, one.note), {}).setdefault(one.whose, []).append(f"`{name}`")
    yield "| here | names elsewhere, and what differs |\n|---|---|"
    for (ours, note), by in named.items():
        names = "; ".join(f"{', '.join(names)} ({whose})" for whose, names in by.items())
        yield f"| {f'`{ours}`' if ours else 'none'} | {names}{f': {note}' if note else ''} |"


def page(text: str) -> str:
    """Returns the page with the current table. Raises ValueError if a mark is missing."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}{chr(10).join(rows())}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    TARGET.write_text(page(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
