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
GONE_SECONDS = 1.0
"""Seconds in which it has to be gone when it is killed. One that waits in the kernel is left to itself."""
ASKED = ("nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits")


class Meter:
    """Reads what processes have used since the reading before."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._seconds: dict[int, float] = {}
        """Seconds of a core that each process had used at the last reading."""
        self._asked: subprocess.Popen[str] | None = None
        self._ended = False

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
        return found, tuple(self._gpus())

    def end(self) -> None:
        """Ends a reading that is under way in another thread: `nvidia-smi` may hang where a driver does, and nobody needs its answer any more."""
        self._ended = True
        if (asked := self._asked) is not None:
            asked.kill()

    def _gpus(self) -> Iterator[GpuUse]:
        """Yields the GPUs of this machine, whoever uses them; none where `nvidia-smi` is missing or does not answer."""
        if not shutil.which(ASKED[0]):
            return
        with suppress(OSError, subprocess.SubprocessError):
            for line in self._told().splitlines():
                index, busy, used, *_ = [*(part.strip() for part in line.split(",")), "", "", ""]
                if index.isdecimal() and used.isdecimal():
                    yield GpuUse(int(index), int(busy) / 100 if busy.isdecimal() else -1.0, int(used) << 20)

    def _told(self) -> str:
        self._asked = asked = subprocess.Popen(ASKED, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            if self._ended:  # while it was started
                asked.kill()
            return asked.communicate(timeout=GPU_SECONDS)[0]
        except subprocess.TimeoutExpired:
            asked.kill()
            asked.wait(GONE_SECONDS)
            raise
        finally:
            self._asked = None


def _resident(pid: int) -> int | None:
    """Returns the bytes that a process has in memory, pages that it shares with others included; None if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError, ValueError):
        return None


async def watch_use(record: Callable[[ProcessesUsed], None], clock: Callable[[], float], pause: float = EVERY) -> None:
    """Records readings until it is cancelled.

    Consumes: nothing. Waits for: time, and a thread that reads. Unblocked by: both pass by themselves."""
    family, meter, begun = current_family(), Meter(), False
    try:
        while True:
            reading = None
            with suppress(OSError, RuntimeError):  # no thread can be started, say: that ends no run
                reading = await asyncio.to_thread(meter.read, _processes(family))
            if (
                reading is not None and begun and any(reading)
            ):  # what they used before the first reading is of no interval
                record(ProcessesUsed(clock(), *reading))
            await asyncio.sleep(pause if begun else min(FIRST, pause))
            begun = True
    finally:
        meter.end()


def _processes(family: Family) -> dict[int, str]:
    return {os.getpid(): "controller", **{child.pid: child.who for child in family.children()}}
