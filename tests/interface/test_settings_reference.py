"""docs/settings.md and the tables of docs/algorithms.md, docs/coming_from.md and docs/journal.md are what their scripts make of the sources; every setting says what it is for."""

from __future__ import annotations

import runpy
from pathlib import Path

from headrace.algo.recipes import LOSSES

DOCS = Path(__file__).resolve().parents[2] / "docs"

PLAIN = {
    "train.beta1",
    *(
        f"adapters.{section}"
        for section in ("reward", "curriculum", "algo", "train", "lora", "staleness", "checkpoint", "eval")
    ),
}
"""Settings without a docstring: those beside them tell."""


def test_the_reference_is_what_the_sources_say():
    made = runpy.run_path(str(DOCS / "make_settings.py"))["reference"]()
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == made, "a setting has changed: run `make docs`"


def test_every_setting_says_what_it_is_for():
    missing = set(runpy.run_path(str(DOCS / "make_settings.py"))["undescribed"]())
    assert missing <= PLAIN, f"write one line beneath {sorted(missing - PLAIN)} in the source, then run `make docs`"


def test_the_tables_of_algorithms_are_what_the_sources_say():
    page, made = DOCS / "algorithms.md", runpy.run_path(str(DOCS / "make_algorithms.py"))["page"]
    assert page.read_text(encoding="utf-8") == made(page.read_text(encoding="utf-8")), (
        "a recipe has changed: run `make docs`"
    )


def test_the_list_of_other_libraries_names_is_what_the_source_says():
    page, made = DOCS / "coming_from.md", runpy.run_path(str(DOCS / "make_names.py"))["page"]
    text = page.read_text(encoding="utf-8")
    assert text == made(text), "a name has changed: run `make docs`"
    assert "- `rollout.group_size`: `num_generations` (TRL); `rollout.n` (verl);" in text


def test_the_table_of_what_a_resume_carries_over_is_what_the_source_says():
    page, made = DOCS / "journal.md", runpy.run_path(str(DOCS / "make_resuming.py"))["page"]
    text = page.read_text(encoding="utf-8")
    assert text == made(text), "a rule has changed: run `make docs`"


def test_every_loss_says_its_formula():
    made_by_dataclass = [name for name, loss in LOSSES.items() if str(loss.__doc__).startswith(f"{loss.__name__}(")]
    assert made_by_dataclass == [], "write the formula and its source into the docstring"
