"""Writes the table of TRL's arguments into docs/from_trl.md, between its marks: `make docs`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headrace.compat.trl.trl_settings import FIELDS, Fate

TARGET = Path(__file__).with_name("from_trl.md")
HEADS: dict[Fate, str] = {
    "honoured": "| honoured | TRL's default | here |",
    "no meaning": "| without a meaning here, because | arguments, with TRL's default |",
    "refused": "| refused, unless it has its default | TRL's default | because |",
}


def tables() -> Iterator[str]:
    for fate, head in HEADS.items():
        yield f"{head}\n{'|---' * (head.count('|') - 1)}|"
        yield from _by_reason() if fate == "no meaning" else _by_name(fate)
        yield ""


def _by_name(fate: Fate) -> Iterator[str]:
    for name, one in FIELDS.items():
        if one.fate == fate:
            yield f"| `{name}` | `{one.default!r}` | {_cell(one.words)} |"


def _by_reason() -> Iterator[str]:
    """A reason holds for many arguments."""
    named: dict[str, list[str]] = {}
    for name, one in FIELDS.items():
        if one.fate == "no meaning":
            named.setdefault(one.words, []).append(f"`{name}` {one.default!r}")
    for words, names in named.items():
        yield f"| {_cell(words)} | {_cell(', '.join(names))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def page(text: str) -> str:
    """Returns the page with the current tables. Raises ValueError if a mark is missing."""
    begin, end = "<!-- fields: `make docs` -->\n", "<!-- end of fields -->"
    before, rest = text.split(begin)
    return f"{before}{begin}{chr(10).join(tables())}\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":
    TARGET.write_text(page(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
