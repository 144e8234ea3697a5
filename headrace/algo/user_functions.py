"""Loads a user's own advantage or loss: `file.py:name`. Imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from headrace.core.errors import ConfigError
from headrace.settings import user_code


def load_function(spec: str, setting: str, arguments: int = 1) -> Callable[..., Any]:
    """Runs the file and returns the function. Raises ConfigError, naming `algo.<setting>`, if it has no such function
    of so many arguments."""
    what = f"algo.{setting} = {spec}"
    function = user_code.load_function(spec, what)
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError as error:
        many = {1: "one argument", 2: "two arguments"}[arguments]
        raise ConfigError(f"{what}: {spec.rpartition(':')[2]} cannot be called with {many}: {error}") from None
    return function
