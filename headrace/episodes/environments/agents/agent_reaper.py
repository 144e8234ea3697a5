"""Ends the agents of a run that was killed: `python -I -S agent_reaper.py`. Imports only the standard library.

A run that is killed with SIGKILL ends nothing itself, and its agents, which are commands of the user, do not notice. So this process
holds the other end of a pipe of the run, is sent every agent's process group and directory (`+GROUP DIRECTORY`, and `-GROUP` at its end),
and kills and removes those that are left when the pipe ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    agents: dict[int, str] = {}
    for line in sys.stdin:
        group, _, directory = line[1:].rstrip("\n").partition(" ")
        if line.startswith("+"):
            agents[int(group)] = directory
        else:
            agents.pop(int(group), None)
    for leader in agents:
        with contextlib.suppress(OSError):
            os.killpg(leader, signal.SIGKILL)
    for directory in filter(None, agents.values()):
        with contextlib.suppress(RecursionError):  # what stays is removed with the next directory that is made
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
