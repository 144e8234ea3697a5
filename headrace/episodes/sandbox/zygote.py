"""The process that makes calls: `python -P -m headrace.episodes.sandbox.zygote LIMITS DIRECTORY memory|disk`, driven by `sandbox.py`.

It has imported what code usually needs, and forks for each call, which takes milliseconds where an interpreter of its own takes tens of
them. It never reads a test: the process of the code is forked first, and the process of the test then reads the next frame itself. So
no test lies in memory that code inherits.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from headrace.episodes.sandbox.attending import Forked, PrivateDirectory, attend, pipes, report_of
from headrace.episodes.sandbox.inside.confine import confine, take_descriptors
from headrace.episodes.sandbox.inside.plain_values import receive, send
from headrace.episodes.sandbox.inside.solution import CONFINED, MEMORY, RAISED, end, run_program, serve_calls
from headrace.episodes.sandbox.inside.tester import run_test, run_together, sealed
from headrace.episodes.sandbox.kernel import seccomp, syscalls
from headrace.episodes.sandbox.kernel.seccomp import ThreadGate
from headrace.episodes.sandbox.kernel.syscalls import enter_namespaces
from headrace.episodes.sandbox.sandbox_limits import SandboxLimits
from headrace.processes.health.owned_directory import remove_all

USUAL = (
    "asyncio", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools",
    "heapq", "itertools", "math", "operator", "random", "re", "statistics", "string", "textwrap", "typing",
)  # fmt: skip
"""Modules that are imported before the first call."""
_ORDERS, _REPORTS = 0, 1


class Zygote:
    def __init__(self, limits: SandboxLimits, directory: str, *, in_memory: bool) -> None:
        """`in_memory`: whether the private directory may be one in memory."""
        self._limits, self._directory = limits, directory
        self.in_memory = in_memory and enter_namespaces(directory)
        self._private = PrivateDirectory(os.path.join(directory, "private"), limits, in_memory=self.in_memory)

    def program(self, code: str, stdin: str) -> dict[str, Any]:
        """Runs a program with this standard input."""
        with self._private.fresh():
            given = self._to_read(stdin.encode(errors="surrogatepass"))
            reading, writing = pipes(2)
            child = self._fork(lambda: lambda: run_program(code), (given, *writing, writing[0]))
            _close([given, *writing])
            ended = attend(child, child, reading, limits=self._limits, private=self._private, orders=_ORDERS)
        return report_of(ended, self._limits)

    def test(self, code: str, entry_point: str) -> dict[str, Any]:
        """Runs one test, which is the next frame."""
        nothing = os.open(os.devnull, os.O_RDWR)
        ours, theirs = socket.socketpair()
        with self._private.fresh():
            reading, writing = pipes(3)
            out, err, verdict = writing
            solution = self._fork(lambda: lambda: serve_calls(code), (nothing, out, err, theirs.fileno()))
            theirs.close()
            tester = self._fork(lambda: _tester(entry_point), (verdict, nothing, nothing, ours.fileno()))
            ours.close()
            _close([*writing, nothing])
            ended = attend(tester, solution, reading, limits=self._limits, private=self._private, orders=_ORDERS)
        return report_of(ended, self._limits)

    def together(self, code: str, entry_point: str) -> dict[str, Any]:
        """Runs one test, which is the next frame, in one process with the code."""
        nothing, seal = os.open(os.devnull, os.O_RDWR), os.urandom(16).hex()
        with self._private.fresh():
            reading, writing = pipes(3)
            child = self._fork(lambda: _beside(code, entry_point, seal), (nothing, *writing))
            _close([*writing, nothing])
            ended = attend(child, child, reading, limits=self._limits, private=self._private, orders=_ORDERS)
        *printed, verdict = ended.printed
        return report_of(ended._replace(printed=[*printed, sealed(verdict, seal)]), self._limits)

    def _to_read(self, content: bytes) -> int:
        """Returns a descriptor of a file without a name, which cannot be written: it is outside of the private directory and its limits."""
        with tempfile.NamedTemporaryFile(dir=self._directory) as file:
            file.write(content)
            file.flush()
            return os.open(file.name, os.O_RDONLY)

    def _fork(self, prepare: Callable[[], Callable[[], int]], descriptors: Sequence[int]) -> Forked:
        """Returns a process that prepares, gives up all but these descriptors, is confined, and works."""
        parent, gate = os.getpid(), ThreadGate(self._limits.threads)
        pid = os.fork()
        if pid == 0:
            self._child(prepare, descriptors, gate.channel.fileno(), parent)
        gate.watch(pid)
        return Forked(pid, gate)

    def _child(
        self, prepare: Callable[[], Callable[[], int]], descriptors: Sequence[int], gate: int, parent: int
    ) -> NoReturn:
        code = RAISED
        try:
            work = prepare()
            take_descriptors(descriptors, gate)
            confine(self._private.path, self._limits, parent)
            os.write(1, CONFINED)
            code = work()
        except MemoryError:
            code = MEMORY
        except BaseException:
            with contextlib.suppress(BaseException):  # the code may have closed standard error
                traceback.print_exc()
        finally:
            end(code)


def _tester(entry_point: str) -> Callable[[], int]:
    """Reads the test while the frames can still be read."""
    test = receive(_ORDERS)
    return lambda: run_test(test, entry_point)


def _beside(code: str, entry_point: str, seal: str) -> Callable[[], int]:
    test = receive(_ORDERS)
    return lambda: run_together(code, test, entry_point, seal)


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def main(arguments: list[str]) -> NoReturn:
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # sent to all processes of a job, it would fail a solution that is right
    limits = SandboxLimits(*json.loads(arguments[0]))
    zygote = Zygote(limits, arguments[1], in_memory=arguments[2] == "memory")
    for name in USUAL:
        importlib.import_module(name)
    ours = os.environ.pop("PYTHONPATH", "")
    sys.path[:] = [path for path in sys.path if path != ours]
    gc.freeze()  # a collection in a child copies no page of what is shared
    send(_REPORTS, {"in_memory": zygote.in_memory, "landlock": syscalls.landlock_version(), "seccomp": seccomp.known()})
    with contextlib.suppress(ConnectionError):
        while True:
            match receive(_ORDERS):
                case {"program": code, "stdin": stdin}:
                    send(_REPORTS, zygote.program(code, stdin), limits.report)
                case {"test": code, "entry_point": entry_point}:
                    send(_REPORTS, zygote.test(code, entry_point), limits.report)
                case {"together": code, "entry_point": entry_point}:
                    send(_REPORTS, zygote.together(code, entry_point), limits.report)
    remove_all(arguments[1])
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
