"""Workers on this machine: a child process, and a socket pair that both inherit.

The kernel detects a death: it closes the socket as soon as the process is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.native.cores import usable_cores
from headrace.observe.health import orphans, patience
from headrace.observe.health.family import Child, current_family
from headrace.observe.health.own_stacks import VARIABLE
from headrace.observe.health.stacks import process_state
from headrace.orchestration.workers.connected import ConnectedWorker
from headrace.protocols import Heard, Job

GRACE = 5.0
"""Seconds in which a worker should end by itself before it is killed, and in which it should be gone after that."""


class LocalLauncher:
    """Protocol `Launcher`. Output of the workers goes to files in `logs`, because the terminal shows the live view."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs

    def worker(self, job: Job, heard: Heard) -> LocalWorker:
        return LocalWorker(job, self._logs, heard)


class LocalWorker(ConnectedWorker):
    """Protocol `Worker`."""

    def __init__(self, job: Job, logs: Path, heard: Heard) -> None:
        super().__init__(job.who, heard)
        self._job = job
        self._process = ChildProcess(job.who, logs)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self) -> None:
        self._begin()
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


class ChildProcess:
    """A child process that runs `python -m headrace.orchestration.workers.worker KIND ...`. Unlike with `multiprocessing`, the user's
    script needs no `__main__` guard."""

    def __init__(self, who: str, logs: Path) -> None:
        self._who = who
        self._log = logs / f"{who.replace(' ', '-')}.log"
        self._stacks = self._log.with_suffix(".stacks")
        self._family = current_family()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def spawn(
        self, job: Job, arguments: Sequence[str], fds: Sequence[int] = (), variables: Mapping[str, str] | None = None
    ) -> None:
        """`fds`: file descriptors to inherit in addition to those of the job. `variables`: added to its environment. Raises OSError."""
        self._stacks.unlink(
            missing_ok=True
        )  # an old process's file: a process is only asked for its stacks once its file exists
        own = orphans.of_this_process() | {VARIABLE: str(self._stacks)} | dict(variables or {})
        # A session of its own: Ctrl-C in the terminal reaches the controller only, which then ends its workers in order.
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace.orchestration.workers.worker", job.kind, *arguments],
                pass_fds=[*fds, *job.inherited],
                env=environment(job.cores) | own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._family.started(Child(self._who, self.pid, self._stacks))

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Waits for a process whose connection was closed, and kills it if it does not end in time. The process is gone on return,
        unless even SIGKILL did not end it."""
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(patience.wait, self._process, GRACE)
        if self._process.poll() is None:
            self._process.kill()
            if said := await asyncio.to_thread(_bury, self._process):
                print(f"headrace: the {self._who} process {self.pid} {said}", file=sys.stderr)
        self._family.ended(self.pid)

    def how_it_ended(self, wrong: str) -> str:
        """Waits for the end of the process (blocking), and says how it ended. `wrong`: why we killed it, or empty."""
        process = self._process
        assert process is not None
        try:
            code = patience.wait(process, GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"closed its connection and hung; it {_bury(process) or 'was killed'}"
        self._family.ended(process.pid)
        if wrong:
            return f"was ended: {wrong}"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{how} (its output is in {self._log})"


def _bury(process: subprocess.Popen[bytes]) -> str:
    """Waits for the end of a killed process. Returns an empty string, or the reason if it cannot end (it hangs in the kernel)."""
    try:
        patience.wait(process, GRACE)
    except subprocess.TimeoutExpired:
        return f"cannot be killed: it is {process_state(process.pid)}"
    return ""


def environment(cores: Sequence[int]) -> dict[str, str]:
    """The environment of a worker. OpenMP reads it when torch is imported, so it must be set before.

    Waiting threads sleep instead of spinning: if two pools share cores, spinning costs a factor of up to ten (measured; see
    docs/design-notes.md).
    """
    threads = str(len(cores) or usable_cores())
    chosen = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        # glibc gives large blocks back to the system at once, and taking them again costs a page fault each 4 KiB: keep them.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 33),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    }
    return {**os.environ, **chosen, "HEADRACE_CORES": ",".join(map(str, cores))}
