"""The settings in which runs differ, for the board and `headrace compare`."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from headrace.facts.rollout_view import settings_of
from headrace.facts.texts import clip
from headrace.views.report.tables import table

NOT_SET = "not set"
NAME, MEASURED = "name", "chosen."
"""No settings that somebody would compare: the runs' names, and the speeds by which headrace chose the others."""
MAX_SETTING = 80
"""Characters of a setting in the table of differences."""


def settings_apart(runs: Mapping[str, Path]) -> dict[str, list[str]]:
    """Returns the values of each setting that is not the same in all runs, by the dotted name of the setting, in the order of `runs`."""
    flat = [_flat(settings_of(path)) for path in runs.values()]
    keys = sorted(key for key in set().union(*flat) if key != NAME and not key.startswith(MEASURED))
    return {key: [one.get(key, NOT_SET) for one in flat] for key in keys if len({one.get(key) for one in flat}) > 1}


def differences(runs: Mapping[str, Path]) -> str:
    """Returns the table of the settings in which runs differ; a sentence if there are none."""
    rows = [
        (escape(key), *(escape(clip(value, MAX_SETTING)) for value in values))
        for key, values in settings_apart(runs).items()
    ]
    if not rows:
        return '<p class="empty">These runs have the same settings.</p>'
    return table(("setting", *runs), rows, "differences")


def _flat(settings: Mapping[str, Any], above: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{above}{name}.")
        else:
            found[f"{above}{name}"] = str(value)
    return found
