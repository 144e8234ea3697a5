"""Writes the list of other libraries' names into docs/coming_from.md, between its marks: `make docs`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headrace.settings.other_names import MEANINGS

TARGET = Path(__file__).with_name("coming_from.md")
BEGIN, END = "<!-- names: `make docs` -->\n", "<!-- end of names -->"


def rows() -> Iterator[str]:
    """Yields a line for each of our settings, with the names that it has elsewhere and what differs."""
    named: dict[str, dict[str, dict[str, list[str]]]] = {}
    for name, one in MEANINGS.items():
        named.setdefault(one.ours, {}).setdefault(one.note, {}).setdefault(one.whose, []).append(f"`{name}`")
    for ours, by_note in named.items():
        told = (
            "; ".join(f"{', '.join(names)} ({whose})" for whose, names in by.items()) + (f": {note}" if note else "")
            for note, by in by_note.items()
        )
        yield f"- {f'`{ours}`' if ours else 'none'}: {'; '.join(told)}"


def page(text: str) -> str:
    """Returns the page with the current list. Raises ValueError if a mark is missing."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}{chr(10).join(rows())}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    TARGET.write_text(page(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
