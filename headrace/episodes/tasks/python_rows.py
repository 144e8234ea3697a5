"""Rows that are passed from Python: a list of dicts, a `datasets.Dataset`, a pandas frame, or any iterable of dicts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.episodes.tasks.prompts import digest_of
from headrace.episodes.tasks.read import Row, of_arrow
from headrace.episodes.tasks.rows import about, plain_row
from headrace.models.images import as_text


def rows_of(dataset: Any, images: Sequence[str] = ()) -> list[Row]:
    """Returns all rows, in a form that JSON can hold. An iterator is read to its end. The columns `images` hold their images themselves then, so that
    the fingerprint of the rows is theirs too.

    Raises ConfigError for a value that is no table of rows.
    """
    if isinstance(dataset, (str, bytes, Path)):
        raise ConfigError(f"dataset= takes rows, not the text {str(dataset)!r}; a file of rows is named in task.path")
    if isinstance(dataset, Mapping):
        names = ", ".join(map(str, list(dataset)[:5]))
        raise ConfigError(
            f"dataset= takes one table of rows, not a mapping (of {names}); of a DatasetDict pass one split, such as "
            'dataset["train"], and of a dict of columns a list with a dict for each row'
        )
    found = _records(dataset)
    if not isinstance(found, Iterable):
        raise ConfigError(
            f"dataset= takes a list of dicts, a datasets.Dataset or a pandas frame, not a {type(dataset).__name__}"
        )
    return [_row(row, f"dataset=, row {number}", images) for number, row in enumerate(found, 1)]


def fingerprint(rows: Sequence[Row]) -> str:
    """Returns a digest of all columns of all rows in their order, followed by the number of rows for readers."""
    digest = digest_of(json.dumps(row, sort_keys=True, ensure_ascii=False) for row in rows)
    return f"{digest} ({len(rows)} rows)"


def _records(dataset: Any) -> Any:
    """Returns the rows of a pandas frame, which by itself iterates over column names and has NaN for missing values."""
    if not (hasattr(dataset, "iterrows") and hasattr(dataset, "to_dict")):
        return of_arrow(dataset) if type(dataset).__module__.partition(".")[0] == "datasets" else dataset
    plain = dataset.astype(object)
    return plain.where(dataset.notna(), None).to_dict("records")


def _row(row: Any, where: str, images: Sequence[str]) -> Row:
    if not isinstance(row, Mapping):
        raise ConfigError(
            f'{where}: a {type(row).__name__} where a dict of columns is needed, such as {{"prompt": "..."}}'
        )
    with about(f"{where}: a column of task.images"):
        held = {name: as_text(row[name], Path.cwd()) for name in images if name in row}
    return plain_row({**row, **held}, where)
