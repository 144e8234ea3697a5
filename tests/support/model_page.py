"""What docs/models.md says of each architecture, read back from its two tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


class OnPage(NamedTuple):
    """A model type as the page has it."""

    outcome: str
    way: str
    """How the trainer forwards it, if it is served."""
    experts: str


def model_types() -> dict[str, OnPage]:
    """Returns the rows of both tables by model type."""
    found: dict[str, OnPage] = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split(" |")]
        names = re.sub(r" \([^)]*\)", "", cells[-2]).split(", ") if len(cells) > 1 else []
        outcome = cells[0].removeprefix("| ")
        if len(cells) == 5 and not cells[0].startswith("| how"):
            found |= {name: OnPage("served", cells[1], cells[2]) for name in names}
        elif len(cells) == 4 and outcome in ("refused", "differs", "not tried"):
            found |= {name: OnPage(outcome, "", "") for name in names}
    return found
