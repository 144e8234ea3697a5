"""Loads a user's own advantage or loss: `file.py:name`. Imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from headrace.core.errors import ConfigError
from headrace.settings import user_code


def load_function(spec: str, setting: str) -> Callable[[Any], Any]:
    """Runs the file and returns the function. Raises ConfigError, naming `algo.<setting>`, if it has no such function
    of one argument."""
    what = f"algo.{setting} = {spec}"
    function = user_code.load_function(spec, what)
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(f"{what}: {spec.rpartition(':')[2]} cannot be called with one argument: {error}") from None
    return function
