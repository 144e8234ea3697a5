"""`path/to/file.py:name` -> the function, or a sentence why not. Runs in worker processes only."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.errors import ConfigError
from headrace.scoring.builtin import load_reasoning_gym
from headrace.scoring.job import one_line, signature_problem

BUILTIN: dict[str, Callable[[], Callable[..., Any]]] = {"reasoning_gym": load_reasoning_gym}


def load_functions(specs: list[str]) -> list[Callable[..., Any]]:
    """Raises ConfigError. A file that several specs name is run once."""
    modules: dict[Path, ModuleType] = {}
    return [BUILTIN[spec]() if spec in BUILTIN else _from_file(spec, modules) for spec in specs]


def _from_file(spec: str, modules: dict[Path, ModuleType]) -> Callable[..., Any]:
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser().resolve()
    if path not in modules:
        modules[path] = _run(path, spec)
    names = [known for known in vars(modules[path]) if not known.startswith("_")]
    if not hasattr(modules[path], name):
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; it defines {', '.join(names) or 'nothing'}"
        raise ConfigError(f"reward function {spec}: {path.name} defines no {name}{hint}")
    function = getattr(modules[path], name)
    if problem := signature_problem(function):
        raise ConfigError(f"reward function {spec}: {name} {problem}")
    return function


def _run(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"reward function {spec}: there is no file {path}")
    found = importlib.util.spec_from_file_location(f"headrace_reward_{path.stem}", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses and pickle look their module up
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # at the end: a neighbour called random.py must not replace Python's
    try:
        found.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigError(f"reward function {spec}: {error.msg} ({error.filename}:{error.lineno})") from None
    except (Exception, SystemExit) as error:
        raise ConfigError(f"reward function {spec}: running the file failed: {one_line(error)}") from None
    return module
