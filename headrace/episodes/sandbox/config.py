"""Settings of the sandbox."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from headrace.episodes.sandbox.sandbox_limits import SandboxLimits, SandboxSettings
from headrace.settings.strict import STRICT

Isolation = Literal["network", "filesystem", "processes", "threads", "memory", "cpu", "disk"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SandboxConfig:
    """Code that the model writes: the rewards `unit_tests` and `unit_tests_all`, and the tool `headrace.run_python`
    (docs/sandbox.md). Limits are those of one call."""

    allow: tuple[Isolation, ...] = ()
    """Kinds of isolation that may be missing here; a run without one is otherwise refused. `headrace doctor` shows what
    there is."""
    cpu_seconds: int = Field(default=2, gt=0)
    """Seconds of CPU time."""
    seconds: float = Field(default=3.0, gt=0)
    """Seconds, not counting time spent waiting for a core."""
    memory_mib: int = Field(default=512, gt=0)
    """MiB of memory beyond those of the interpreter."""
    disk_mib: int = Field(default=16, gt=0)
    """MiB of all files in the private directory."""
    files: int = Field(default=64, gt=0)
    """Files and directories in the private directory."""
    threads: int = Field(default=64, gt=0)
    """Threads at once."""
    output_kib: int = Field(default=64, gt=0)
    """KiB of standard output, and as many of standard error."""
    parallel: int = Field(default=1, gt=0)
    """Calls at once in each worker process of rewards (reward.workers) and environments (environment.workers)."""

    @property
    def settings(self) -> SandboxSettings:
        limits = SandboxLimits(
            cpu_seconds=self.cpu_seconds,
            seconds=self.seconds,
            memory=self.memory_mib << 20,
            disk=self.disk_mib << 20,
            files=self.files,
            threads=self.threads,
            output=self.output_kib << 10,
        )
        return SandboxSettings(limits, self.parallel, self.allow)
