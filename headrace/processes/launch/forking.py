"""Workers on this machine that are forked from a process with their libraries loaded: they are ready in milliseconds.

Importing torch and transformers takes 4 s of CPU time in a new interpreter. A worker that cannot be forked is started as a new
interpreter, and the reason is printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from headrace.core.errors import HeadraceError
from headrace.core.printing import say
from headrace.core.protocols import Heard, Job
from headrace.core.types import Struct
from headrace.processes.health import family, patience
from headrace.processes.health.family import Child, current_family
from headrace.processes.health.stacks import VARIABLE
from headrace.processes.launch.local import CORES, GRACE, PROGRAM, ForkedProcess, LocalWorker, environment
from headrace.processes.process_end import ending

# --- A fork whose child belongs to the caller's parent: `clone(CLONE_PARENT)` of Linux.
#
# `os.fork` would make the child a child of the process that forks. Its exit status, and the signal that Linux sends when a parent ends
# (`processes/health/family.py`), would then depend on that process: killing it would end all workers. With CLONE_PARENT the worker is
# a child of the controller, exactly as if the controller had started it.
#
# Python and glibc have no function for it, so the system call is made directly, between Python's own hooks. The hooks of `pthread_atfork`
# do not run: they repair locks and thread pools, and a process with a single thread has none to repair.


_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_PR_GET_TID_ADDRESS = 40

_CALLS = {"x86_64": (56, 3), "aarch64": (220, 4)}
"""The number of the system call, and the position of its argument `child_tid` after the flags (clone(2), C library/kernel differences)."""


def can_fork_for_parent() -> bool:
    """Returns whether this system has the call, and pidfds, which the controller waits with."""
    return sys.platform == "linux" and platform.machine() in _CALLS and hasattr(os, "pidfd_open")


def fork_for_parent() -> int:
    """Returns the child's process id, and 0 in the child. The caller has a single thread. Raises OSError."""
    number, position = _CALLS[platform.machine()]
    python = ctypes.pythonapi
    libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock: the child needs it
    libc.syscall.restype = ctypes.c_long
    libc.syscall.argtypes = [ctypes.c_long] * 6
    arguments = [number, _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD, 0, 0, 0, 0]
    arguments[1 + position] = _address_of_tid(libc)
    python.PyOS_BeforeFork()
    pid = int(libc.syscall(*arguments))
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error := ctypes.get_errno(), os.strerror(error))
    return pid


def _address_of_tid(libc: ctypes.PyDLL) -> int:
    """Returns the place where glibc keeps the id of this thread. The kernel writes the child's there; with the parent's, calls such as
    `pthread_setaffinity_np` would reach the wrong process. Raises OSError on kernels that do not say."""
    address = ctypes.c_void_p()
    if libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) or not address.value:
        raise OSError(error := ctypes.get_errno(), f"the address of the thread's id is unknown: {os.strerror(error)}")
    if ctypes.c_int.from_address(address.value).value != os.getpid():
        raise OSError(0, "the address of the thread's id is wrong")
    return address.value


# --- The process that has the workers' libraries loaded and forks workers
# The controller's half. Its program is `run/worker/fork_server.py`.
#
#     controller                                  fork server
#     ForkServer     ── ForkRequest, files ──▶    imports the libraries once, and then clones itself for each request
#                                                                  │
#                    ◀── ForkReply ───────────────────────────  worker: the controller's child (`forking.py`)
#
# A server belongs to the thread that started it: Linux counts that thread as the parent of its workers (`processes/health/family.py`). It
# stays when a run ends, so that the next run of the process starts at once, and ends with its thread. Nothing depends on it once a
# worker runs.
#
# Libraries read environment variables when they are imported, so a worker is forked only by a server whose environment equals the
# worker's, except for variables that only our own code reads.


SERVER = "headrace.run.worker.fork_server"

OWN = (family.PARENT, VARIABLE, CORES, "PYTEST_CURRENT_TEST")
"""Environment variables in which a worker may differ from its server: no library reads them when it is imported."""

KEPT = 2
"""Servers of a thread: an engine and a trainer with different numbers of cores need one each."""

ROOM = "." * 80
"""An argument that makes room for the worker's own command line, which replaces the server's in the worker."""

MOST_FILES, MOST_BYTES = 64, 1 << 17
"""Limits of one request."""


class ForkRequest(Struct, frozen=True):
    words: list[str]
    """The worker's command line after the interpreter."""
    variables: dict[str, str]
    """Its values of the variables `OWN`; those that are missing are unset in the worker."""
    affinity: list[int]
    """The cores that the controller may use."""
    numbers: list[int]
    """The numbers that the request's files have in the worker. Before these come the reply's pipe and the working directory."""


class ForkReply(Struct, frozen=True):
    pid: int = 0
    refused: str = ""


class CannotFork(HeadraceError):
    """The reason is a clause without a full stop."""


