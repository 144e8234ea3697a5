"""The kinds of environments, a line each: the values of `environment.kind`, and the code behind each."""

from __future__ import annotations

import importlib

from headrace.core.playing import EnvironmentKind

ENVIRONMENTS = {
    "single_turn": "headrace.episodes.environments.single_turn:SINGLE_TURN",
}
"""Places of `playing.EnvironmentKind` values, by name: only a run that uses one imports its module, with the packages
that it needs."""

LIBRARIES = {
    "reasoning_gym": "headrace.episodes.environments.libraries.attempts:open_reasoning_gym",
    "gym": "headrace.episodes.environments.libraries.gym:open_gym",
    "openenv": "headrace.episodes.environments.libraries.openenv:open_openenv",
    "textarena": "headrace.episodes.environments.libraries.games:open_textarena",
}
"""Places of functions that open environments of other libraries, by name. They are called in the processes of environments only
(`workers/loading.py`), because what they import may crash or hang."""

PROCESS = "process"
"""The kind that is a command of the user (`agents/`). It is made of the settings, so no module has its value."""

GATEWAY = "gateway"
"""The kind whose rollouts agents elsewhere take (`agents/handing_out.py`)."""
ADDRESS_FILE = "gateway.url"
"""The file among a run's logs that has the address where they do. Only the user who started the run can read it."""

ATROPOS = "atropos"
"""The kind whose rollouts environments of Atropos play (`atropos/`)."""

VERIFIERS = "verifiers"
"""The kind whose rollouts tasksets of verifiers play, in an interpreter of their own (`verifiers/`)."""


def environment_kind(name: str) -> EnvironmentKind:
    module, _, value = ENVIRONMENTS[name].partition(":")
    found: EnvironmentKind = getattr(importlib.import_module(module), value)
    return found
