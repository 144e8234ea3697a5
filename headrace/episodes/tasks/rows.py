"""Prompts from rows: JSON lines, Parquet, a directory saved by `datasets`, or rows that are passed from Python.

Rows are drawn epoch after epoch, each time in a new order.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from headrace.core.chat.messages import ARGUMENTS, TOOLS
from headrace.core.errors import ConfigError, nearest
from headrace.core.protocols import Task
from headrace.core.types import Prompt
from headrace.durable.spelling import jsonable
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.conversations import count_places, prompt_of
from headrace.episodes.tasks.prompts import (
    RESERVED,
    Encoder,
    PromptMaker,
    checked_cursor,
    digest_of,
    take,
)
from headrace.episodes.tasks.read import Row, of_datasets, read_rows, twice
from headrace.models.images import ImageFile, KnownImages, as_text, images_of

_SEEN = ("image", "images", "video", "videos", "audio", "audios")
"""Columns that TRL shows to models that see or hear."""
_PICTURES = ("image", "images")
_SEVERAL = (list, tuple, set, frozenset)


class RowsTask:
    """Draws `train/<epoch>/<row>`, each row once an epoch.

    Held-out rows and few-shot examples do not depend on the run's seed. They are never drawn, nor is any row with the same question.
    """

    def __init__(
        self,
        config: TaskConfig,
        seed: int,
        encoder: Encoder,
        passed: Sequence[Mapping[str, Any]] | None = None,
        *,
        measured: bool = False,
    ) -> None:
        """Reads and checks all rows. Raises ConfigError with the place and the remedy if one is wrong.

        `passed`: the rows, if `task.kind = "python"`. `measured`: whether all rows are held out, and none is ever drawn."""
        self._config, self._seed, self._measured = config, seed, measured
        self._known = encoder.images
        raw = _given(passed) if config.facts.passed else read_rows(config.kind, config.path)
        self._rows = self._all_checked(raw, config.source)
        settings = (seed, config.shuffle, config.held_out, config.held_out_path, config.examples)
        self._source = digest_of([str(settings), *map(self._key, self._rows)])
        train, held, shown = self._split()
        self._maker = PromptMaker(config, encoder, [self._solved(index) for index in shown])
        self._apart = [row for _, row in held] if config.held_out_path else []
        for path, rows in ((config.source, self._rows), (config.held_out_path, self._apart)):
            for number, row in enumerate(rows, 1):
                with about(f"{path}, row {number}:"):
                    self._maker.check(row)
        self._held = [self._prompt(f"held-out/{index}", row) for index, row in held]
        self.asks = [self._key(row) for _, row in held]
        """The questions of the held-out rows, in their order."""
        self._train = train
        self._epoch = self._place = 0
        self._order = self._shuffled(0)

    def _all_checked(self, raw: Sequence[Mapping[str, Any]], path: str) -> list[Row]:
        if not raw:
            raise ConfigError(f"{path} holds no rows; a task needs at least one prompt")
        return [
            _checked(self._shown(row, path, number), f"{path}, row {number}", path, self._config)
            for number, row in enumerate(raw, 1)
        ]

    def _shown(self, row: Mapping[str, Any], path: str, number: int) -> Mapping[str, Any]:
        """Returns the row with the files that the model is shown in place of its images."""
        if not self._config.images:
            return row
        assert self._known is not None, "`with_images` has refused the model"
        with about(f"{path}, row {number}:"):
            return as_files(images_of_row(row, self._config, path, number), row, self._known)

    def _key(self, row: Row) -> str:
        """Returns what a row asks: its question, and the digests of its images."""
        question = row[self._config.prompt]
        asked = question if isinstance(question, str) else repr(question)
        return " ".join([asked, *(path.name for path in files_of(row, self._config))])

    def draw(self) -> Prompt:
        if self._place == len(self._order):
            self._epoch, self._place = self._epoch + 1, 0
            self._order = self._shuffled(self._epoch)
        index = self._order[self._place]
        self._place += 1
        return self._prompt(f"train/{self._epoch}/{index}", self._rows[index])

    def held_out(self, count: int) -> list[Prompt]:
        """Returns so many prompts; of a file that is measured whole, those that there are."""
        return self._held[:count] if self._measured else take(self._held, count)

    @property
    def trained(self) -> set[str]:
        """The questions of the rows that are drawn."""
        return {self._key(self._rows[index]) for index in self._train}

    def remarks(self) -> list[str]:
        rows = [*self._rows, *self._apart]
        return [*self._maker.remarks((row[self._config.prompt], row) for row in rows), *_unread(rows, self._config)]

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "place": self._place, "source": self._source}

    def restore(self, state: Mapping[str, Any]) -> None:
        checked = checked_cursor(state, self._source)
        self._epoch, self._place = int(checked["epoch"]), int(checked["place"])
        self._order = self._shuffled(self._epoch)

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(self._train)
        if self._config.shuffle:
            random.Random(f"{self._seed}/epoch/{epoch}").shuffle(order)
        return order

    def _split(self) -> tuple[list[int], list[tuple[int, Row]], list[int]]:
        """Returns the row numbers to train on, the held-out rows with their numbers, and the row numbers of the examples."""
        config, count = self._config, len(self._rows)
        order = list(range(count))
        if config.shuffle:
            random.Random(f"split/{count}").shuffle(order)
        if self._measured:
            shown, order = order[: config.examples], order[config.examples :]
            in_examples = {self._key(self._rows[index]) for index in shown}
            held = [(index, self._rows[index]) for index in order if self._key(self._rows[index]) not in in_examples]
            return [], held, shown
        if config.held_out_path:
            apart = self._all_checked(read_rows(config.kind, config.held_out_path), config.held_out_path)
            held = list(enumerate(apart))[: config.held_out]
        else:
            cut = max(0, count - config.held_out)
            order, held = order[:cut], [(index, self._rows[index]) for index in order[cut:]]
        asked = {self._key(row) for _, row in held}
        order = [index for index in order if self._key(self._rows[index]) not in asked]
        shown, order = order[: config.examples], order[config.examples :]
        in_examples = {self._key(self._rows[index]) for index in shown}
        train = sorted(index for index in order if self._key(self._rows[index]) not in in_examples)
        if not train:
            raise ConfigError(self._nothing_left())
        return train, held, shown

    def _nothing_left(self) -> str:
        config, count = self._config, len(self._rows)
        different = len(set(map(self._key, self._rows)))
        if count > 1 and different <= count // 2:
            return (
                f"{config.source} has {count} rows, of which none is left to train on: they ask only {different} different question(s) in "
                f"the column {config.prompt} (task.prompt), and what is held out or shown as an example is not trained on; name the "
                "column whose texts differ, add other rows, or set task.held_out, eval.prompts and task.examples = 0"
            )
        return (
            f"{config.source} has {count} rows, of which none is left to train on after task.held_out = {config.held_out} and "
            f"task.examples = {config.examples} (rows that ask the same are left out too); lower them, or give "
            "task.held_out_path a file of its own"
        )

    def _solved(self, index: int) -> tuple[str, str]:
        config, row = self._config, self._rows[index]
        question, answer = row[config.prompt], row.get(config.answer)
        if config.answer not in row:
            raise ConfigError(
                _no_column("task.answer", config.answer, row, config.source) + " It is needed for task.examples."
            )
        if not isinstance(question, str) or answer is None:
            raise ConfigError(
                f"{config.source}, row {index + 1}: an example needs a prompt that is a string and an answer; set task.examples = 0"
            )
        return question, str(answer)

    def _prompt(self, id: str, row: Row) -> Prompt:
        question = row[self._config.prompt]
        # A conversation stays among the columns, because the prompt's text holds its last message only.
        columns = {
            name: value for name, value in row.items() if name != self._config.prompt or not isinstance(question, str)
        }
        chat = "" if isinstance(question, str) else self._config.prompt
        return self._maker.make(id, question, columns, chat, files_of(row, self._config))


def trained_too(task: Task, other: Task, count: int) -> int:
    """Returns how many of the first `count` rows that the other task holds out ask what this one trains on; 0 where either makes its problems."""
    if not (isinstance(task, RowsTask) and isinstance(other, RowsTask)):
        return 0
    drawn = task.trained
    return sum(asked in drawn for asked in other.asks[:count])


def _given(rows: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]]:
    if rows is None:
        raise ConfigError(
            "the prompts of this run are rows that were passed to headrace.train(dataset=...), which are kept in no file: pass "
            "the same rows from Python again"
        )
    return rows


def _checked(row: Mapping[str, Any], where: str, path: str, config: TaskConfig) -> Row:
    if config.prompt not in row:
        raise ConfigError(f"{where}: " + _no_column("task.prompt", config.prompt, row, path))
    if taken := [name for name in RESERVED if name in row]:
        raise ConfigError(
            f"{where}: the column {taken[0]} has a name that reward functions need for something else; rename it"
        )
    if seen := [name for name in _SEEN if row.get(name) and name not in config.images]:
        shown = (
            f'set task.images = ["{seen[0]}"] if the model is to see it'
            if seen[0] in _PICTURES
            else "video and audio are not served"
        )
        raise ConfigError(
            f"{where}: the column {seen[0]} is for models that see or hear, and nothing of it would reach this one: {shown}, remove the column, "
            "or rename it if it is for the reward alone"
        )
    plain = plain_row(row, where)
    with about(f"{where}: the prompt in column {config.prompt}"):
        prompt = prompt_of(plain[config.prompt], config)
        if (places := count_places(prompt)) and places != (held := len(files_of(plain, config))):
            raise ConfigError(
                f"has {places} parts that are images, and the columns of task.images hold {held}; give each its image, or leave out such parts: the "
                "images then stand before the text of the last question"
            )
        return plain | {config.prompt: prompt}


@contextmanager
def about(subject: str) -> Iterator[None]:
    """Gives a ConfigError its subject."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{subject} {error}") from None


