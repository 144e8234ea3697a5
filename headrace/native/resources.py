"""The cores and the memory that this process may use, and its number on its machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

# --- The cores that this process may use
# More threads than these would only wait for each other.


def usable_cores() -> int:
    """The number of cores that this process may use, within a container's limit."""
    present = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        return max(1, min(present, int(quota) // int(period)))
    return present


def available_cores() -> set[int]:
    """The numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def core_problems(engine: Sequence[int], train: Sequence[int]) -> list[str]:
    """Returns a sentence for cores that both parts claim, and for those that are not there."""
    problems = []
    shared = sorted({*engine} & {*train})
    if shared:
        problems.append(
            f"engine.cores and train.cores both claim {shared}, where each would slow the other down; give each cores of "
            "its own, or leave both empty to share all of them"
        )
    present = available_cores()
    for name, cores in (("engine", {*engine}), ("train", {*train})):
        if cores - present:
            problems.append(
                f"{name}.cores names {sorted(cores - present)}, which this process may not use; it may use {sorted(present)}"
            )
    return problems


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


# --- The memory of this machine
# The memory of this machine, and what of it is free, within the limits of a container.


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


# --- The number of this process among those that one starter has started on a machine


LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
"""Environment variables in which torchrun, Open MPI, MPICH's and Intel's mpirun, and srun give it. Slurm's comes last: within a job of Slurm the
processes of the others inherit it, all the same one."""


def local_rank(environ: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Returns the variable and the number; None if nobody has numbered this process.

    >>> local_rank({"SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "3"})
    ('OMPI_COMM_WORLD_LOCAL_RANK', 3)
    """
    return next(((name, int(environ[name])) for name in LOCAL_RANKS if environ.get(name, "").isdecimal()), None)
