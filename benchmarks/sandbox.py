"""The CPU time of one call of the sandbox, beside that of a new interpreter without any isolation.

    python benchmarks/sandbox.py [--calls 100] [--rounds 5]

Rounds of the alternatives alternate, and the table has the medians. CPU time is that of the process that makes calls, its children
included (/proc/PID/stat), and of the caller; for an interpreter, that of the child.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from headrace.episodes.sandbox.sandbox import Sandbox
from headrace.episodes.sandbox.sandbox_limits import DEFAULT

PROGRAM = "import collections, itertools, math, random, re\nprint(sum(range(10)))"
CODE, TEST = "def add(a, b):\n    return a + b", "assert add(1, 2) == 3"
TICK = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    memory, disk = Sandbox(DEFAULT.limits), Sandbox(DEFAULT.limits, in_memory=False)
    ways: dict[str, Callable[[], float]] = {
        "a program": lambda: sandboxed("memory", given.calls, lambda: memory.run(PROGRAM)),
        "a program, files on the disk": lambda: sandboxed("disk", given.calls, lambda: disk.run(PROGRAM)),
        "a test": lambda: sandboxed("memory", given.calls, lambda: memory.test(CODE, TEST)),
        "a new interpreter, not isolated": lambda: interpreted(given.calls),
    }
    measured: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.rounds):
        for name, measure in ways.items():
            measured[name].append(measure())
    for name, values in measured.items():
        print(f"{name:34} {statistics.median(values):6.1f} ms of CPU time")
    for sandbox in (memory, disk):
        sandbox.close()


def sandboxed(place: str, calls: int, call: Callable[[], object]) -> float:
    """Returns milliseconds of CPU time a call."""
    call()
    makers = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and mine(int(pid), place)]
    before, own = sum(map(used, makers)), time.process_time()
    for _ in range(calls):
        call()
    return 1000 * (sum(map(used, makers)) - before + time.process_time() - own) / calls


def mine(pid: int, place: str) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return False
    return int(fields[1]) == os.getpid() and place.encode() in words


def used(pid: int) -> float:
    """Seconds of the process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICK


def interpreted(calls: int) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(calls):
        subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / calls


if __name__ == "__main__":
    main()
