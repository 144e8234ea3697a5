"""Processes that tests wait for, by their ids."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

LOOKS, PAUSE = 30_000, 0.01
"""Looks are counted, not seconds: the clock of a virtual machine that stood still jumps."""


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on: state, parent, group, session. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def alive(pid: int) -> bool:
    """Whether it runs, also stopped. Orphans of a container without an init stay as zombies for ever: they have ended."""
    try:
        return stat(pid)[0] not in "ZX"
    except OSError:
        return False


def gone(pid: int) -> bool:
    """Waits for the end of a process that is not ours. Returns True, or raises AssertionError with what it is doing instead."""
    for _ in range(LOOKS):
        if not alive(pid):
            return True
        time.sleep(PAUSE)
    raise AssertionError(f"process {pid} is still there:\n" + "\n".join(_seen(pid, "cmdline", "wchan", "status")))


def _seen(pid: int, *names: str) -> list[str]:
    found = []
    for name in names:
        try:
            found.append(Path(f"/proc/{pid}/{name}").read_text().replace("\0", " "))
        except OSError as error:
            found.append(str(error))
    return found


def descendants(pid: int) -> list[int]:
    below = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False).stdout
    return [one for child in below.split() for one in (int(child), *descendants(int(child)))]