def _unread(rows: Sequence[Row], config: TaskConfig) -> Iterator[str]:
    """Sentences on columns that mean something elsewhere."""
    columns = {name for row in rows for name in row}
    if pair := [name for name in ("chosen", "rejected") if name in columns and name != config.prompt]:
        yield (
            f"the columns {' and '.join(pair)} are given to the reward and not trained: preferences are formed from what the policy itself "
            "writes (docs/algorithms.md), or read by [warm_start] (docs/warm_start.md)"
        )
    if not config.chat and (shown := [name for name in (TOOLS, ARGUMENTS) if name in columns]):
        yield f"the column {shown[0]} is for the chat template, and task.chat = false: only the reward is given it"


def plain_row(row: Mapping[str, Any], where: str) -> Row:
    """Returns the row in a form that JSON can hold. Raises ConfigError naming the column that has no such form."""
    plain = {}
    for name, value in row.items():
        if problem := _digits_lost(value):
            raise ConfigError(f"{where}: the column {name} holds {problem}; write it as a text in all rows")
        try:
            plain[str(name)] = jsonable(value)
        except TypeError as error:
            raise ConfigError(
                f"{where}: the column {name} cannot be kept in the journal ({error}); remove it"
            ) from None
    if len(plain) < len(row):
        raise ConfigError(f"{where}: two columns have one name as text, such as 1 and '1'; rename one of them")
    return plain


