"""docs/settings.md is what its script makes of the sources, and says of every setting what it is for."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"

PLAIN = {
    "train.beta1",
    *(f"adapters.{section}" for section in ("reward", "algo", "train", "lora", "staleness", "checkpoint", "eval")),
}
"""Settings without a docstring: those beside them tell."""


def test_the_reference_is_what_the_sources_say():
    made = runpy.run_path(str(DOCS / "make_settings.py"))["reference"]()
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == made, "a setting has changed: run `make docs`"


def test_every_setting_says_what_it_is_for():
    missing = set(runpy.run_path(str(DOCS / "make_settings.py"))["undescribed"]())
    assert missing <= PLAIN, f"write one line beneath {sorted(missing - PLAIN)} in the source, then run `make docs`"
