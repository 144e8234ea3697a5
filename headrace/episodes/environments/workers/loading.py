"""Loads what plays the rollouts of a process: a function of the user, or an environment of a library. Runs in the processes of
environments."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from headrace.core.errors import ConfigError
from headrace.core.types import Struct
from headrace.episodes.environments.workers.player import signature_problem
from headrace.settings.user_code import load_function


class LibrarySettings(Struct, frozen=True):
    """The settings that the environments of a library are opened with."""

    name: str
    """`environment.name`; empty if it is not set."""
    options: dict[str, Any]
    """`environment.options`."""
    max_turns: int
    """The most turns of a rollout."""


def load_player(spec: str, library: Mapping[str, Any] | None) -> Callable[..., Any]:
    """Returns a function that is called as `play(agent, prompt=..., **columns)` for each rollout. `library`: the fields of
    `LibrarySettings`; None for a function of the user. Raises ConfigError if it cannot be loaded."""
    if library is None:
        function = load_function(spec, "environment.function")
        if problem := signature_problem(function):
            raise ConfigError(f"environment.function: {spec.rpartition(':')[2]} {problem}")
        return function
    module, _, name = spec.partition(":")
    opened: Callable[..., Any] = getattr(importlib.import_module(module), name)(
        msgspec.convert(library, LibrarySettings)
    )
    return opened
