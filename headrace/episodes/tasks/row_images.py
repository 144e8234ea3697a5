"""The images of rows: read once, shown to the model, and given to rewards as files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.read import read_rows
from headrace.models.images import ImageFile, KnownImages, images_of

Row = Mapping[str, Any]


def images_of_row(row: Row, config: TaskConfig, path: str, number: int) -> dict[str, list[ImageFile]]:
    """Returns the images of a row by their columns, in the order of `task.images`. `path` and `number`: its place. Raises ConfigError for a column
    that is not there, and for a value that is no image."""
    found = {}
    for column in config.images:
        where = f"{path}, row {number}: the column {column} (task.images)"
        if column not in row:
            raise ConfigError(f"{where} is missing; the columns are: {', '.join(map(str, row))}")
        try:
            found[column] = [replace(image, where=where) for image in images_of(row[column], _folder(path))]
        except ConfigError as error:
            raise ConfigError(f"{where} {error}") from None
    return found


def images_in(config: TaskConfig, passed: Sequence[Row] | None = None) -> Iterator[ImageFile]:
    """Yields all images of a task, in the order of its rows. `passed`: the rows, if they are passed from Python. Raises ConfigError as
    `images_of_row`, and for a file of rows that cannot be read."""
    if not config.images:
        return
    if config.facts.passed and passed is None:
        raise ConfigError(
            "the images of this run are in rows that were passed to headrace.train(dataset=...), which are kept in no file: pass the same rows from "
            "Python again, for training and evaluation; replay cannot do its steps again"
        )
    for path in filter(None, (config.source, config.held_out_path)):
        given = config.facts.passed and path == config.source
        rows = passed or () if given else read_rows(config.kind, path)
        for number, row in enumerate(rows, 1):
            for images in images_of_row(row, config, path, number).values():
                yield from images


def as_files(found: Mapping[str, Sequence[ImageFile]], row: Row, known: KnownImages) -> dict[str, Any]:
    """Returns the row with the paths of the images that the model is shown in place of their columns: text, or a list of texts where the row has a
    list."""
    paths = {column: [str(known.path(image.digest)) for image in images] for column, images in found.items()}
    return {
        **row,
        **{column: those if isinstance(row[column], (list, tuple)) else those[0] for column, those in paths.items()},
    }


def files_of(row: Row, config: TaskConfig) -> list[Path]:
    """Returns the files of the images of a row that `as_files` has returned, in order."""
    columns = [row[column] for column in config.images]
    return [Path(path) for value in columns for path in (value if isinstance(value, list) else [value])]


def _folder(path: str) -> Path:
    source = Path(path).expanduser()
    return source if source.is_dir() else source.parent if source.is_file() else Path.cwd()
