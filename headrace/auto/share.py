"""What other processes leave of this machine's cores at this moment: a run that starts gets that much of them, and no more."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

LOOKS, EVERY = 10, 0.05
"""Looks at the scheduler's queue, and seconds between them."""


class Share(NamedTuple):
    cores: float
    """That a run with a thread for each core gets."""
    of_each: float
    """Share of a core that one thread gets, 0 to 1."""

    @property
    def words(self) -> str:
        return "" if self.of_each > 0.95 else f"; others use the machine, which leaves about {self.cores:.2g} cores"


def share_of(cores: int, busy: float, stolen: float) -> Share:
    """`busy`: threads of others that want a core; `stolen`: share of the time in which the host runs somebody else's machine.

    The scheduler is fair: of N + B threads on N cores each gets N / (N + B)."""
    fair = cores / (cores + busy) if busy > 0 else 1.0
    of_each = max(0.05, fair * (1 - stolen))
    return Share(cores * of_each, of_each)


def look(cores: int, sleep: Callable[[float], None] = time.sleep) -> Share:
    """Over half a second. A machine that does not say is taken to be free."""
    running, before = [], _stolen()
    for _ in range(LOOKS):
        sleep(EVERY)
        running.append(_runnable())
    total, stolen = (after - earlier for after, earlier in zip(_stolen(), before, strict=True))
    return share_of(cores, sum(running) / len(running), stolen / total if total > 0 else 0.0)


def _runnable() -> float:
    """Threads that run or could, without the one that asks."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return 0.0
    return max(0.0, next((float(line.split()[1]) for line in lines if line.startswith("procs_running")), 1.0) - 1)


def _stolen() -> tuple[float, float]:
    """Ticks of all cores since the start: all, and those that the host gave to others."""
    try:
        ticks = [float(one) for one in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, IndexError, ValueError):
        return 0.0, 0.0
    return sum(ticks), ticks[7] if len(ticks) > 7 else 0.0