def _digits_lost(value: Any) -> str:
    """Returns which number within the value has digits that `jsonable` would not keep as a number, in words; empty if none has."""
    if isinstance(value, int):
        wide = not -(2**63) <= value < 2**64
        return (
            "an integer of more than 64 bits, of which the reward would be given the digits as a text" if wide else ""
        )
    if isinstance(value, Decimal):
        kept = not value.is_finite() or Decimal(repr(float(value))) == value
        return "" if kept else f"the decimal {value}, which the reward would be given rounded to {float(value)!r}"
    if getattr(getattr(value, "dtype", None), "kind", "") == "O":
        value = value.tolist()
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, _SEVERAL) else ()
    return next(filter(None, map(_digits_lost, inner)), "")


def _no_column(setting: str, name: str, row: Mapping[str, Any], path: str) -> str:
    return f"there is no column {name} ({setting}) in {path}{nearest(name, row)}; its columns are: {', '.join(map(str, row)) or 'none'}."


# --- Rows that are passed from Python ---------------------------------------------------------------------------------


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
    found = records_of(dataset)
    if not isinstance(found, Iterable):
        raise ConfigError(
            f"dataset= takes a list of dicts, a datasets.Dataset or a pandas frame, not a {type(dataset).__name__}"
        )
    return [_row(row, f"dataset=, row {number}", images) for number, row in enumerate(found, 1)]


def fingerprint(rows: Sequence[Row]) -> str:
    """Returns a digest of all columns of all rows in their order, followed by the number of rows for readers."""
    digest = digest_of(json.dumps(row, sort_keys=True, ensure_ascii=False) for row in rows)
    return f"{digest} ({len(rows)} rows)"


def records_of(dataset: Any) -> Any:
    """Returns what iterates over the rows of a table: a pandas frame by itself iterates over column names and has NaN for missing values."""
    if not (hasattr(dataset, "iterrows") and hasattr(dataset, "to_dict")):
        return of_datasets(dataset) if hasattr(dataset, "with_format") else dataset
    if not dataset.columns.is_unique:
        raise ConfigError(
            f"dataset= has two columns {twice(list(dataset.columns))!r}, of which one would be lost; rename one of them"
        )
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


# --- The images of rows: read once, shown to the model, and given to rewards as files ---------------------------------


def images_of_row(row: Mapping[str, Any], config: TaskConfig, path: str, number: int) -> dict[str, list[ImageFile]]:
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


def images_in(config: TaskConfig, passed: Sequence[Mapping[str, Any]] | None = None) -> Iterator[ImageFile]:
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


def as_files(found: Mapping[str, Sequence[ImageFile]], row: Mapping[str, Any], known: KnownImages) -> dict[str, Any]:
    """Returns the row with the paths of the images that the model is shown in place of their columns: text, or a list of texts where the row has a
    list."""
    paths = {column: [str(known.path(image.digest)) for image in images] for column, images in found.items()}
    return {
        **row,
        **{column: those if isinstance(row[column], (list, tuple)) else those[0] for column, those in paths.items()},
    }


def files_of(row: Mapping[str, Any], config: TaskConfig) -> list[Path]:
    """Returns the files of the images of a row that `as_files` has returned, in order."""
    columns = [row[column] for column in config.images]
    return [Path(path) for value in columns for path in (value if isinstance(value, list) else [value])]


def _folder(path: str) -> Path:
    source = Path(path).expanduser()
    return source if source.is_dir() else source.parent if source.is_file() else Path.cwd()
