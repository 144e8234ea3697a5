"""Digests of the files that settings name: rows, code of rewards and environments, tokenizers. They stand in `config.toml`, as
comments below the settings, so that a resumed run finds out what has changed. Code that such a file names by its absolute path counts too, as in what `headrace
import` writes around a reward function of verl, and so do the modules beside it that it imports. Installed packages are not looked at.
"""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from headrace.episodes.scoring.config import ENDPOINTS
from headrace.episodes.tasks.row_images import images_in
from headrace.run.config import RunConfig
from headrace.run.resume_rules import rule_of, settings_of

_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
"""Files of which only the size counts: to read them takes as long as to load a model."""
_READ = (".json", ".jinja", ".model", ".arrow", ".parquet", "merges.txt", "vocab.txt")
MOST_FILES = 100
"""Files of the user's code that are read for one setting."""
_LINE = re.compile(r"^# contents of (\S+): ([0-9a-f]{32})$", re.MULTILINE)


def contents_of(config: RunConfig) -> dict[str, str]:
    """A digest for each setting that names files which are there, unless it may change freely."""
    found = {}
    for name, value in settings_of(config):
        paths = [] if rule_of(name).is_free or name.removeprefix("reward.") in ENDPOINTS else sorted(_paths(value))
        if paths:
            digest = xxhash.xxh3_128()
            for path in paths:
                _add(digest, path)
            found[name] = digest.hexdigest()
    if (
        config.task.images and not config.task.facts.passed
    ):  # rows that are passed hold theirs, or are refused when they are read
        images = "\n".join(image.digest for image in images_in(config.task))
        found["task.images"] = xxhash.xxh3_128(images).hexdigest()
    return found


def written(contents: Mapping[str, str]) -> str:
    """The lines of `config.toml` that say it."""
    return "".join(f"# contents of {name}: {digest}\n" for name, digest in contents.items())


def contents_in(config_toml: Path) -> dict[str, str]:
    """Reads these lines; there are none if an earlier version wrote the file."""
    return dict(_LINE.findall(config_toml.read_text(encoding="utf-8")))


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


def _add(digest: xxhash.xxh3_128, path: Path) -> None:
    if not path.is_dir():
        _read(digest, path)
        for named in _code_named_in(path) if path.suffix == ".py" else ():
            _read(digest, named)
        return
    for file in sorted(path.iterdir()):
        if file.name.endswith(_WEIGHTS):
            digest.update(f"{file.name} {file.stat().st_size}")
        elif file.name.endswith(_READ):
            digest.update(file.name)
            _read(digest, file)


def _code_named_in(path: Path) -> list[Path]:
    """Returns the Python files that this one leads to: those whose absolute paths stand in its texts, and those that it imports from beside it, which
    may lead to others."""
    found, waiting = {path}, [path]
    while waiting and len(found) < MOST_FILES:
        others = sorted(_led_to_by(waiting.pop(0), path.parent) - found)
        found.update(others)
        waiting += others
    return sorted(found - {path})


def _led_to_by(path: Path, root: Path) -> set[Path]:
    """`root`: the directory in which a process looks for modules of the user's."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of the user's code, which says them itself when it is run
            nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    named = {Path(text) for text in texts if text.startswith("/") and text.endswith(".py") and os.path.isfile(text)}
    for node in nodes if "site-packages" not in root.parts else ():
        match node:
            case ast.Import(names=names):
                named |= {file for one in names for file in _files_of(root, one.name.split("."))}
            case ast.ImportFrom(module=module, names=names, level=level):
                base = path.parents[level - 1] if 0 < level <= len(path.parents) else root
                parts = module.split(".") if module else []
                named |= {file for one in names for file in _files_of(base, [*parts, one.name])}
    return named


def _files_of(base: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yields the files that an import of a module runs, as far as they lie in a directory."""
    for end in range(1, len(parts) + 1):
        place = base.joinpath(*parts[:end])
        yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())


def _read(digest: xxhash.xxh3_128, path: Path) -> None:
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
