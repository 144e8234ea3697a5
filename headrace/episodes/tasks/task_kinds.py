"""The kinds of tasks, an entry each: the values of `task.kind`, the settings of each, and the code behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TaskKind:
    """Facts about a kind. What it imports may be missing, so that its code is named by place, `module:name`."""

    opens: str
    """The place of a class that is made of `TaskConfig`, seed and encoder, and has the methods of `protocols.Task`."""
    own: tuple[str, ...] = ()
    """Settings of `[task]` that not all kinds have."""
    needs: tuple[str, str] | None = None
    """The one of these that must be given, and what it is, in words."""
    about: str = ""
    """Half a sentence that says what it draws, for the page of settings; empty for those that the page describes together."""
    library: str = ""
    """The package that has the prompts, in words."""
    reads: str = ""
    """The place of a function from a path to rows; empty for a kind without a file."""
    endings: tuple[str, ...] = ()
    """The ends of names by which its files are known, where no kind is given."""
    passed: bool = False
    """Whether its rows are passed from Python."""
    draws_seeds: bool = False
    """Whether its prompts have a seed and no question."""


_FILE: dict[str, Any] = {
    "opens": "headrace.episodes.tasks.rows:RowsTask",
    "own": ("path", "held_out_path", "prompt", "answer", "images", "shuffle", "examples"),
    "needs": ("path", "the file with the rows"),
}

TASK_KINDS = {
    "reasoning_gym": TaskKind(
        opens="headrace.episodes.tasks.reasoning_gym:ReasoningGymTask",
        own=("name", "options", "examples"),
        needs=("name", "a problem family, such as chain_sum"),
        library="reasoning-gym",
    ),
    "jsonl": TaskKind(**_FILE, reads="headrace.episodes.tasks.read:json_rows", endings=(".jsonl", ".json")),
    "csv": TaskKind(**_FILE, reads="headrace.episodes.tasks.read:csv_rows", endings=(".csv", ".tsv")),
    "parquet": TaskKind(**_FILE, reads="headrace.episodes.tasks.read:parquet_rows", endings=(".parquet",)),
    "datasets": TaskKind(**_FILE, reads="headrace.episodes.tasks.read:saved_rows"),
    "python": TaskKind(
        opens="headrace.episodes.tasks.rows:RowsTask",
        own=("rows", "prompt", "answer", "images", "shuffle", "examples"),
        needs=(
            "rows",
            "what headrace.train(dataset=...) writes; pass the rows there, or name a file of another kind",
        ),
        passed=True,
    ),
    "seeds": TaskKind(
        opens="headrace.episodes.tasks.seeds:SeedsTask",
        about="endless prompts that have a seed and no question, for environments that make their own first message (docs/libraries.md)",
        draws_seeds=True,
    ),
}
