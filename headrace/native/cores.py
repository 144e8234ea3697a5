"""The cores that this process may use. More threads than these would only wait for each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


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
