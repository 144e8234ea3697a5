"""Runs a server and ends it, with all processes that it started: `python -I server_guard.py COMMAND ...`. Imports only the standard library.

A server such as vLLM is several processes, and outlives a parent that is killed. So a run does not start it itself: it starts this
guard, in a session of its own, and holds the other end of its standard input. When that is closed, because the run has ended or was
killed, the guard asks the server to end, and after `GRACE` seconds kills the whole session. When the server's main process dies, the
guard kills what that left behind, and ends with its exit code. A guard that is killed itself takes the server's main process along; the
rest is then killed by the run (`server_process.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

GRACE = 10.0
"""Seconds in which a server should end after SIGTERM."""
KILLED = 128
"""Exit codes above this are signals, as in a shell."""

_PR_SET_PDEATHSIG = 1


def end_session(leader: int) -> None:
    """Kills every process of the session but its leader. Where there is no /proc, the leader's process group, leader included."""
    if not os.path.isdir("/proc/self"):
        with contextlib.suppress(OSError):
            os.killpg(leader, signal.SIGKILL)
        return
    killed = -1
    while killed:  # until a look finds nobody: they may have started others meanwhile
        killed = 0
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):
                if pid != leader and os.getsid(pid) == leader and not _dead(pid):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1


def _dead(pid: int) -> bool:
    """Whether the process is gone, but for its parent to notice."""
    status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return status.rpartition(")")[2].split()[0] in ("Z", "X")


def _on_parents_death(signum: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def _end_with_the_run(server: subprocess.Popen[Any]) -> None:
    while os.read(0, 4096):
        pass
    server.terminate()
    threading.Timer(GRACE, end_session, [os.getpid()]).start()


def main(command: list[str]) -> int:
    _on_parents_death(signal.SIGCONT)  # a guard that is stopped would not notice the end of its input
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=lambda: _on_parents_death(signal.SIGKILL))
    signal.signal(signal.SIGTERM, lambda *_: end_session(os.getpid()))  # at once
    threading.Thread(target=_end_with_the_run, args=[server], daemon=True).start()
    code = server.wait()
    end_session(os.getpid())
    return code if code >= 0 else KILLED - code


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # at once: a timer may be waiting
