"""Loads reward functions by `path/to/file.py:name`. Runs in worker processes only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.core.errors import ConfigError
from headrace.episodes.scoring.builtin import load_reasoning_gym, load_unit_tests
from headrace.episodes.scoring.job import signature_problem
from headrace.settings.user_code import load_function

BUILTIN: dict[str, Callable[[], Callable[..., Any]]] = {
    "reasoning_gym": load_reasoning_gym,
    "unit_tests": partial(load_unit_tests, whole=False),
    "unit_tests_all": partial(load_unit_tests, whole=True),
}


def load_functions(specs: list[str]) -> list[Callable[..., Any]]:
    """Loads the functions. A file that several specs name is run once. Raises ConfigError if one cannot be loaded."""
    modules: dict[Path, ModuleType] = {}
    return [BUILTIN[spec]() if spec in BUILTIN else _from_file(spec, modules) for spec in specs]


def _from_file(spec: str, modules: dict[Path, ModuleType]) -> Callable[..., Any]:
    function = load_function(spec, f"reward function {spec}", modules)
    if problem := signature_problem(function):
        raise ConfigError(f"reward function {spec}: {spec.rpartition(':')[2]} {problem}")
    return function
