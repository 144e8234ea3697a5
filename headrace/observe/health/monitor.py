"""A small process beside the controller: it notices when not even the controller's watchdog thread gets the interpreter.

Native code that keeps the interpreter's lock (a regular expression without end in a reward function, say) stops every thread of
its process, so that only another process can say so. The watchdog sends a beat at every turn. Where none comes, this process
says where the controller stands, and after the second deadline ends it: the workers leave with it, and a resume goes on.
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

from headrace.observe.health.outside import may_be_read_by, stacks_from_outside
from headrace.observe.health.own_stacks import innermost
from headrace.observe.health.stacks import is_stopped, process_state
from headrace.observe.health.status import add_verdict

SLICE = 0.5
"""Seconds. A longer one passed while this process stood still too, and counts as two slices at most."""

SHORTEST = 1.0
"""Seconds. Below, a busy machine looks like an interpreter that stands still."""


class Monitor:
    """The controller's end: a context while the process watches."""

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
            print(f"headrace: nobody watches the interpreter from outside ({error})", file=sys.stderr)
        finally:
            os.close(theirs)
        return self

    def beat(self, runs: Sequence[Path]) -> None:
        """`runs`: directories whose `status.json` gets the verdict, where it comes to one."""
        with suppress(OSError):  # it has ended, or has not read for long: then this process is not what hangs
            os.write(self._beats, json.dumps([str(run) for run in runs]).encode() + b"\n")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._beats)
        if self._process:
            self._process.kill()
            self._process.wait()


def watch(beats: int, pid: int, warn_after: float, stop_after: float, file: Path) -> None:
    """Returns when the controller has ended or closed its end."""
    silent, said, last, runs = 0.0, False, time.monotonic(), b"[]\n"
    while True:
        ready, _, _ = select.select([beats], [], [], SLICE)
        now = time.monotonic()
        passed, last = min(now - last, 2 * SLICE), now
        if ready:
            if not (told := os.read(beats, 1 << 20)):
                return None
            runs, silent, said = told, 0.0, False
        elif os.getppid() != pid:  # it has ended, and something that it started keeps the pipe open
            return None
        elif not is_stopped(pid):
            silent += passed
        if silent >= stop_after:
            return _end(pid, silent, file, json.loads(runs.splitlines()[-1]))
        if silent >= warn_after and not said:
            said = True
            _say(f"the interpreter of the controller, pid {pid}, has stood still for {silent:.0f} s", _look(pid, file))


def _look(pid: int, file: Path) -> str:
    """Where it stands goes to the file; returned is what a person is shown."""
    stacks = stacks_from_outside(pid)
    if not stacks:
        return f"it is {process_state(pid)}; its stacks cannot be read from outside on this machine"
    with suppress(OSError), file.open("a", encoding="utf-8") as out:
        out.write(stacks + "\n")
    return f"its main thread is in {innermost(stacks)}; all stacks are in {file}"


def _end(pid: int, silent: float, file: Path, runs: Sequence[str]) -> None:
    verdict = f"ended by its watchdog: the interpreter stood still for {silent:.0f} s"
    _say(verdict, _look(pid, file))
    for run in runs:
        with suppress(OSError):
            add_verdict(Path(run), verdict)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _say(*sentences: str) -> None:
    print(f"headrace: {'; '.join(sentences)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
