"""The end of a process: awaited, brought about, and put into words."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from headrace.processes.process_end import ended_within, ending, signal_group


def started(code: str) -> subprocess.Popen[bytes]:
    """Starts a process that leads a group, and returns when it has run the code so far that it has printed."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def test_one_that_ends_is_awaited_and_one_that_does_not_is_killed() -> None:
    with started("print(1, flush=True); raise SystemExit(3)") as quick:
        assert ended_within(quick, 600.0) and ending(quick.poll()) == "ended with exit code 3"
    with started("import time; print(1, flush=True); time.sleep(1e6)") as slow:
        assert not ended_within(slow, 0.1) and ending(slow.poll()) == "was killed by SIGKILL"


def test_a_signal_reaches_the_group_of_a_leader_that_is_gone() -> None:
    code = """
import os, subprocess
child = subprocess.Popen(["sleep", "1000000"])
print(child.pid, flush=True)
input()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        child = os.pidfd_open(int(process.stdout.readline()))
        process.stdin.close()
        process.wait()
        signal_group(process.pid)
        assert _ends(child)
        os.close(child)
    signal_group(process.pid, signal.SIGTERM)  # nobody is there: no error


def _ends(pidfd: int) -> bool:
    watched = select.poll()
    watched.register(pidfd, select.POLLIN)
    return bool(watched.poll(600_000))
