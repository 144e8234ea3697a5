"""A process of ours that runs the user's code and can be killed with all that the code started: reward functions, environments. It runs on
this machine, or on another one (`Site`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol, TypeVar

from headrace.core.printing import echo_traceback, guard_streams
from headrace.processes.frames import StreamEnded
from headrace.processes.health import orphans
from headrace.processes.health.family import Child, current_family
from headrace.processes.health.own_stacks import VARIABLE
from headrace.processes.health.patience import communicate, waited_for_a_core, within
from headrace.version import PACKAGE

T = TypeVar("T")

LOAD_SECONDS = 120.0
"""Seconds that importing the user's file may take."""

_numbers = itertools.count(1)
"""Numbers for the names of such processes."""


def command(module: str, arguments: Sequence[str]) -> list[str]:
    # -P: a file random.py in the working directory must not replace Python's; the user's files still find those beside them
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(file: Path | None = None) -> dict[str, str]:
    """`file`: the file into which the process writes its stacks when it is asked for them."""
    # Several such processes run beside the engine: each takes one core and does not spin, unless the user sets these variables.
    variables = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", **os.environ}
    package = str(PACKAGE.parent)
    if package not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):  # run from a checkout
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return variables | orphans.of_this_process() | ({VARIABLE: str(file)} if file else {})


