"""A child process that another process forked for us (`clone.py`): the part of `subprocess.Popen` that the controller uses."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading


class ForkedProcess:
    """Its methods may be called from any thread."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """The exit code, or minus the number of the signal that ended it; None while the process runs."""
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # the user's code waited for any child and got ours; `subprocess` says 0 too
                    self.returncode = 0
                else:
                    self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code. Raises subprocess.TimeoutExpired. Blocks."""
        if (code := self.poll()) is not None:
            return code
        try:
            watched = os.pidfd_open(self.pid)
        except ProcessLookupError:  # another thread has just waited for it
            return self.poll() or 0
        try:
            ending = select.poll()
            ending.register(watched, select.POLLIN)
            if not ending.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
        finally:
            os.close(watched)
        code = self.poll()
        assert code is not None, "a pidfd is ready when the process can be waited for"
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
