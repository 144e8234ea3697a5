"""The kinds of environments, a line each: the values of `environment.kind`, and what is behind each."""

from __future__ import annotations

import importlib

from headrace.protocols import EnvironmentKind

ENVIRONMENTS = {
    "single_turn": "headrace.environments.single_turn:SINGLE_TURN",
}
"""A `protocols.EnvironmentKind`, by name: only a run that uses it imports its module, with whatever packages that needs."""


def environment_kind(name: str) -> EnvironmentKind:
    module, _, value = ENVIRONMENTS[name].partition(":")
    found: EnvironmentKind = getattr(importlib.import_module(module), value)
    return found
