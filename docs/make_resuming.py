"""Writes the table of what a resumed run carries over into docs/journal.md, between its marks: `make docs`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headrace.run.resume_rules import RULES

TARGET = Path(__file__).with_name("journal.md")
BEGIN, END = "<!-- resuming: `make docs` -->\n", "<!-- end of resuming -->"


def rows() -> Iterator[str]:
    yield "| settings | steps since the checkpoint | finished groups | rollouts under way | |\n|---|---|---|---|---|"
    for rule in RULES:
        names = ", ".join(f"`{name}`" for name in rule.settings.split())
        if rule.steps == "refused":
            yield f"| {names} | the resume is refused | | | {rule.why} |"
        else:
            yield f"| {names} | {rule.steps} | {rule.groups} | {rule.rollouts} | {rule.why} |"


def page(text: str) -> str:
    """Returns the page with the current table. Raises ValueError if a mark is missing."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}{chr(10).join(rows())}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    TARGET.write_text(page(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
