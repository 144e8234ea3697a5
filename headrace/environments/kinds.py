"""The kinds of environments, a line each: the values of `environment.kind`, and the value behind each."""

from __future__ import annotations

import importlib

from headrace.playing import EnvironmentKind

ENVIRONMENTS = {
    "single_turn": "headrace.environments.single_turn:SINGLE_TURN",
}
"""Places of `playing.EnvironmentKind` values, by name: only a run that uses one imports its module, with the packages
that it needs."""

PROCESS = "process"
"""The kind that is a command of the user (`agents/`). It is made of the settings, so no module has its value."""


def environment_kind(name: str) -> EnvironmentKind:
    module, _, value = ENVIRONMENTS[name].partition(":")
    found: EnvironmentKind = getattr(importlib.import_module(module), value)
    return found
