"""`path/to/file.py:name` -> the function, or a sentence why not. Imports no torch."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.errors import ConfigError


def load_function(spec: str, setting: str, arguments: int) -> Callable[..., Any]:
    """Runs the file. Raises ConfigError, naming `algo.<setting>`, where it has no such function of so many arguments."""
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser().resolve()
    module = _run(path, f"algo.{setting} = {spec}")
    if not hasattr(module, name):
        names = [known for known in vars(module) if not known.startswith("_")]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; it defines {', '.join(names) or 'nothing'}"
        raise ConfigError(f"algo.{setting} = {spec}: {path.name} defines no {name}{hint}")
    function = getattr(module, name)
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError as error:
        raise ConfigError(
            f"algo.{setting} = {spec}: {name} cannot be called with {arguments} argument{'s' * (arguments > 1)}: {error}"
        ) from None
    return function


def _run(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{what}: there is no file {path}")
    found = importlib.util.spec_from_file_location(f"headrace_algo_{path.stem}", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses and pickle look their module up
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what}: running the file failed: {type(error).__name__}: {error}") from None
    return module
