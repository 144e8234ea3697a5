"""No worker process outlives its controller, whatever state it is in.

A worker reads from its controller in a thread of its own, and leaves when that connection ends. One that is stopped (SIGSTOP, a
debugger) reads nothing; so it also asks Linux for a signal when its parent ends, which comes to it stopped or not.

The parent that Linux means is the *thread* that started the process. Workers are started by the thread whose event loop talks to
them, in a notebook perhaps not the main one. When that thread ends nobody can talk to them any more, though its process lives
on: so the signal is right then, too. Elsewhere than on Linux the connection's end is all there is.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT = "HEADRACE_PARENT"
"""Names the controller's process in the environment of a worker."""

_PR_SET_PDEATHSIG = 1


def of_this_process() -> dict[str, str]:
    """For the environment of a worker that this process starts."""
    return {PARENT: str(os.getpid())}


def signal_me_when_orphaned(signum: signal.Signals) -> None:
    """Called by a worker at its start. One that is an orphan already leaves: no signal would come to it any more."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != int(os.environ.get(PARENT, os.getppid())):
        os._exit(0)
