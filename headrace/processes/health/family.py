"""The worker processes of one run, which are asked for their stacks, end with the run, and do not outlive its controller."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Child:
    """One worker process."""

    who: str
    pid: int
    stacks: Path | None
    """The file that it writes its stacks to; None if it was started without one."""


class Family:
    """The worker processes of one run. May be read from any thread."""

    def __init__(self) -> None:
        self._children: dict[int, Child] = {}

    def started(self, child: Child) -> None:
        self._children[child.pid] = child

    def ended(self, pid: int) -> None:
        self._children.pop(pid, None)

    def children(self) -> list[Child]:
        return list(self._children.values())


_current: ContextVar[Family | None] = ContextVar("headrace_family", default=None)


@contextmanager
def family(mine: Family) -> Iterator[None]:
    """Registers processes that are started inside this context with `mine`, also by tasks and threads that begin there."""
    token = _current.set(mine)
    try:
        yield
    finally:
        _current.reset(token)


def current_family() -> Family:
    """Returns the family of the current context; outside of a run, an unused one. Code that starts a process calls this once, and
    reports the start and the end of the process to the same family."""
    return _current.get() or Family()


# --- No worker process outlives its controller, not even a stopped one
#
# A worker reads from its controller in its own thread, and ends when that connection ends. A stopped worker (SIGSTOP, a debugger) reads
# nothing. So it also asks Linux for a signal when its parent ends, which is delivered to stopped processes too.
#
# For Linux the parent is the *thread* that started the process. Workers are started by the thread whose event loop talks to them, which in
# a notebook need not be the main one. When that thread ends, nothing can talk to them any more although its process lives, so the signal
# is right in that case too. On other systems there is only the end of the connection.

PARENT = "HEADRACE_PARENT"
"""The environment variable that tells a worker the controller's process id."""

_PR_SET_PDEATHSIG = 1


def parent_variables() -> dict[str, str]:
    """Variables for the environment of a worker that this process starts."""
    return {PARENT: str(os.getpid())}


def signal_me_when_orphaned(signum: signal.Signals) -> None:
    """Called by a worker at its start. Ends a process that is an orphan already, since the signal would never come."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != int(os.environ.get(PARENT, os.getppid())):
        os._exit(0)


def leave_sigterm_to_controller() -> None:
    """Called by a worker at its start. Slurm and systemd send SIGTERM to every process of a job: a worker that ended of it would take the run's
    last checkpoint with it. The controller ends its workers by closing their connections.

    What the user's code starts ends of SIGTERM as usual: a handler, unlike SIG_IGN, is not inherited by programs, and forks get the default."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.siginterrupt(signal.SIGTERM, False)  # system calls in native code must not fail because of the signal
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
