"""Measures how much of this machine's cores other processes leave free at this moment, which is what a new run gets."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SAMPLES, EVERY = 10, 0.05
"""Samples of the scheduler's queue, and seconds between them."""


class Share(NamedTuple):
    cores: float
    """Cores that a run with one thread per core gets."""
    of_each: float
    """Share of a core that one thread gets, 0 to 1."""

    @property
    def words(self) -> str:
        return "" if self.of_each > 0.95 else f"; other processes leave about {self.cores:.2g} cores free"


def share_of(cores: int, busy: float, stolen: float) -> Share:
    """Computes the share. `busy`: runnable threads of other processes; `stolen`: share of the time that the host gives to other virtual
    machines.

    The scheduler is fair: of N + B threads on N cores each gets N / (N + B)."""
    fair = cores / (cores + busy) if busy > 0 else 1.0
    of_each = max(0.05, fair * (1 - stolen))
    return Share(cores * of_each, of_each)


def measure_share(cores: int, sleep: Callable[[float], None] = time.sleep) -> Share:
    """Measures over half a second. A machine without `/proc/stat` is assumed to be idle."""
    running, before = [], _stolen()
    for _ in range(SAMPLES):
        sleep(EVERY)
        running.append(_runnable())
    total, stolen = (after - earlier for after, earlier in zip(_stolen(), before, strict=True))
    return share_of(cores, sum(running) / len(running), stolen / total if total > 0 else 0.0)


def _runnable() -> float:
    """Returns the number of runnable threads, without the calling one and those of our own children, which are being started."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return 0.0
    running = next((float(line.split()[1]) for line in lines if line.startswith("procs_running")), 1.0)
    return max(0.0, running - 1 - sum(map(_running_threads, _descendants(os.getpid()))))


def _descendants(pid: int) -> list[int]:
    """Returns the processes that this one has started, and theirs."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # gone meanwhile
            found += [child for text in listed.read_text().split() for child in (int(text), *_descendants(int(text)))]
    return found


def _running_threads(pid: int) -> int:
    count = 0
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            count += stat.read_text().rpartition(")")[2].split()[0] == "R"
    return count


def _stolen() -> tuple[float, float]:
    """Returns ticks of all cores since boot: the total, and those that the host gave to other virtual machines."""
    try:
        ticks = [float(one) for one in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, IndexError, ValueError):
        return 0.0, 0.0
    return sum(ticks), ticks[7] if len(ticks) > 7 else 0.0
