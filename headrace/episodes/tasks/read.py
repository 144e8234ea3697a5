"""Rows of a file as plain dicts."""

from __future__ import annotations

import csv
import gzip
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TextIO

from headrace.core.chat.messages import without_nulls
from headrace.core.errors import ConfigError, nearest
from headrace.episodes.tasks.task_kinds import TASK_KINDS
from headrace.settings.extras import absent

Row = dict[str, Any]

_PACKED = (
    (b"\x28\xb5\x2f\xfd", "zstd", "unzstd"),
    (b"\xfd7zXZ", "xz", "unxz"),
    (b"BZh", "bzip2", "bunzip2"),
    (b"PK\x03\x04", "zip", "unzip"),
)
"""The first bytes of files that no package here unpacks, and the programs that do."""
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_MARK = "\ufeff"
"""A byte-order mark. The one at the beginning of a file is no part of its text."""
_MARKED = (
    "a byte-order mark stands within the text, and would be a part of a name or a value that looks as if it had none; files were put behind each "
    "other, or it was put before a text that has one: remove it"
)
_INTEGER = re.compile(r"u?int\d+")


def read_rows(kind: str, path: str) -> list[Row]:
    """Returns all rows in the order of the file; none for a kind without one. Raises ConfigError if the file is missing or not of this `kind`."""
    source = Path(path).expanduser()
    if not source.exists():
        beside = [str(other) for other in source.parent.glob("*")] if source.parent.is_dir() else []
        raise ConfigError(
            f"there is no {source}{nearest(str(source), beside)}; task.path must name the file with the rows"
        )
    rows: list[Row] = resolve_name(TASK_KINDS[kind].reads)(source) if TASK_KINDS[kind].reads else []
    return rows


def json_rows(path: Path) -> list[Row]:
    return _of_text(path, "jsonl")


def csv_rows(path: Path) -> list[Row]:
    return _of_text(path, "csv")


def _of_text(path: Path, kind: str) -> list[Row]:
    if path.is_dir():
        what = "one JSON object a line" if kind == "jsonl" else "the names of columns in its first line"
        raise ConfigError(f"{path} is a directory; task.kind = {kind} needs a file with {what}")
    try:
        with _opened(path) as file:
            return _csv(file, path) if kind == "csv" else _json(file, path)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text ({error}); save it as UTF-8, or set task.kind to what it is"
        ) from None
    except (EOFError, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path} cannot be unpacked ({error}); copy the whole file again") from None


def _opened(path: Path) -> TextIO:
    """Opens a file of text, unpacked if it is packed by gzip. Raises ConfigError for other formats that its first bytes tell."""
    with path.open("rb") as file:
        first = file.read(8)
    if first.startswith(_PARQUET):
        raise ConfigError(f"{path} is a Parquet file; set task.kind = parquet")
    for begin, how, unpack in _PACKED:
        if first.startswith(begin):
            raise ConfigError(f"{path} is packed by {how}; unpack it ({unpack} {path.name}) and name what comes out")
    if first.startswith(_GZIP):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _json(file: TextIO, path: Path) -> list[Row]:
    """Reads one object a line, or one array of objects."""
    begin = ""
    while not begin and (line := file.readline()):
        begin = line.strip()
    file.seek(0)
    if begin.startswith("["):
        return _array(file.read(), path)
    lines = enumerate(file, 1)
    return [_json_line(line, f"{path}:{number}", path) for number, line in lines if line.strip()]


def _array(text: str, path: Path) -> list[Row]:
    try:
        rows = json.loads(text, object_pairs_hook=_once, parse_float=_finite)
    except ValueError as error:
        raise ConfigError(
            f"{path}: not valid JSON ({error}); it begins as an array, which must hold one object for each row"
        ) from None
    return [_object(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)]


def _json_line(line: str, where: str, path: Path) -> Row:
    try:
        row = json.loads(line, object_pairs_hook=_once, parse_float=_finite)
    except ValueError as error:
        raise ConfigError(
            f"{where}: not valid JSON ({error}); every line must be one JSON object{_other_text(path)}"
        ) from None
    return _object(row, where)