class ForkServer:
    def __init__(self, environment: Mapping[str, str]) -> None:
        """Raises OSError if it cannot be started."""
        self._owner = os.getpid()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 open for as long as the server
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", SERVER, str(theirs.fileno()), ROOM],
                pass_fds=[theirs.fileno()],
                env={**environment, **family.parent_variables()},
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
                start_new_session=True,
            )
        self.has_forked = False
        self.close = weakref.finalize(self, _end, self._process, self._requests, os.getpid())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def fork(self, request: ForkRequest, files: Sequence[int]) -> ForkedProcess:
        """Returns the new worker's process. The first call waits until the libraries are loaded. Raises CannotFork and OSError."""
        answer, reply = os.pipe()
        try:
            with _here() as place:
                socket.send_fds(self._requests, [msgspec.msgpack.encode(request)], [reply, place, *files])
        except (BrokenPipeError, ConnectionResetError):  # it has ended: nobody answers
            pass
        except OSError:
            os.close(answer)
            raise
        finally:
            os.close(reply)
        message = await _read(answer)
        if not message:
            raise CannotFork(await asyncio.to_thread(self._how_it_ended))
        given = msgspec.msgpack.decode(message, type=ForkReply)
        if given.refused:
            raise CannotFork(given.refused)
        self.has_forked = True
        return ForkedProcess(given.pid)

    def _how_it_ended(self) -> str:
        """Blocks."""
        try:
            code = patience.wait(self._process, GRACE)
        except subprocess.TimeoutExpired:
            return "its fork ended before it was a worker"
        self._printed.seek(0)
        printed = self._printed.read().decode(errors="replace").strip().splitlines()
        return f"the process that forks workers {ending(code)}{f' ({printed[-1]})' if printed else ''}"


def _end(process: subprocess.Popen[bytes], requests: socket.socket, owner: int) -> None:
    if os.getpid() == owner:  # not in a copy of us, which the user's code forked: that one has no server to end
        requests.close()
        process.kill()
        process.wait()


@contextlib.contextmanager
def _here() -> Iterator[int]:
    """A file descriptor of the working directory, which needs no name: it may have been deleted."""
    place = os.open(".", os.O_RDONLY)
    try:
        yield place
    finally:
        os.close(place)


async def _read(pipe: int) -> bytes:
    """Returns what the other end of the pipe writes at once; nothing if it is closed. Closes this end."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(pipe, ready.set)
    try:
        await ready.wait()
        return os.read(pipe, 1 << 16)
    finally:
        loop.remove_reader(pipe)
        os.close(pipe)


class _Servers(threading.local):
    def __init__(self) -> None:
        self.running: dict[frozenset[tuple[str, str]], ForkServer] = {}


_servers = _Servers()


def load_ahead(environment: Mapping[str, str]) -> None:
    """Starts the server of workers with this environment, unless this thread has it: it loads its libraries while the caller does other work.
    If it cannot be started, that shows where a worker needs it."""
    key = _key(environment)
    if key not in _servers.running and len(_servers.running) < KEPT:
        with contextlib.suppress(OSError):
            _servers.running[key] = ForkServer(dict(key))


def end_idle() -> None:
    """Ends the servers of this thread that have forked nothing: what they were started for did not begin."""
    for key in [key for key, server in _servers.running.items() if not server.has_forked]:
        _servers.running.pop(key).close()


def _key(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset((name, value) for name, value in environment.items() if name not in OWN)


async def fork(environment: Mapping[str, str], request: ForkRequest, files: Sequence[int]) -> ForkedProcess:
    """Forks a worker with this environment. Raises CannotFork and OSError; the worker must then be started in another way."""
    running = _servers.running
    key = _key(environment)
    if key not in running:
        while len(running) >= KEPT:
            running.pop(next(iter(running))).close()
        running[key] = ForkServer(dict(key))
    server, family = running[key], current_family()
    family.started(Child("fork server", server.pid, None))  # while a worker waits for it, it may be what hangs
    try:
        return await server.fork(request, files)
    except CannotFork:
        if (
            server.has_forked and running.get(key) is server
        ):  # the next worker gets a new one; one that never worked would not
            running.pop(key).close()
        raise
    finally:
        family.ended(server.pid)


# --- forking ------------------------------------------------------------


class ForkLauncher:
    """Protocol `Launcher`. Output of the workers goes to files in `logs`, because the terminal shows the live view."""

    def __init__(self, logs: Path, problem: Callable[[], str] = str) -> None:
        """`problem`: says why no worker can be started now; empty if one can."""
        self._logs, self._problem = logs, problem

    def worker(self, job: Job, heard: Heard) -> ForkedWorker:
        return ForkedWorker(job, self._logs, heard, self._problem)


class ForkedWorker(LocalWorker):
    """Protocol `Worker`. It can be called as soon as `start` returns; its process begins when the libraries are loaded."""

    def __init__(self, job: Job, logs: Path, heard: Heard, problem: Callable[[], str]) -> None:
        super().__init__(job, logs, heard, problem)
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
