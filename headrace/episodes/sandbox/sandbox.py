"""Runs code in processes that are confined: from the worker processes of rewards and environments, or from a program of the user."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from headrace.core.types import Struct
from headrace.episodes.sandbox.inside import plain_values
from headrace.episodes.sandbox.sandbox_limits import SandboxLimits
from headrace.processes.health.owned_directory import OwnedDirectory
from headrace.processes.process_end import ended_within
from headrace.version import PACKAGE

_ZYGOTE = ("-P", "-m", "headrace.episodes.sandbox.zygote")
_GRACE = 30.0
"""Seconds after which a process that makes calls is killed, if it has not ended by itself."""


class SandboxLost(Exception):
    """A call that has no result, and not for anything that the code did."""


class SandboxResult(Struct, frozen=True):
    """The result of one call."""

    reason: str
    """Empty if the program ran to its end, or the test passed. Else `failed` (a test), `raised`, `exit`, `died`, or the limit that was
    exceeded: `cpu`, `time`, `memory`, `output`, `disk`. `unsupported` is a mistake of the test and not of the code."""
    detail: str
    out: str
    """Standard output."""
    err: str
    """Standard error."""
    cpu_seconds: float


class Sandbox:
    """Makes calls, `parallel` at once; others wait. Its methods block, and may be called from any thread."""

    def __init__(self, limits: SandboxLimits, parallel: int = 1, *, in_memory: bool = True) -> None:
        """`in_memory`: whether private directories are in memory where the kernel allows it; otherwise they are on the disk."""
        self._limits, self._in_memory = limits, in_memory
        self._slots = threading.BoundedSemaphore(parallel)
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self.facts: dict[str, Any] = {}
        """The means of the process that made the last call: `in_memory`, `landlock`, `seccomp`."""

    def run(self, code: str, stdin: str = "") -> SandboxResult:
        """Runs a program. The value of a last line that is an expression is printed, as in the interpreter. Raises SandboxLost."""
        return self._call({"program": code, "stdin": stdin})[0]

    def test(self, code: str, test: str, entry_point: str = "") -> SandboxResult:
        """Runs a test of the functions that the code defines: Python with assert statements, in which the names of the code stand for
        functions and classes in another process. `entry_point`: the one that has the name of a function of Python.

        It is run once more in one process with the code, where nothing is missing and the code could cheat: only what passes in both has
        passed, and only what fails in both has failed. Raises SandboxLost."""
        apart, sure = self._call({"test": code, "entry_point": entry_point}, test)
        if sure or apart.reason not in ("", "failed"):
            return apart
        together, _ = self._call({"together": code, "entry_point": entry_point}, test)
        used = apart.cpu_seconds + together.cpu_seconds
        if together.reason not in ("", "failed") or together.reason == apart.reason:
            return msgspec.structs.replace(apart, cpu_seconds=used)
        where, other = ("beside", together) if not apart.reason else ("apart from", apart)
        detail = f"the test fails only {where} the code, for what its two processes do not share: {other.detail}"
        return SandboxResult("unsupported", detail, apart.out, apart.err, used)

    def close(self) -> None:
        """Ends the processes that are idle."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().end()

    def _call(self, *frames: Any) -> tuple[SandboxResult, bool]:
        """Returns the result, and whether the verdict of a test is sure."""
        with self._slots, self._process() as process:
            report = process.ask(frames)
        result = SandboxResult(**report["result"])
        if result.reason == "unconfined":
            raise SandboxLost(f"the code could not be confined, and was not run: {result.detail}")
        return result, report["sure"]

    @contextlib.contextmanager
    def _process(self) -> Iterator[_Process]:
        """Lends a process. One that fails is ended."""
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = _Process(self._limits, self._in_memory)
            self.facts = process.facts
        try:
            yield process
        except BaseException:
            process.end()
            raise
        self._idle.put(process)


class _Process:
    """A process that makes one call at a time (`zygote.py`)."""

    def __init__(self, limits: SandboxLimits, in_memory: bool) -> None:
        self._directory, self._most = OwnedDirectory("sandbox"), limits.report
        where = [self._directory.path, "memory" if in_memory else "disk"]
        command = [sys.executable, *_ZYGOTE, json.dumps(limits), *where]
        pipe = subprocess.PIPE
        # Not in our process group, with which it would be killed: it reads the end of its input, ends the call and removes its directory.
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, env=_environment(), bufsize=0, start_new_session=True
        )
        self.facts = self._receive()

    def ask(self, frames: tuple[Any, ...]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            for frame in frames:
                plain_values.send(self._process.stdin.fileno(), frame)
        except (OSError, ValueError) as error:
            raise SandboxLost(f"the call could not be sent: {error}") from None
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            report: dict[str, Any] = plain_values.receive(self._process.stdout.fileno(), self._most)
        except (OSError, ValueError):
            self.end()
            raise SandboxLost(f"the process that makes calls ended with exit code {self._process.returncode}") from None
        return report

    def end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()  # at its end the process ends
        ended_within(self._process, _GRACE)
        self._process.stdout.close()
        self._directory.remove()


def _environment() -> dict[str, str]:
    """The sandbox's own variables, none of the user's: those may hold tokens."""
    package = str(PACKAGE.parent)
    return {
        "PATH": os.defpath,
        "LANG": "C.UTF-8",
        "PYTHONPATH": package,
        "PYTHONHASHSEED": "0",  # the same code gives the same result when a run is replayed
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