def run_once(module: str, arguments: Sequence[str]) -> tuple[int, bytes, bytes]:
    """Returns exit code, standard output and standard error of a process that loads the user's code and ends.

    Raises subprocess.TimeoutExpired after `LOAD_SECONDS`. Blocks."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command(module, arguments), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment()
    ) as process:
        try:
            out, err = communicate(process, LOAD_SECONDS)
        finally:
            process.kill()
    return process.returncode, out, err


def ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


class ProcessLost(Exception):
    """Raised when a process has ended; the message says how."""


class SiteLost(ProcessLost):
    """Raised when the machine of a process is lost. Nothing is known against what the process was working on."""


class OrderPipe(Protocol):
    """The methods of `asyncio.StreamWriter` that the input of a process has."""

    def write(self, data: bytes, /) -> None: ...

    async def drain(self) -> None: ...

    def close(self) -> None: ...


class RunningProcess(Protocol):
    """A process that runs somewhere."""

    lost: bool
    """Whether its machine is lost, and it with it."""

    @property
    def pid(self) -> int:
        """Its process id; a negative number for one of another machine."""

    @property
    def reports(self) -> asyncio.StreamReader:
        """Its standard output."""

    @property
    def orders(self) -> OrderPipe:
        """Its standard input."""

    def waited(self, thread: int) -> float:
        """Returns the seconds in which that thread (the process's main one, or one of ours) could not run (`patience.within`)."""

    def kill(self) -> None:
        """Kills it with all that the user's code has started."""

    async def gone(self) -> str:
        """Returns how it ended, when it has ended."""


@dataclass(frozen=True, kw_only=True)
class UserProgram:
    """The program of a process."""

    who: str
    """The process's name in messages."""
    words: Sequence[str]
    """One of our modules, and its arguments; with `foreign` a whole command."""
    log: Path | None
    """The file for standard error, if it runs on this machine; None: ours."""
    stacks: Path | None = None
    """The file into which it writes its stacks when it is asked for them, if it runs on this machine."""
    foreign: Mapping[str, str] | None = None
    """The variables of a program that is none of our modules."""


class Site(Protocol):
    """A machine on which the user's code runs.

    >>> OwnSite().up
    True
    """

    @property
    def up(self) -> bool:
        """Whether processes can be started there now."""

    async def spawn(self, program: UserProgram) -> RunningProcess:
        """Raises OSError if the system starts no process, and SiteLost if the machine is lost."""


class _Child:
    """Protocol `RunningProcess`: a child of this process."""

    lost = False

    def __init__(self, process: asyncio.subprocess.Process, program: UserProgram) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.pid, self.orders, self.reports = process.pid, process.stdin, process.stdout
        self._process, self._stacks, self._family = process, program.stacks, current_family()
        self._family.started(Child(program.who, process.pid, program.stacks))

    def waited(self, thread: int) -> float:
        return waited_for_a_core(thread)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def gone(self) -> str:
        code = await self._process.wait()
        self._family.ended(self.pid)
        if self._stacks is not None:
            self._stacks.unlink(missing_ok=True)
        return ending(code)


class OwnSite:
    """This machine. Protocol `Site`."""

    up = True

    async def spawn(self, program: UserProgram) -> RunningProcess:
        ours = program.foreign is None
        with _opened(program.log) as log:
            process = await asyncio.create_subprocess_exec(
                *(command(program.words[0], program.words[1:]) if ours else program.words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(program.stacks) if ours else program.foreign,
                start_new_session=True,  # Ctrl-C reaches the controller only; a kill reaches what the user's code started too
            )
        return _Child(process, program)


OWN_SITE = OwnSite()


class Sites:
    """The machines on which one kind of the user's code runs."""

    def __init__(self, every: Sequence[Site] = (OWN_SITE,), up: Callable[[], Awaitable[None]] | None = None) -> None:
        """`up`: returns when one of them is up; needed unless one always is."""
        self.every, self._until_up = tuple(every), up
        self._listeners: list[Callable[[], object]] = []

    def listen(self, changed: Callable[[], object]) -> None:
        """`changed` is called whenever one of them has come up, or is lost."""
        self._listeners.append(changed)

    def changed(self) -> None:
        for tell in self._listeners:
            tell()

    async def least(self, load: Callable[[Site], float]) -> Site:
        """Returns the one of the least load, as soon as one is up."""
        while not (up := [site for site in self.every if site.up]):
            assert self._until_up is not None, "this machine is always up"
            await self._until_up()
        return min(up, key=load)


HERE = Sites()


class UserProcess:
    """One process. Its standard input and output carry frames."""

    def __init__(
        self,
        kind: str,
        words: Sequence[str],
        log: Path | None,
        foreign: Mapping[str, str] | None = None,
        site: Site = OWN_SITE,
    ) -> None:
        """`kind`: the first word of its name in messages; the others are those of `UserProgram`, with `site` for where it runs."""
        self.who, self.site = f"{kind} {next(_numbers)}", site
        stacks = log.with_name(f"{self.who.replace(' ', '-')}.stacks") if log and foreign is None else None
        self._program = UserProgram(who=self.who, words=words, log=log, stacks=stacks, foreign=foreign)
        self._process: RunningProcess | None = None
        self.why = ""
        """How it ended."""
        self.alive = False

    @property
    def log(self) -> Path | None:
        """The file with its standard error."""
        return self._program.log

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def reports(self) -> asyncio.StreamReader:
        assert self._process is not None
        return self._process.reports

    @property
    def orders(self) -> OrderPipe:
        assert self._process is not None
        return self._process.orders

    async def spawn(self) -> None:
        """Raises ProcessLost if the system starts no process, or the machine is lost."""
        try:
            self._process = await self.site.spawn(self._program)
        except OSError as error:  # no memory, no descriptors, no directory for its log
            self.why = f"could not be started: {error}"
            raise ProcessLost(self.why) from error

    async def within(self, seconds: float, answer: Awaitable[T]) -> T:
        """Returns its answer. Raises TimeoutError if it did not give it within `seconds` in which it could run."""
        assert self._process is not None
        return await within(self.pid, seconds, answer, self._process.waited)

    def how_lost(self) -> ProcessLost:
        """The error for what it was working on."""
        return SiteLost(self.why) if self._process and self._process.lost else ProcessLost(self.why)

    def kill(self, why: str = "") -> None:
        self.alive = False
        self.why = self.why or why
        if self._process is not None:
            self._process.kill()

    async def gone(self) -> str:
        """Returns how it ended, when it has ended."""
        assert self._process is not None
        return await self._process.gone()

    async def end(self, why: str) -> None:
        """Kills it, and returns when it has ended."""
        self.kill(why)
        if self._process is not None:
            self.orders.close()
            await self.gone()


def _opened(log: Path | None) -> Any:
    """Opens the file for standard error, or inherits ours if there is none."""
    return log.open("ab") if log is not None else contextlib.nullcontext()


# --- inside of it ------------------------------------------------------------------------------------------------------------


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Returns the standard input and output, for frames. From then on what the user's code prints goes to standard error, where no
    terminal obeys it, and its standard input is empty."""
    orders, reports = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    guard_streams()
    return orders, reports


class FrameSender:
    """Writes frames from any thread."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._one = stream, threading.Lock()

    def send(self, frame: bytes) -> None:
        with self._one:
            self._stream.write(frame)
            self._stream.flush()


def obey_until_end(read: Callable[[], Any], obey: Callable[[Any], object]) -> None:
    """Starts a thread that reads frames, so that the process ends with its parent whatever the user's function is doing. `read` raises
    StreamEnded at the end of the input. The process ends whenever this thread does: without it, it would wait for frames for ever."""

    def run() -> NoReturn:
        try:
            while True:
                obey(read())
        except StreamEnded:
            pass
        except Exception:
            echo_traceback()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgrp() == os.getpid():  # the leader of a process group, which holds all that the function started
                os.killpg(0, signal.SIGKILL)
        os._exit(0)

    threading.Thread(target=run, daemon=True).start()


def run_to_end(loop: asyncio.AbstractEventLoop, awaited: asyncio.Future[Any]) -> None:
    """Runs the loop until `awaited` is done. A KeyboardInterrupt or SystemExit of one of the user's tasks reaches whoever awaits that task, and
    asyncio lets it out of the loop as well: it must not end all other tasks."""
    while not awaited.done():
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            loop.run_until_complete(awaited)
