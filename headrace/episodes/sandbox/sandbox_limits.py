"""The limits of one call, as they travel to the processes that keep them, and the settings of this process."""

from __future__ import annotations

import json
import sys
from typing import NamedTuple


class SandboxLimits(NamedTuple):
    """The values of `SandboxConfig`, without pydantic: a process that runs code imports as little as it can."""

    cpu_seconds: int
    seconds: float
    memory: int
    """Bytes of address space beyond those of the interpreter."""
    disk: int
    """Bytes of all files."""
    files: int
    threads: int
    output: int
    """Bytes of standard output, and as many of standard error."""

    @property
    def report(self) -> int:
        """Bytes of JSON that a report may take: both outputs, of which each byte may be a control character (`\\u0001`), and a verdict."""
        return 12 * self.output + (1 << 20)


class SandboxSettings(NamedTuple):
    """The settings of a worker process, as they stand on its command line."""

    limits: SandboxLimits
    parallel: int = 1
    allow: tuple[str, ...] = ()
    """Kinds of isolation that may be missing."""

    def as_text(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_text(cls, text: str) -> SandboxSettings:
        limits, parallel, allow = json.loads(text)
        return cls(SandboxLimits(*limits), parallel, tuple(allow))


DEFAULT = SandboxSettings(
    SandboxLimits(cpu_seconds=2, seconds=3.0, memory=512 << 20, disk=16 << 20, files=64, threads=64, output=64 << 10)
)
"""The settings outside of a run: those of a `[sandbox]` that sets nothing."""


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
