"""Workers on this machine: a child process, and a socket pair that both inherit.

The kernel detects a death: it closes the socket as soon as the process is gone.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from headrace.core.printing import say
from headrace.core.protocols import Heard, Job
from headrace.native.resources import usable_cores
from headrace.processes.health import family
from headrace.processes.health.family import Child, current_family
from headrace.processes.health.stacks import VARIABLE, process_state
from headrace.processes.process_end import ended_within, ending
from headrace.processes.wire import ConnectedWorker
from headrace.processes.worker_place import WorkerPlace

# --- A child process that another process forked for us (`forking.py`)
# The part of `subprocess.Popen` that the controller uses.


class ForkedProcess:
    """A child that another process forked for us. Methods may be called from any thread."""

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


# --- The process of a worker on this machine
# Its environment, its log, its start, and how it ended.


PROGRAM = "headrace.run.worker.worker"
"""The module that a worker runs."""

CORES = "HEADRACE_CORES"
"""Environment variable of a worker with the numbers of its cores."""

GRACE = 5.0
"""Seconds in which a worker should end by itself before it is killed, and in which it should be gone after that."""


class ChildProcess:
    """A child process that runs the program of a worker. Unlike with `multiprocessing`, the user's
    script needs no `__main__` guard."""

    def __init__(self, who: str, logs: Path) -> None:
        self._who = who
        self._log = logs / f"{who.replace(' ', '-')}.log"
        self._stacks = self._log.with_suffix(".stacks")
        self._family = current_family()
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def has_started(self) -> bool:
        return self._process is not None

    def spawn(self, job: Job, arguments: Sequence[str], fds: Sequence[int] = ()) -> None:
        """Starts a new interpreter. `fds`: file descriptors to inherit in addition to those of the job. Raises OSError."""
        variables = environment(job.cores) | self.own_variables()
        with self.open_log() as log:
            self.has(start_worker([job.kind, *arguments], variables, output=log, fds=[*fds, *job.inherited]))

    def open_log(self) -> BinaryIO:
        """Opens the file for the worker's output. An old process's stacks are removed: a process is asked for its stacks only once
        its file exists. Raises OSError."""
        self._stacks.unlink(missing_ok=True)
        return self._log.open("ab")

    def own_variables(self) -> dict[str, str]:
        """The environment variables that no other worker has."""
        return family.parent_variables() | {VARIABLE: str(self._stacks)}

    def has(self, process: subprocess.Popen[bytes] | ForkedProcess) -> None:
        """Takes over a process that was started for this worker."""
        self._process = process
        self._family.started(Child(self._who, process.pid, self._stacks))

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Waits for a process whose connection was closed, and kills it if it does not end in time. The process is gone on return,
        unless even SIGKILL did not end it."""
        if self._process is None:
            return
        if not await asyncio.to_thread(ended_within, self._process, GRACE) and (stuck := self._stuck()):
            say(f"the {self._who} process {self.pid} {stuck}")
        self._family.ended(self.pid)

    def how_it_ended(self, wrong: str) -> str:
        """Waits for the end of the process (blocking), and says how it ended. `wrong`: why we killed it, or empty."""
        process = self._process
        assert process is not None
        if not ended_within(process, GRACE):
            return f"closed its connection and hung; it {self._stuck() or 'was killed'}"
        code = process.wait()
        self._family.ended(process.pid)
        if wrong:
            return f"was ended: {wrong}"
        return f"{ending(code)} (its output is in {self._log})"

    def _stuck(self) -> str:
        """Returns why a process that was killed has not ended (it hangs in the kernel); empty if it has."""
        assert self._process is not None
        return "" if self._process.poll() is not None else f"cannot be killed: it is {process_state(self.pid)}"


def start_worker(
    words: Sequence[str], variables: Mapping[str, str], *, output: BinaryIO | int, fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Starts a new interpreter that runs the program of a worker. `output`: the file for all that it prints, or `subprocess.PIPE`. `fds`: file
    descriptors to inherit. Raises OSError."""
    # A session of its own: Ctrl-C in the terminal reaches the controller only, which then ends its workers in order.
    return subprocess.Popen(
        [sys.executable, "-m", PROGRAM, *words],
        pass_fds=fds,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def environment(cores: Sequence[int]) -> dict[str, str]:
    """The environment of a worker. OpenMP reads it when torch is imported, so it must be set before.

    Waiting threads sleep instead of spinning: if two pools share cores, spinning costs a factor of up to ten (measured; see
    docs/decisions/0002-first-version.md).
    """
    threads = str(len(cores) or usable_cores())
    chosen = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        # numpy's own BLAS multiplies nothing here, but starts its threads when it is imported (`fork_server.py` must have none).
        "OPENBLAS_NUM_THREADS": "1",
        # glibc gives large blocks back to the system at once, and taking them again costs a page fault each 4 KiB: keep them.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 33),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    }
    return {**os.environ, **chosen, CORES: ",".join(map(str, cores))}


# --- local ------------------------------------------------------------


class LocalPlace(WorkerPlace):
    """This machine."""

    name = "local"
    about = "the run starts its workers as child processes"


class LocalLauncher:
    """Protocol `Launcher`. Output of the workers goes to files in `logs`, because the terminal shows the live view."""

    def __init__(self, logs: Path, problem: Callable[[], str] = str) -> None:
        """`problem`: says why no worker can be started now; empty if one can."""
        self._logs, self._problem = logs, problem

    def worker(self, job: Job, heard: Heard) -> LocalWorker:
        return LocalWorker(job, self._logs, heard, self._problem)


class LocalWorker(ConnectedWorker):
    """Protocol `Worker`."""

    def __init__(self, job: Job, logs: Path, heard: Heard, problem: Callable[[], str]) -> None:
        super().__init__(job.who, heard)
        self._job, self._problem = job, problem
        self._process = ChildProcess(job.who, logs)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self) -> None:
        self._begin()
        if problem := self._problem():
            raise self._not_started(problem)
        try:
            ours = self._spawn()
        except OSError as error:  # no memory, no descriptors, no directory for its log
            raise self._not_started(error) from error
        self.channel.open(*await asyncio.open_connection(sock=ours, limit=1 << 24))

    def _spawn(self) -> socket.socket:
        """Returns our end of the connection."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process.spawn(self._job, ["--socket", str(theirs.fileno())], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        return ours

    async def end(self) -> None:
        await self.channel.close()
        await self._process.end()

    def kill(self) -> None:
        self._process.kill()

    async def _how_it_ended(self, wrong: str) -> str:
        return await asyncio.to_thread(self._process.how_it_ended, wrong)
