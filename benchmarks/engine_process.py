"""The parent's end of engine.py: contenders are processes on the same cores, and one at a time runs. Linux only.

All others are stopped (SIGSTOP), so that no idle engine spins or swaps threads beside the one that is timed. Memory and
CPU time are read from /proc for the contender and all its descendants, in the same way for all.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_loads import Load

LIMIT = 1800.0
"""Seconds after which a start or a run is abandoned."""
TICKS = os.sysconf("SC_CLK_TCK")


class Failed(Exception):
    """A contender that cannot start, or a load that it cannot run."""


@dataclass(frozen=True)
class Measured:
    contender: str
    load: str
    round: int
    seconds: float
    tokens: int
    logprob: float | None
    notes: dict[str, str]
    peak_rss_gib: float
    """Largest resident memory during the load, summed over the contender's processes."""
    cpu_seconds: float
    """Processor time of the contender, all threads: useful if others disturbed the wall clock."""
    others: float
    """Share of the cores that other processes took meanwhile."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass
class Contender:
    name: str
    command: list[str]
    environment: dict[str, str]
    cores: set[int]
    log: Path
    start_seconds: float = 0.0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Loads the engine and stops it there. Raises Failed with the last line of its log."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self.environment},
                preexec_fn=lambda: os.sched_setaffinity(0, self.cores),
            )
        self.start_seconds = self._answer()["start_seconds"]
        self._signal(signal.SIGSTOP)

    def run(self, load: Load, round_number: int) -> Measured:
        assert self._process is not None and self._process.stdin is not None
        if self._process.poll() is not None:
            raise Failed(f"it has ended before (its log: {self.log})")
        self._signal(signal.SIGCONT)
        try:
            self._forget_peak()
            before = self._busy()
            self._process.stdin.write(load.to_json().encode() + b"\n")
            self._process.stdin.flush()
            said = self._answer()
            peak, after = self._peak(), self._busy()
        finally:
            self._signal(signal.SIGSTOP)
        if "error" in said:
            raise Failed(said["error"][:300])
        own, wall = after.own - before.own, after.at - before.at
        others = max(0.0, after.cores - before.cores - own) / (wall * len(self.cores))
        return Measured(self.name, load.name, round_number, peak_rss_gib=peak, cpu_seconds=own, others=others, **said)

    def close(self) -> None:
        """Ends the contender by closing its input, and by force if that is not enough."""
        if self._process is None:
            return
        self._signal(signal.SIGCONT)
        family = {pid: began(pid) for pid in tree(self._process.pid)}
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid, at in family.items():
            if at and began(pid) == at:  # an engine left it behind, and the number is still its own
                send(pid, signal.SIGKILL)
        self._process = None

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        watch = threading.Timer(LIMIT, self._signal, [signal.SIGKILL])
        asked = time.perf_counter()
        watch.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        if time.perf_counter() - asked > LIMIT:
            raise Failed(f"nothing came for {LIMIT:.0f} s; it was killed (its log: {self.log})")
        if not line:
            lines = self.log.read_text(errors="replace").strip().splitlines() or ["it wrote nothing"]
            raise Failed(f"the process ended; {lines[-1][:200]} (its log: {self.log})")
        return json.loads(line)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        for pid in tree(self._process.pid):
            send(pid, number)

    def _forget_peak(self) -> None:
        assert self._process is not None
        for pid in tree(self._process.pid):
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def _peak(self) -> float:
        assert self._process is not None
        return sum(high_water(pid) for pid in tree(self._process.pid))

    def _busy(self) -> Busy:
        assert self._process is not None
        return Busy(time.perf_counter(), cores_busy(self.cores), sum(map(cpu_seconds, tree(self._process.pid))))


@dataclass(frozen=True)
class Busy:
    at: float
    cores: float
    """Returns the seconds that the cores have worked, for any process, since the machine started."""
    own: float
    """Returns the seconds that the contender's processes have worked."""


# --- /proc -------------------------------------------------------------------------------------------------------------


def tree(root: int) -> list[int]:
    """Returns the process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, ahead = [], [root]
    while ahead:
        pid = ahead.pop()
        found.append(pid)
        ahead += children.get(pid, [])
    return found


def stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the state on; empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def began(pid: int) -> str:
    """Returns the time when the process was started; empty for one that is gone."""
    fields = stat(pid)
    return fields[19] if fields and fields[0] != "Z" else ""


def cpu_seconds(pid: int) -> float:
    fields = stat(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS if fields else 0.0


def cores_busy(cores: set[int]) -> float:
    names = {f"cpu{core}" for core in cores}
    rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    used = [[int(field) for field in row[1:9]] for row in rows if row[0] in names]
    return sum(sum(row) - row[3] - row[4] for row in used) / TICKS  # without idle and waiting for the disk


def high_water(pid: int) -> float:
    """GiB."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended by itself
        os.kill(pid, number)
