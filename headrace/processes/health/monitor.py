"""A small process beside the controller. It notices when not even the controller's watchdog thread gets the interpreter.

Native code that keeps the interpreter's lock (such as an endless regular expression in a reward function) stops every thread of its
process, so only another process can report it. The watchdog sends a beat at every turn. If beats are missing, this process reports
the controller's stacks, and after the second deadline it kills the controller. The workers end with it, and the run can be resumed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from headrace.core.printing import guard_streams, say
from headrace.processes.health.stacks import innermost, is_stopped, may_be_read_by, process_state, stacks_from_outside

SLICE = 0.5
"""Seconds of one turn. A turn that took longer means that this process was stopped too, and counts as two slices at most."""

SHORTEST = 1.0
"""Shortest deadline in seconds: with a shorter one, a busy machine looks like an interpreter that is blocked."""


class Monitor:
    """The controller's end of the monitor: a context in which the process watches."""

    def __init__(self, file: Path, warn_after: float, stop_after: float) -> None:
        self._file, self._warn_after, self._stop_after = file, warn_after, stop_after
        self._process: subprocess.Popen[bytes] | None = None
        self._beats = -1

    def __enter__(self) -> Monitor:
        theirs, self._beats = os.pipe()
        os.set_blocking(self._beats, False)
        deadlines = [str(max(seconds, SHORTEST)) for seconds in (self._warn_after, self._stop_after)]
        command = [sys.executable, "-m", __name__, str(theirs), str(os.getpid()), *deadlines, str(self._file)]
        try:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs], stdin=subprocess.DEVNULL, start_new_session=True
            )
            may_be_read_by(self._process.pid)
        except OSError as error:
            say(
                f"the process that watches the interpreter could not be started ({error}): a blocked interpreter will not be reported"
            )
        finally:
            os.close(theirs)
        return self

    def beat(self, runs: Sequence[Path]) -> None:
        """Sends a sign of life. `runs`: the directories whose `status.json` gets the verdict if the controller is killed."""
        with suppress(OSError):  # the monitor has ended or is stuck itself
            os.write(self._beats, json.dumps([str(run) for run in runs]).encode() + b"\n")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._beats)
        if self._process:
            self._process.kill()
            self._process.wait()


def watch(beats: int, pid: int, warn_after: float, stop_after: float, file: Path) -> None:
    """Watches until the controller ends or closes its end of the pipe."""
    silent, warned, last, runs = 0.0, False, time.monotonic(), b"[]\n"
    while True:
        ready, _, _ = select.select([beats], [], [], SLICE)
        now = time.monotonic()
        passed, last = min(now - last, 2 * SLICE), now
        if ready:
            if not (received := os.read(beats, 1 << 20)):
                return None
            runs, silent, warned = received, 0.0, False
        elif os.getppid() != pid:  # the controller has ended, and a process that it started keeps the pipe open
            return None
        elif not is_stopped(pid):
            silent += passed
        if silent >= stop_after:
            return _end(pid, silent, file, json.loads(runs.splitlines()[-1]))
        if silent >= warn_after and not warned:
            warned = True
            _say(
                f"the interpreter of the controller, pid {pid}, has been blocked for {silent:.0f} s", _stacks(pid, file)
            )


def _stacks(pid: int, file: Path) -> str:
    """Writes the stacks to the file, and returns a sentence for the terminal."""
    stacks = stacks_from_outside(pid)
    if not stacks:
        return f"it is {process_state(pid)}; its stacks cannot be read from outside on this machine"
    with suppress(OSError), file.open("a", encoding="utf-8") as out:
        out.write(stacks + "\n")
    return f"its main thread is in {innermost(stacks)}; all stacks are in {file}"


def _end(pid: int, silent: float, file: Path, runs: Sequence[str]) -> None:
    verdict = f"ended by its watchdog: the interpreter was blocked for {silent:.0f} s"
    _say(verdict, _stacks(pid, file))
    for run in runs:
        with suppress(
            OSError, ImportError
        ):  # loaded now: it would be two thirds of the CPU time of a process that seldom needs it
            from headrace.processes.health.live_status import add_verdict

            add_verdict(Path(run), verdict)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _say(*sentences: str) -> None:
    say("; ".join(sentences))


if __name__ == "__main__":
    guard_streams()
    watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
