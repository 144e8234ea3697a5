"""The numbers of a long run, saved so that it opens at once next time. They lie in the cache, not in the run's directory, and may be
deleted at any time."""

from __future__ import annotations

import json
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from headrace.observe.board.group_table import ROW, GroupTable
from headrace.observe.board.step_columns import StepColumns
from headrace.observe.records import METRICS

FORMAT = 1
"""The form of these files; others are ignored."""
LOOKED_AT = 4096
"""Bytes at the start, and before the end of what was read, by which a file is recognised."""


@dataclass
class Numbers:
    columns: StepColumns
    groups: GroupTable
    size: int = 0
    """Bytes of `metrics.jsonl` that they were counted from."""


def save(directory: Path, run_dir: Path, numbers: Numbers) -> None:
    """Saves them. A disk that is full or cannot be written costs only the speed of the next start."""
    arrays: dict[str, np.ndarray] = {"groups": numbers.groups.rows.view}
    names = []
    for number, (name, (steps, values)) in enumerate(numbers.columns.items()):
        names.append(name)
        arrays |= {f"steps{number}": steps, f"values{number}": values}
    head = {
        "format": FORMAT,
        "names": names,
        "reasons": numbers.groups.reasons,
        "size": numbers.size,
        "mark": _mark(run_dir, numbers.size),
    }
    path = _place(directory, run_dir)
    part = path.with_suffix(".part")
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            np.savez(file, head=np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays)  # type: ignore[arg-type]
        part.replace(path)


def read_saved(directory: Path, run_dir: Path) -> Numbers | None:
    """Returns what was saved; None if there is nothing, or if the file is not the one that was read then."""
    try:
        with np.load(_place(directory, run_dir), allow_pickle=False) as file:
            head = json.loads(file["head"].tobytes())
            if head["format"] != FORMAT or head["mark"] != _mark(run_dir, head["size"]):
                return None
            series = {
                name: (file[f"steps{number}"], file[f"values{number}"]) for number, name in enumerate(head["names"])
            }
            rows = file["groups"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    if rows.dtype != ROW:
        return None
    return Numbers(StepColumns.of(series), GroupTable(rows, head["reasons"]), head["size"])


def _place(directory: Path, run_dir: Path) -> Path:
    return directory / f"{xxhash.xxh3_64_hexdigest(str(run_dir.resolve()).encode())}.npz"


def _mark(run_dir: Path, size: int) -> str:
    """Returns a checksum of the start of the file and of the bytes before `size`; empty if it is shorter."""
    try:
        with (run_dir / METRICS).open("rb") as file:
            start = file.read(LOOKED_AT)
            file.seek(max(0, size - LOOKED_AT))
            end = file.read(min(size, LOOKED_AT))
    except OSError:
        return ""
    return xxhash.xxh3_64_hexdigest(start[:size] + end) if len(end) == min(size, LOOKED_AT) else ""
