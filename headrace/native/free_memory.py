"""The memory of this machine, and what of it is free, within the limits of a container."""

from __future__ import annotations

import os
from pathlib import Path

GIB = 2**30


def memory() -> int:
    """Returns bytes, within a container's limit."""
    present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read("/sys/fs/cgroup/memory.max")
    return min(present, int(limit)) if limit.isdigit() else present


def available() -> int:
    """Returns bytes that are free now. Caches of files count as free: the system gives them up when a process needs the room."""
    found = [line.split() for line in _read("/proc/meminfo").splitlines() if line.startswith("MemAvailable:")]
    free = int(found[0][1]) * 1024 if found else memory()
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and used.isdigit():
        caches = [line.split() for line in _read("/sys/fs/cgroup/memory.stat").splitlines()]
        files = sum(int(value) for name, value in caches if name in ("inactive_file", "active_file"))
        free = min(free, int(limit) - int(used) + files)
    return free


def gib(count: float) -> str:
    """Formats bytes: `0.02 GiB`, `1.5 GiB`, `500 GiB`."""
    size = count / GIB
    return f"{size:.0f} GiB" if size >= 100 else f"{size:.1f} GiB" if size >= 0.1 else f"{size:.2f} GiB"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
