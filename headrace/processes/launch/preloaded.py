"""The process that has the workers' libraries loaded and forks workers: the controller's half. Its program is `workers/fork_server.py`.

    controller                                  fork server
    ForkServer     ── ForkRequest, files ──▶    imports the libraries once, and then clones itself for each request
                                                                 │
                   ◀── ForkReply ───────────────────────────  worker: the controller's child (`clone.py`)

A server belongs to the thread that started it: Linux counts that thread as the parent of its workers (`processes/health/orphans.py`). It
stays when a run ends, so that the next run of the process starts at once, and ends with its thread. Nothing depends on it once a
worker runs.

Libraries read environment variables when they are imported, so a worker is forked only by a server whose environment equals the
worker's, except for variables that only our own code reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from headrace.core.errors import HeadraceError
from headrace.core.types import Struct
from headrace.processes.health import orphans, patience
from headrace.processes.health.family import Child, current_family
from headrace.processes.health.own_stacks import VARIABLE
from headrace.processes.launch.child import CORES, GRACE
from headrace.processes.launch.forked_process import ForkedProcess
from headrace.processes.process_end import ending

SERVER = "headrace.run.worker.fork_server"

OWN = (orphans.PARENT, VARIABLE, CORES, "PYTEST_CURRENT_TEST")
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
                env={**environment, **orphans.of_this_process()},
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
        said = await _read(answer)
        if not said:
            raise CannotFork(await asyncio.to_thread(self._how_it_ended))
        given = msgspec.msgpack.decode(said, type=ForkReply)
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
