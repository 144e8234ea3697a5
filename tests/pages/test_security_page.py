"""SECURITY.md names tests: they exist, and every row of its table has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOORS = {
    "board",
    "serve",
    "Tinker",
    "gateway",
    "dial-in port",
    "weights",
    "pool door",
    "bus",
    "sandbox",
    "reward worker",
}
DOORS |= {"judge", "teacher", "images", "webhook", "import", "export"}


def rows(page: str) -> list[list[str]]:
    """The cells of the table of doors; the name of a door counts for the rows without one behind it."""
    lines = page.partition("\n## Doors\n")[2].splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return table[2:]


def missing(page: str) -> list[str]:
    """Returns what is wrong with the table: a row without a test, or a test that does not exist."""
    found = []
    for row in rows(page):
        if len(row) != 5 or not all(row[1:]):
            found.append(f"no complete row: {row}")
            continue
        named = re.findall(r"\[[^\]]+\]\(([^)]+)\)|`(\w+)`", row[4])
        source = ""
        for file, test in named:
            if file:
                source = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""
                if not source:
                    found.append(f"{file} does not exist")
            elif not re.search(rf"^(async )?def {test}\(", source, re.MULTILINE):
                found.append(f"{test} is not in its file")
        if not any(test.startswith("test_") for _, test in named):
            found.append(f"no test: {row[1]}")
    return found


PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_every_door_has_its_row_and_every_row_a_test_that_exists() -> None:
    assert {row[0] for row in rows(PAGE) if row[0]} >= DOORS and len(rows(PAGE)) >= 15
    assert missing(PAGE) == []


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("`test_a_page_cannot_pause_an_engine`", "`test_a_page_cannot_pause_a_trainer`"),
        ("tests/attacks/test_other_origins.py", "tests/attacks/test_no_origins.py"),
        ("`test_a_token_that_could_be_guessed_and_a_certificate_that_is_none_are_refused`", ""),
        ("| Tinker | a client", "| Tinker | | a client"),
    ],
)
def test_a_row_that_shows_nothing_is_found(text: str, instead: str) -> None:
    assert text in PAGE and missing(PAGE.replace(text, instead))
