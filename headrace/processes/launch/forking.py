"""Workers on this machine that are forked from a process with their libraries loaded: they are ready in milliseconds.

Importing torch and transformers takes 4 s of CPU time in a new interpreter. A worker that cannot be forked is started as a new
interpreter, and the reason is printed.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import BinaryIO

from headrace.core.printing import say
from headrace.core.protocols import Heard, Job
from headrace.processes.launch.child import PROGRAM, environment
from headrace.processes.launch.local import LocalWorker
from headrace.processes.launch.preloaded import OWN, CannotFork, ForkRequest, fork


class ForkLauncher:
    """Protocol `Launcher`. Output of the workers goes to files in `logs`, because the terminal shows the live view."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs

    def worker(self, job: Job, heard: Heard) -> ForkedWorker:
        return ForkedWorker(job, self._logs, heard)


class ForkedWorker(LocalWorker):
    """Protocol `Worker`. It can be called as soon as `start` returns; its process begins when the libraries are loaded."""

    def __init__(self, job: Job, logs: Path, heard: Heard) -> None:
        super().__init__(job, logs, heard)
        self._forking: asyncio.Task[None] | None = None
        self._absent = "it was killed before it began"
        """The reason why there is no process."""

    def _spawn(self) -> socket.socket:
        log = self._process.open_log()
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            log.close()
            raise
        self._forking = asyncio.ensure_future(self._fork(theirs, log))
        return ours

    async def _fork(self, theirs: socket.socket, log: BinaryIO) -> None:
        """Keeps the worker's end of the connection open until the process has it: if there will be none, its end says so."""
        job, connection = self._job, theirs.fileno()
        files = {1: log.fileno(), 2: log.fileno()} | {fd: fd for fd in (connection, *job.inherited)}
        variables = environment(job.cores) | self._process.own_variables()
        words = ["-m", PROGRAM, job.kind, "--socket", str(connection)]
        own = {name: variables[name] for name in OWN if name in variables}
        request = ForkRequest(words, own, sorted(os.sched_getaffinity(0)), list(files))
        with theirs, log:
            try:
                try:
                    self._process.has(await fork(variables, request, list(files.values())))
                except CannotFork as why:
                    say(f"the {job.who} is started anew and loads its libraries itself: {why}")
                    self._process.spawn(job, words[3:], [connection])
            except OSError as error:  # no memory, no descriptors
                self._absent = str(error)

    def kill(self) -> None:
        if self._forking and not self._forking.done():
            self._forking.cancel()
        else:
            super().kill()

    async def end(self) -> None:
        if self._forking and not self._forking.done():
            self._forking.cancel()
            await asyncio.wait([self._forking])
        await super().end()

    async def _how_it_ended(self, wrong: str) -> str:
        if self._process.has_started:
            return await super()._how_it_ended(wrong)
        return f"could not be started: {self._absent}"
