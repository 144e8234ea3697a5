"""Checks whether two models give the same token ids the same meaning. Nothing here reads weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

Vocabulary = Mapping[str, int]


def vocabulary_problem(student: Vocabulary, teacher: Vocabulary) -> str:
    """Describes the first difference; empty if every id is the same string in both."""
    if student == teacher:
        return ""
    mine, theirs = {i: text for text, i in student.items()}, {i: text for text, i in teacher.items()}
    differing = [i for i in sorted(mine.keys() | theirs.keys()) if mine.get(i) != theirs.get(i)]
    if not differing:  # one text has several ids in one of them
        return f"{len(student)} entries against {len(teacher)}"
    first = differing[0]
    return (
        f"{len(differing)} of {max(len(mine), len(theirs))} ids differ, the first: {first} is {mine.get(first)!r} for the "
        f"student and {theirs.get(first)!r} for the teacher"
    )


def width_of(model_dir: Path) -> int:
    """Returns the rows of the model's vocabulary, padding included; 0 if its config does not have the number."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    return int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0)
