"""docs/settings.md is what its script makes of the sources, and says of every setting what it is for."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"

PLAIN = {
    "rollout.max_tokens",
    "rollout.temperature",
    "rollout.top_p",
    "rollout.top_k",
    "rollout.min_p",
    "algo.correction.low",
    "algo.correction.high",
    "algo.lag.decay",
    "algo.lag.maximum",
    "algo.select.kind",
    "algo.kl.estimator",
    "algo.kl.place",
    "algo.distill.coef",
    "algo.distill.k",
    "train.beta1",
    "lora.alpha_pattern",
    "teachers.route.column",
    "teachers.route.values",
    "adapters.name",
    "adapters.reward",
    "adapters.algo",
    "adapters.train",
    "adapters.lora",
    "adapters.staleness",
    "adapters.checkpoint",
    "adapters.eval",
}
"""Settings without a docstring: the field's standard terms, and those of which a setting beside them tells."""


def test_the_reference_is_what_the_sources_say():
    made = runpy.run_path(str(DOCS / "make_settings.py"))["reference"]()
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == made, "a setting has changed: run `make docs`"


def test_every_setting_says_what_it_is_for():
    missing = set(runpy.run_path(str(DOCS / "make_settings.py"))["undescribed"]())
    assert missing <= PLAIN, f"write one line beneath {sorted(missing - PLAIN)} in the source, then run `make docs`"
