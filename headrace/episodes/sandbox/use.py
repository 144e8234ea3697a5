"""The settings of this process, and whether its functions use the sandbox."""

from __future__ import annotations

import sys

from headrace.episodes.sandbox.sandbox_limits import DEFAULT, SandboxSettings

_settings = DEFAULT


def use_settings(settings: SandboxSettings) -> None:
    """Called once by each process of a run, before it loads the user's functions."""
    global _settings
    _settings = settings


def settings_of_this_process() -> SandboxSettings:
    return _settings


def check_if_imported(who: str) -> None:
    """Raises ConfigError if functions that were loaded have imported the sandbox and this machine lacks isolation. `who`: the functions."""
    if tool := sys.modules.get("headrace.episodes.sandbox.tool"):
        tool.sandbox_of_this_process(who)
