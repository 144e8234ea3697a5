"""Ensures that no worker process outlives its controller, even a stopped one.

A worker reads from its controller in its own thread, and ends when that connection ends. A stopped worker (SIGSTOP, a debugger) reads
nothing. So it also asks Linux for a signal when its parent ends, which is delivered to stopped processes too.

For Linux the parent is the *thread* that started the process. Workers are started by the thread whose event loop talks to them, which in
a notebook need not be the main one. When that thread ends, nothing can talk to them any more although its process lives, so the signal
is right in that case too. On other systems there is only the end of the connection.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT = "HEADRACE_PARENT"
"""The environment variable that tells a worker the controller's process id."""

_PR_SET_PDEATHSIG = 1


def of_this_process() -> dict[str, str]:
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
