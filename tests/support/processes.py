"""The processes of servers that runs of this process have started."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.engine.servers import server_guard


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def servers(of: int = 0) -> dict[int, list[int]]:
    """The processes of each server that this process, or the one named, has started; the server's main one first."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                leader = os.getsid(int(entry.name))
                words = Path(f"/proc/{leader}/cmdline").read_bytes()
                parent = int(Path(f"/proc/{leader}/stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):  # gone meanwhile
                continue
            if server_guard.__file__.encode() in words and parent == (of or os.getpid()) and int(entry.name) != leader:
                found.setdefault(leader, []).append(int(entry.name))
    return {leader: sorted(members) for leader, members in found.items()}
