"""The number of cores that this process may use. Further threads would only wait for each other."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> int:
    """The number of cores that this process may use, within a container's limit."""
    present = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        return max(1, min(present, int(quota) // int(period)))
    return present


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
