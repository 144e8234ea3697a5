"""The gallery of recipes on the site: a page of cards, and a page for each folder of recipes/, made of its README and its other files.

A README has a title, a paragraph, the commands, and a table with the rows `learned`, `time`, `memory` and `record`
(`tests/pages/test_recipes.py`), which `make_recipe.py` writes from a run. `curve.svg` in the folder, where a record has one, is the picture of the card.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent.parent / "recipes"
LANGUAGES = {".py": "python", ".toml": "toml", ".jsonl": "json", ".sh": "bash", ".yml": "yaml"}
ROWS = ("learned", "time", "memory", "record")
CURVE = "curve.svg"
SHORTER = "    *(in its tutorial, a shorter run)*\n"
SHELVES = {
    "To begin with": ("demo", "demo_lora", "two_adapters"),
    "Where the reward comes from": ("code", "service", "preferences", "distill", "proposer"),
    "Several turns, and tools": ("tools", "attempts", "game", "self_play", "gym"),
    "Programs and libraries that play the rollouts": ("agent", "openenv", "verifiers", "atropos"),
    "Models that see": ("dots",),
    "Several processes": ("mesh",),
}
INTRODUCTION = """\
# Recipes

Runs to start from, each a folder with a config, its other files, and a README with what was measured. `headrace recipes` lists them, and
`headrace recipes NAME` copies the folder of one into the working directory; in a checkout they are in `recipes/`. Figures are of single
runs on small machines, which each page names; *not measured* means that nobody has a record.
"""


class Card(NamedTuple):
    """The parts of a README that the gallery shows."""

    title: str
    about: str
    rows: dict[str, str]


def card(readme: str) -> Card:
    """Reads a README. Raises ValueError if a part is missing."""
    title, about, *_ = readme.split("\n\n")
    rows = dict(re.findall(r"^\| (\w+) \| (.+) \|$", readme, flags=re.MULTILINE))
    if not title.startswith("# ") or tuple(rows) != ROWS:
        raise ValueError(
            f"{title}: a title, a paragraph and the rows {', '.join(ROWS)} are expected, found {list(rows)}"
        )
    return Card(title.removeprefix("# "), " ".join(about.split()), rows)


def gallery() -> str:
    """The page of all cards."""
    parts = [INTRODUCTION]
    for shelf, names in SHELVES.items():
        parts += [f"## {shelf}", '<div class="grid cards" markdown>']
        parts += [_shown(name) for name in names]
        parts += ["</div>"]
    return "\n\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    """The page of each recipe, by the name of its folder."""
    return {folder.name: _page(folder) for folder in sorted(FOLDER.iterdir()) if folder.is_dir()}


def block(text: str, language: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````"


def _shown(name: str) -> str:
    readme = (FOLDER / name / "README.md").read_text(encoding="utf-8")
    one, recorded = card(readme), "![The curve of this run]" in readme  # by `make_recipe.py`
    picture = ""
    if (FOLDER / name / CURVE).is_file():
        picture = f"    ![The curve of a run](recipes/{name}/{CURVE})\n{'' if recorded else SHORTER}\n"
    measured = (
        f"{one.rows['learned']}. {one.rows['time']}." if "not measured" not in one.rows["learned"] else "not measured"
    )
    return f"-   **[{one.title}](recipes/{name}.md)**\n\n{picture}    {one.about}\n\n    *{measured[0].upper()}{measured[1:]}*"


def _page(folder: Path) -> str:
    files = sorted(folder.iterdir(), key=lambda one: (one.suffix != ".toml", one.name))
    parts = [(folder / "README.md").read_text(encoding="utf-8").rstrip()]
    for file in files:
        if file.suffix in LANGUAGES:
            parts += [f"## {file.name}", block(file.read_text(encoding="utf-8"), LANGUAGES[file.suffix])]
    return "\n\n".join(parts) + "\n"
