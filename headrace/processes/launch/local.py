"""Workers on this machine: a child process, and a socket pair that both inherit.

The kernel detects a death: it closes the socket as soon as the process is gone.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from headrace.core.protocols import Heard, Job
from headrace.processes.connected import ConnectedWorker
from headrace.processes.launch.child import ChildProcess
from headrace.processes.worker_place import WorkerPlace


class LocalPlace(WorkerPlace):
    """This machine."""

    name = "local"
    about = "the run starts its workers as child processes"


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
