"""Lines on standard error that say what a start is doing: one that takes longer than half a second has some, so a slow machine has more."""

from __future__ import annotations

import re

_LINE = re.compile(r"headrace: (?:finding|measuring|playing|reading|trying) [^\n]*\n")


def without_progress(err: str) -> str:
    """All else that a command said."""
    return _LINE.sub("", err)
