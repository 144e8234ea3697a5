"""Cores, memory and GPUs that the processes of a run use on this machine. Read from `/proc` and with `nvidia-smi`, twice a minute and beside
the event loop; processes of other machines are not seen.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from headrace.facts.facts import GpuUse, ProcessesUsed, ProcessUse
from headrace.processes.health.family import Family, current_family
from headrace.processes.health.stacks import processor_seconds

FIRST, EVERY = 5.0, 30.0
"""Seconds before the first reading, and between two."""
GPU_SECONDS = 10.0
"""Seconds in which `nvidia-smi` has to answer."""
ASKED = ("nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits")


class Meter:
    """Reads what processes have used since the reading before."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._seconds: dict[int, float] = {}
        """Seconds of a core that each process had used at the last reading."""

    def read(self, processes: Mapping[int, str]) -> tuple[dict[str, ProcessUse], tuple[GpuUse, ...]]:
        """`processes`: names by process id. Processes of one kind (`scorer 1`, `scorer 2`) are added up; one that began since the last
        reading counts from its begin. One that is gone is left out."""
        now, before = self._clock(), self._seconds
        passed, self._since, self._seconds = max(now - self._since, 1e-3), now, {}
        found: dict[str, ProcessUse] = {}
        for pid, name in processes.items():
            seconds, memory = processor_seconds(pid), _resident(pid)
            if seconds is None or memory is None:
                continue
            self._seconds[pid] = seconds
            kind = name.split()[0]
            known = found.get(kind, ProcessUse())
            cores = max(0.0, seconds - before.get(pid, 0.0)) / passed
            found[kind] = ProcessUse(known.processes + 1, round(known.cores + cores, 3), known.memory + memory)
        return found, tuple(_gpus())


def _resident(pid: int) -> int | None:
    """Returns the bytes that a process has in memory, pages that it shares with others included; None if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError, ValueError):
        return None


def _gpus() -> Iterator[GpuUse]:
    """Yields the GPUs of this machine, whoever uses them; none where `nvidia-smi` is missing or does not answer."""
    if not shutil.which(ASKED[0]):
        return
    try:
        told = subprocess.run(ASKED, capture_output=True, text=True, timeout=GPU_SECONDS, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return
    for line in told.splitlines():
        index, busy, used, *_ = [*(part.strip() for part in line.split(",")), "", "", ""]
        if index.isdecimal() and used.isdecimal():
            yield GpuUse(int(index), int(busy) / 100 if busy.isdecimal() else -1.0, int(used) << 20)


async def watch_use(record: Callable[[ProcessesUsed], None], clock: Callable[[], float], pause: float = EVERY) -> None:
    """Records readings until it is cancelled.

    Consumes: nothing. Waits for: time, and a thread that reads. Unblocked by: both pass by themselves."""
    family, meter, begun = current_family(), Meter(), False
    while True:
        reading = None
        with suppress(OSError, RuntimeError):  # no thread can be started, say: that ends no run
            reading = await asyncio.to_thread(meter.read, _processes(family))
        if reading is not None and begun and any(reading):  # what they used before the first reading is of no interval
            record(ProcessesUsed(clock(), *reading))
        await asyncio.sleep(pause if begun else min(FIRST, pause))
        begun = True


def _processes(family: Family) -> dict[int, str]:
    return {os.getpid(): "controller", **{child.pid: child.who for child in family.children()}}
