"""The end of a process: how it is brought about, awaited and put into words, however the process was started.

Processes are started in different ways for a reason each. A worker is a new interpreter (`launch/local.py`), or a fork of one that has loaded the libraries
(`launch/forking.py`). The user's code is asked over pipes, and is killed with all that it has started (`asked_process.py`). An agent is a command
of the user, of whose output only the end is kept (`agent_process.py`). A server is many processes, so that a guard is its parent
(`server_process.py`). Code in a sandbox is forked by a process that the user's environment never reached (`sandbox/zygote.py`). The witness
(`joining/dial.py`) is forked before the worker has threads, and the monitor (`health/monitor.py`) needs only the end of a pipe.

Three programs end others by themselves (`server_guard.py`, `agent_reaper.py`, the player of tasksets): they run in interpreters that have no headrace,
or must start in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Protocol

from headrace.processes.health import patience

KILLED = 5.0
"""Seconds in which a process that was killed should be gone."""


class ChildOfOurs(patience.Waitable, Protocol):
    """A child process: `subprocess.Popen`, or one that was forked (`launch/local.py`)."""

    def kill(self) -> None: ...


def ending(code: int | None) -> str:
    """Formats an exit code as `subprocess` gives it.

    >>> ending(-9), ending(1)
    ('was killed by SIGKILL', 'ended with exit code 1')
    """
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def ended_within(process: ChildOfOurs, seconds: float) -> bool:
    """Waits for the end of a process. One that has not ended after `seconds` in which it could run is killed; False then. It is gone on return,
    unless it hangs in the kernel. Blocks."""
    try:
        patience.wait(process, seconds)
    except subprocess.TimeoutExpired:
        process.kill()
    else:
        return True
    with contextlib.suppress(subprocess.TimeoutExpired):
        patience.wait(process, KILLED)
    return False


def signal_group(leader: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Sends a signal to a process that leads a group, and to all in it; to whoever is left if the leader is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signum)


# --- How often a process may die before it is given up: an engine, a server, a trainer.


FORGIVEN = 3600.0
"""Seconds of work after which earlier deaths no longer count: in a run of weeks on hundreds of machines every process dies now and then."""


class Deaths:
    """The deaths of one process after the other. Those before an hour of work are forgiven."""

    def __init__(self, most: int) -> None:
        """`most`: deaths that are borne."""
        self.most = most
        self.total = 0
        self._forgiven: set[int] = set()

    def after(self, worked: float) -> Callable[[], None]:
        """Notes that a process has ended that had worked for so many seconds. Returns a function that forgives its death, if it is one."""
        if worked > FORGIVEN:
            self._forgiven.update(range(1, self.total + 1))
        return partial(self._forgiven.add, self.total + 1)

    def add(self) -> None:
        """Counts the death."""
        self.total += 1

    @property
    def counted(self) -> int:
        """Deaths that are not forgiven."""
        return self.total - len(self._forgiven)

    @property
    def too_many(self) -> bool:
        return self.counted > self.most

    def said(self, setting: str) -> str:
        """The sentence about a death that was one too many: `it was its death no. 4 (engine.max_deaths allows 3)`."""
        return f"it was its death no. {self.counted} ({setting} allows {self.most})"
