"""Rows of a file as plain dicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.settings.extras import absent
from headrace.tasks.prompts import nearest

Row = dict[str, Any]


def read_rows(kind: str, path: str) -> list[Row]:
    """Returns all rows in the order of the file. Raises ConfigError if the file is missing or not of this `kind`."""
    source = Path(path).expanduser()
    if not source.exists():
        beside = [str(other) for other in source.parent.glob("*")] if source.parent.is_dir() else []
        raise ConfigError(
            f"there is no {source}{nearest(str(source), beside)}; task.path must name the file with the rows"
        )
    match kind:
        case "jsonl":
            return _jsonl(source)
        case "parquet":
            return _parquet(source)
        case "datasets":
            return _saved_dataset(source)
        case _:
            raise AssertionError(kind)


def _jsonl(path: Path) -> list[Row]:
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; task.kind = jsonl needs a file with one JSON object a line")
    rows = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    rows.append(_json_line(line, f"{path}:{number}"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text ({error}); save it as UTF-8, or set task.kind to what it is"
        ) from None
    return rows


def _json_line(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON ({error}); every line must be one JSON object") from None
    if not isinstance(row, dict):
        raise ConfigError(
            f'{where}: a JSON {type(row).__name__} where an object with columns is needed, such as {{"prompt": "..."}}'
        )
    return row


def _parquet(path: Path) -> list[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(absent("task.kind = parquet", "pyarrow", "pyarrow", error, "parquet")) from None
    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        said = str(error).splitlines()[0]
        raise ConfigError(f"{path} cannot be read as Parquet ({said}); set task.kind to what it is") from None


def _saved_dataset(path: Path) -> list[Row]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(absent("task.kind = datasets", "datasets", "datasets", error, "datasets")) from None
    try:
        saved = [] if _is_empty(path) else datasets.load_from_disk(str(path))
    except Exception as error:  # errors of several libraries, depending on what the directory holds instead
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{path} is not a dataset written by save_to_disk ({said}); save it so, or use task.kind = jsonl or parquet"
        ) from None
    if isinstance(saved, datasets.DatasetDict):
        splits = " or ".join(str(path / split) for split in saved)
        raise ConfigError(f"{path} holds several splits; set task.path (and task.held_out_path) to {splits}")
    return list(saved)


def _is_empty(path: Path) -> bool:
    """`datasets` cannot load an empty dataset that it saved itself."""
    try:
        return json.loads((path / "state.json").read_text(encoding="utf-8"))["_data_files"] == []
    except (OSError, ValueError, KeyError):
        return False


def kind_of(data: str) -> str:
    """Returns the kind of task that reads this file, directory or family of problems."""
    path = Path(data).expanduser()
    if path.is_dir():
        return "datasets"
    if path.suffix in (".parquet", ".jsonl", ".json"):
        return "parquet" if path.suffix == ".parquet" else "jsonl"
    return "jsonl" if path.is_file() else "reasoning_gym"
