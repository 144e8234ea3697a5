"""Digests of the files that settings name: rows, code of rewards and environments, tokenizers. They stand in `config.toml`, as
comments below the settings, so that a resumed run finds out what has changed. Code that such a file names by its absolute path counts too, as in what `headrace
import` writes around a reward function of verl, and so do the modules beside it that it imports. Installed packages are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from headrace.episodes.scoring.config import ENDPOINTS
from headrace.episodes.tasks.rows import images_in
from headrace.run.config import RunConfig, set_runs
from headrace.run.resume_rules import rule_of, settings_of
from headrace.settings.user_code import code_behind

_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
"""Files of which the size and some pieces count: to read them takes as long as to load a model."""
_PIECES, _PIECE = 64, 1 << 14
"""The number of pieces that are read of a file, and their bytes. Other weights differ nearly everywhere."""
_READ = (".json", ".jinja", ".model", ".arrow", ".parquet", "merges.txt", "vocab.txt")
USED_BY_HOSTS = ("reward.", "environment.")
"""The begins of the names of settings whose files a rollout host reads."""
NONE_RECORDED: Mapping[str, str] = {}


def contents_of(
    config: RunConfig, recorded: Mapping[str, str] = NONE_RECORDED, *, of_sets: bool = False
) -> dict[str, str]:
    """A digest for each setting that names files which are there, unless it may change freely. `recorded`: the digests of a run that goes on; one of
    the form before 2026-11-30, which knew of weights their size alone, stays where it still holds. `of_sets`: whether the code that evaluation sets
    have of their own counts."""
    found = _digests(settings_of(config), recorded)
    if (
        config.task.images and not config.task.facts.passed
    ):  # rows that are passed hold theirs, or are refused when they are read
        images = "\n".join(image.digest for image in images_in(config.task))
        found["task.images"] = xxhash.xxh3_128(images).hexdigest()
    for named, run in set_runs(config).items() if of_sets else ():
        code = [(name, value) for name, value in settings_of(run) if name.startswith(USED_BY_HOSTS)]
        found |= {f"eval.sets.{named}.{name}": digest for name, digest in _digests(code).items()}
    return found


def _digests(settings: Iterable[tuple[str, Any]], recorded: Mapping[str, str] = NONE_RECORDED) -> dict[str, str]:
    found = {}
    for name, value in settings:
        paths = [] if rule_of(name).is_free or name.removeprefix("reward.") in ENDPOINTS else sorted(_paths(value))
        if paths:
            found[name] = _digest(paths, parts=name.endswith("path") and name != "model.path")
            if recorded.get(name) not in (None, found[name]) and recorded[name] == _digest(paths, earlier=True):
                found[name] = recorded[name]
    return found


def written(contents: Mapping[str, str]) -> str:
    """The lines of `config.toml` that say it."""
    return "".join(f"# contents of {name}: {digest}\n" for name, digest in contents.items())


def _paths(value: Any) -> Iterator[Path]:
    """The absolute paths in a value that exist, those of `file.py:name` included."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for element in value:
            yield from _paths(element)
    elif isinstance(value, str) and value.startswith("/"):
        file, colon, _ = value.rpartition(":")
        path = Path(file if colon and file.endswith(".py") else value)
        if path.exists():
            yield path


def _digest(paths: Iterable[Path], *, parts: bool = False, earlier: bool = False) -> str:
    """`parts`: whether a directory may hold rows in further ones, as `lang=de/0.parquet`."""
    digest = xxhash.xxh3_128()
    for path in paths:
        _add(digest, path, parts=parts, earlier=earlier)
    return digest.hexdigest()


def _add(digest: xxhash.xxh3_128, path: Path, *, parts: bool, earlier: bool) -> None:
    if not path.is_dir():
        _read(digest, path)
        for named in code_behind(path) if path.suffix == ".py" else ():
            _read(digest, named)
        return
    for file in sorted(path.rglob("*") if parts else path.iterdir()):
        name = file.relative_to(path).as_posix()
        if name.endswith(_WEIGHTS):
            digest.update(f"{name} {file.stat().st_size}")
            if not earlier:
                _read_pieces(digest, file)
        elif name.endswith(_READ):
            digest.update(name)
            _read(digest, file)


def _read(digest: xxhash.xxh3_128, path: Path) -> None:
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)


def _read_pieces(digest: xxhash.xxh3_128, path: Path) -> None:
    last = max(0, path.stat().st_size - _PIECE)
    with path.open("rb") as file:
        for number in range(_PIECES):
            file.seek(last * number // (_PIECES - 1))
            digest.update(file.read(_PIECE))