def _once(pairs: list[tuple[str, Any]]) -> Row:
    """Makes an object. Raises ValueError for one that has a name twice: readers of JSON differ in which value they take."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError(f"{twice([name for name, _ in pairs])} stands twice in an object")
    return made


def _finite(text: str) -> float:
    """Reads a number with a point or an exponent. Raises ValueError for one that would be infinite; `Infinity` is a word and not read here."""
    if math.isinf(number := float(text)):
        raise ValueError(f"the number {text[:40]} is beyond what float64 holds; write it as a string")
    return number


def twice(names: Sequence[Any]) -> Any:
    """Returns the first name that comes again; empty if none does."""
    return next((name for place, name in enumerate(names) if name in names[:place]), "")


def _object(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise ConfigError(
            f'{where}: a JSON {type(row).__name__} where an object with columns is needed, such as {{"prompt": "..."}}'
        )
    return row


def _other_text(path: Path) -> str:
    """The remedy for a text that is no JSON lines, if it can be told."""
    if ".csv" in path.suffixes or ".tsv" in path.suffixes:
        return ", or set task.kind = csv"
    try:
        with _opened(path) as file:
            whole = json.load(file)
    except ValueError:
        return ""
    lists = [name for name, value in whole.items() if isinstance(value, list)] if isinstance(whole, dict) else []
    return f". The file is one object; save its list ({' or '.join(lists)}) alone as a JSON array" if lists else ""


def _csv(file: TextIO, path: Path) -> list[Row]:
    csv.field_size_limit((1 << 31) - 1)
    mark = "\t" if ".tsv" in path.suffixes else ","
    table = csv.reader(file, delimiter=mark, strict=True)
    try:
        names = next(table, [])
        if names and names[0].lstrip().startswith(("{", "[")):
            raise ConfigError(f"{path} begins with JSON and not with the names of columns; set task.kind = jsonl")
        if len(names) == 1 and ";" in names[0]:
            raise ConfigError(f"{path} has semicolons between its columns; save it with commas, or as .tsv with tabs")
        if len(set(names)) < len(names):
            raise ConfigError(
                f"{path} has two columns {twice(names)!r}, of which one would be lost; rename one of them"
            )
        if any(_MARK in name for name in names):
            raise ConfigError(f"{path}:1: {_MARKED}")
        rows = []
        for values in table:
            if values and values[0].startswith(_MARK):
                raise ConfigError(f"{path}:{table.line_num}: {_MARKED}")
            if values and len(values) != len(names):
                raise ConfigError(
                    f"{path}:{table.line_num}: {len(values)} values for {len(names)} columns ({', '.join(names)}); put values that "
                    "hold the separator between double quotes"
                )
            rows += [dict(zip(names, values, strict=True))] if values else []
    except csv.Error as error:
        raise ConfigError(f"{path}:{table.line_num}: not valid CSV ({error}); save it again as CSV") from None
    return rows


def parquet_rows(path: Path) -> list[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(absent("task.kind = parquet", "pyarrow", "pyarrow", error, "parquet")) from None
    try:
        if path.is_dir():
            _check_alike(pyarrow.parquet.ParquetDataset(path).fragments)
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        message = str(error).splitlines()[0]
        raise ConfigError(f"{path} cannot be read as Parquet ({message}); set task.kind to what it is") from None
    try:
        return of_arrow(table.to_pylist())
    except ValueError as error:  # two fields of a struct have one name, or a value is none that Python has
        raise ConfigError(f"{path} has values that Python cannot have ({error}); write it with other columns") from None


def _check_alike(files: Sequence[Any]) -> None:
    """Raises ConfigError unless all files of a directory have the columns of the first, by which Arrow reads them: it leaves out others and fields of
    others, and rounds wider floats. Integers that do not fit are an error of Arrow's own."""
    types = [{field.name: str(field.type) for field in file.physical_schema} for file in files]
    for file, those in zip(files, types, strict=True):
        for name in sorted(those.keys() | types[0].keys()):
            first, other = (one.get(name, "absent") for one in (types[0], those))
            if first != other and other != "null" and not (_INTEGER.fullmatch(first) and _INTEGER.fullmatch(other)):
                raise ConfigError(
                    f"the column {name} is {other} in {file.path} and {first} in {files[0].path}, by which all files of the directory would be read; "
                    "write them with the same columns and types"
                )


def of_datasets(dataset: Any) -> list[Row]:
    """Returns the rows of a dataset of `datasets` as Python values: one that is formatted for torch gives float32. A transform of the
    user's is kept."""
    shown = getattr(dataset, "format", None)
    if shown is None:  # iterable, without a transform and a choice of columns
        dataset = dataset.with_format(None)
    elif shown["type"] not in (None, "custom"):
        dataset = dataset.with_format(None, columns=shown["columns"])
    return of_arrow(dataset)


def of_arrow(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Returns rows as they were before Arrow gave all objects of a column the same keys: a call in a message lacks the arguments that only others
    have."""
    return [{name: _own_arguments(value) for name, value in row.items()} for row in rows]


def _own_arguments(value: Any) -> Any:
    if not (
        isinstance(value, list) and any(isinstance(message, dict) and message.get("tool_calls") for message in value)
    ):
        return value
    return [
        message | {"tool_calls": without_nulls(message["tool_calls"])}
        if isinstance(message, dict) and message.get("tool_calls")
        else message
        for message in value
    ]


def saved_rows(path: Path) -> list[Row]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(absent("task.kind = datasets", "datasets", "datasets", error, "datasets")) from None
    if _is_empty(path):
        return []
    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:  # errors of several libraries, depending on what the directory holds instead
        message = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{path} is not a dataset written by save_to_disk ({message}); save it so, or use task.kind = jsonl or parquet"
        ) from None
    if isinstance(saved, datasets.DatasetDict):
        splits = " or ".join(str(path / split) for split in saved)
        raise ConfigError(f"{path} holds several splits; set task.path (and task.held_out_path) to {splits}")
    return of_datasets(saved)


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
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if known := [kind for kind, facts in TASK_KINDS.items() if suffix in facts.endings]:
        return known[0]
    return "jsonl" if path.is_file() else "reasoning_gym"
