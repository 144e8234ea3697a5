"""Worker processes on this machine: started with cores of their own, watched by their sentinel, ended with their parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from headrace import orphans
from headrace.errors import WorkerDied
from headrace.native.cores import usable_cores
from headrace.observe.health import patience
from headrace.observe.health.family import Child, current_family
from headrace.observe.health.frames import VARIABLE
from headrace.observe.health.stacks import process_state
from headrace.orchestration.workers.wire import Channel, Frame

T = TypeVar("T")

GRACE = 5.0
"""Seconds that a worker gets to leave by itself before it is killed, and to be gone after that."""


class Worker:
    """One child process and the channel to it."""

    def __init__(self, who: str, log: Path, on_push: Callable[[Frame], None] | None = None) -> None:
        """What the process prints goes to `log`: the terminal belongs to the live view."""
        self.who, self._log, self._stacks = who, log, log.with_suffix(".stacks")
        self._family = current_family()
        self.channel = Channel(who, on_push or (lambda frame: None), self._lost)
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: asyncio.Future[str] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, kind: str, fds: Sequence[int], cores: Sequence[int]) -> None:
        """Runs `python -m headrace.orchestration.workers.worker KIND`: no `__main__` guard needed in the user's script.

        Raises WorkerDied where the process cannot be started."""
        self._ended = asyncio.get_running_loop().create_future()
        try:
            ours = self._spawn(kind, fds, cores)
        except OSError as error:  # no memory, no descriptors, no directory for its log
            self._ended.set_result(how := f"could not be started: {error}")
            raise WorkerDied(self.who, how) from error
        self._family.started(Child(self.who, self.pid, self._stacks))
        await self.channel.open(ours)

    def _spawn(self, kind: str, fds: Sequence[int], cores: Sequence[int]) -> socket.socket:
        """Returns our end of the connection."""
        self._stacks.unlink(missing_ok=True)  # of the process before: this one is asked when the file is there
        ours, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-m",
            "headrace.orchestration.workers.worker",
            kind,
            str(theirs.fileno()),
            *map(str, fds),
        ]
        try:
            # A session of its own: Ctrl-C in the terminal reaches the controller only, which then ends its workers in order.
            with theirs, self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno(), *fds],
                    env=environment(cores) | orphans.of_this_process() | {VARIABLE: str(self._stacks)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError:
            ours.close()
            raise
        return ours

    async def call(self, method: str, payload: Any, returns: type[T]) -> T:
        try:
            return await self.channel.call(method, payload, returns)
        except WorkerDied:
            raise WorkerDied(self.who, await self.ended()) from None

    async def ended(self) -> str:
        """Waits for the end of the process and says how it ended."""
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    async def close(self) -> None:
        """Ask, wait, kill. Returns with the process gone, unless not even that helps."""
        await self.channel.close()
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(patience.wait, self._process, GRACE)
        if self._process.poll() is None:
            self._process.kill()
            if said := await asyncio.to_thread(_bury, self._process):
                print(f"headrace: the {self.who} process {self.pid} {said}", file=sys.stderr)
        self._family.ended(self.pid)

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)

    def _lost(self, wrong: str) -> None:
        """The connection ended, which the kernel does at once when the process dies. `wrong`: what it said made no sense."""
        assert self._process is not None and self._ended is not None
        process, ended = self._process, self._ended
        if wrong:
            self.kill()

        def wait() -> str:
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

        async def report() -> None:
            try:
                how = await asyncio.to_thread(wait)
            except Exception as error:  # no thread to wait in, say: whoever awaits the end must hear of it all the same
                how = f"closed its connection, and how it ended could not be found out: {error!r}"
            if not ended.done():
                ended.set_result(how)

        self._reporting = asyncio.ensure_future(report())


def _bury(process: subprocess.Popen[bytes]) -> str:
    """Waits for the end of a process that was killed. Empty, or why it cannot end: it hangs in the kernel."""
    try:
        patience.wait(process, GRACE)
    except subprocess.TimeoutExpired:
        return f"cannot be killed: it is {process_state(process.pid)}"
    return ""


def environment(cores: Sequence[int]) -> dict[str, str]:
    """OpenMP must be told before torch is imported.

    Waiting threads sleep instead of spinning: where two pools share cores, spinning costs a factor of up to ten (measured;
    see docs/design-notes.md).
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
