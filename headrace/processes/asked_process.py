"""A process that is asked over its pipes, and can be killed with all that it started: reward functions, environments, tasksets. It runs on
this machine, or on another one (`Site`)."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import os
import subprocess
import sys
import sysconfig
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from headrace.core.errors import ConfigError
from headrace.processes.frames import LONGEST, StreamEnded, read_frame
from headrace.processes.health import family
from headrace.processes.health.family import Child, current_family
from headrace.processes.health.patience import communicate, waited_for_a_core, within
from headrace.processes.health.stacks import VARIABLE
from headrace.processes.process_end import ending, signal_group
from headrace.version import PACKAGE

T = TypeVar("T")
Order = TypeVar("Order")
Report = TypeVar("Report")

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
    return variables | family.parent_variables() | ({VARIABLE: str(file)} if file else {})


def first_report(module: str, arguments: Sequence[str], what: str, limit: int = LONGEST) -> bytes:
    """Returns the first report of a process that loads the user's code (`what`, in words) once and ends. Raises ConfigError if there is none.
    Blocks."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command(module, arguments), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment()
    ) as process:
        try:
            out, err = communicate(process, LOAD_SECONDS)
        except subprocess.TimeoutExpired:
            raise ConfigError(too_slow(what)) from None
        finally:
            process.kill()
    try:
        return read_frame(io.BytesIO(out).read, limit)
    except StreamEnded:
        raise ConfigError(not_loaded(what, ending(process.returncode), err.decode(errors="replace"))) from None


def too_slow(what: str) -> str:
    """The sentence for code whose file does not end."""
    return f"loading {what} took more than {LOAD_SECONDS:g} s; move slow work out of the file's top level"


def not_loaded(what: str, how: str, printed: str) -> str:
    """The sentence for a process that ended before it had loaded the code."""
    return f"the process that loads {what} {how}; it said: {(printed.strip().splitlines() or ['nothing'])[-1]}"


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
        """The process id; a negative number for one of another machine."""

    @property
    def reports(self) -> asyncio.StreamReader:
        """The process's standard output."""

    @property
    def orders(self) -> OrderPipe:
        """The process's standard input."""

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
        signal_group(self.pid)

    async def gone(self) -> str:
        code = await self._process.wait()
        self._family.ended(self.pid)
        if self._stacks is not None:
            self._stacks.unlink(missing_ok=True)
        return ending(code)


class OwnSite:
    """This machine. Protocol `Site`."""

    up = True

    def __init__(self, problem: Callable[[], str] = str) -> None:
        """`problem`: says why no process of the user's code can be started now; empty if one can."""
        self._problem = problem

    async def spawn(self, program: UserProgram) -> RunningProcess:
        if problem := self._problem():
            raise OSError(problem)
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


class AskedProcess(Generic[Order, Report]):
    """One process: it is sent orders on its standard input, and reports on its standard output. A subclass says how these are written and
    read (`pack`, `receive`), and for what each report is meant (`accept`, `obey`, `forsake`)."""

    begins = "load", "the user's code"
    """Its work before its first report: a verb and its object."""
    begins_within = LOAD_SECONDS
    """Seconds in which it could run that its first report may take."""
    says = "message"
    """A report, in words."""
    silent = 0.0
    """Seconds in which it could run after which it is killed if it has reported nothing; 0: never."""
    farewell = 0.0
    """Seconds that it may take to end by itself once its input is closed; 0: it is killed at once."""

    def __init__(
        self,
        kind: str,
        words: Sequence[str],
        log: Path | None,
        foreign: Mapping[str, str] | None = None,
        site: Site = OWN_SITE,
    ) -> None:
        """`kind`: the first word of its name in messages; the others are those of `UserProgram`, with `site` for where it runs."""
        self.who, self.site, self.log = f"{kind} {next(_numbers)}", site, log
        stacks = log.with_name(f"{self.who.replace(' ', '-')}.stacks") if log and foreign is None else None
        self._program = UserProgram(who=self.who, words=words, log=log, stacks=stacks, foreign=foreign)
        self._process: RunningProcess | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._finishing: set[asyncio.Task[None]] = set()
        self.why = ""
        """How it ended."""
        self.alive = False

    # -- what it is sent and reports ------------------------------------------------------------------------------------------------

    def pack(self, order: Order) -> bytes:
        raise NotImplementedError

    async def receive(self) -> Report:
        """Reads the next report. Raises StreamEnded, and any other exception for nonsense."""
        raise NotImplementedError

    def first_order(self) -> Order | None:
        """Returns what it is sent before its first report."""
        return None

    def accept(self, first: Report) -> str:
        """Takes the first report. Returns why the process is of no use, in words that follow its name; empty if it is."""
        raise NotImplementedError

    def obey(self, report: Report) -> None:
        raise NotImplementedError

    def forsake(self) -> None:
        """Wakes all who wait for a report: there will be none."""
        raise NotImplementedError

    # -- its life -------------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when it can be asked. Raises ProcessLost if it cannot: from a TimeoutError if its first report took too long."""
        verb, what = self.begins
        try:
            await self._spawn()
            if (order := self.first_order()) is not None:
                self.send(order)
            first = await self.within(self.begins_within, self.receive())
        except TimeoutError as error:
            await self.end(f"did not {verb} {what} within {self.begins_within:g} s")
            raise ProcessLost(self.why) from error
        except StreamEnded:
            await self.end(f"{await self.gone()} while it {verb}ed {what}")
            raise self.how_lost() from None
        except asyncio.CancelledError:
            await self.end("was not needed any more")
            raise
        if problem := self.accept(first):
            await self.end(problem)
            raise ProcessLost(self.why)
        self.alive = True
        self._receiving = asyncio.create_task(self._receive())

    async def _spawn(self) -> None:
        """Raises ProcessLost if the system starts no process, or the machine is lost."""
        try:
            self._process = await self.site.spawn(self._program)
        except OSError as error:  # no memory, no descriptors, no directory for its log
            self.why = f"could not be started: {error}"
            raise ProcessLost(self.why) from error

    async def _receive(self) -> None:
        why = ""
        try:
            while True:
                self.obey(await (self.within(self.silent, self.receive()) if self.silent else self.receive()))
        except TimeoutError:
            why = "was killed, because nothing in it could run: a call that never gives up Python's interpreter, such as 9**9**9"
        except ConnectionError:
            pass
        except (
            Exception
        ) as error:  # nothing awaits this task: without this, whoever waits for a report would wait for ever
            why = f"was killed, because its {self.says} made no sense: {error!r}"
        self.kill(why)  # one that closed its pipe cannot be used, and may have left children
        self.orders.close()
        how = await self.gone()
        self.why = self.why or how
        self.forsake()

    def send(self, order: Order) -> None:
        # Not drained: most orders are small, and a process that reads nothing is killed for another reason.
        with contextlib.suppress(ConnectionError, RuntimeError):  # `_receive` finds out how the process ended
            self.orders.write(self.pack(order))

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs work that the process is still given before it is closed."""
        task = asyncio.create_task(work)
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def close(self) -> None:
        """Waits for what it still has to finish, and ends it. The process is gone on return."""
        if self._finishing:
            await asyncio.wait(set(self._finishing))
        if self.alive and self.farewell:
            self.orders.close()
            with contextlib.suppress(TimeoutError):
                await self.within(self.farewell, self.gone())
        await self.end("was closed")
        if self._receiving is not None:
            await asyncio.wait({self._receiving})

    # -- its end --------------------------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def reports(self) -> asyncio.StreamReader:
        return self._running.reports

    @property
    def orders(self) -> OrderPipe:
        return self._running.orders

    @property
    def _running(self) -> RunningProcess:
        assert self._process is not None
        return self._process

    async def within(self, seconds: float, answer: Awaitable[T]) -> T:
        """Returns its answer. Raises TimeoutError if it did not give it within `seconds` in which it could run."""
        return await within(self.pid, seconds, answer, self._running.waited)

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
        return await self._running.gone()

    async def end(self, why: str) -> None:
        """Kills it, and returns when it has ended."""
        self.kill(why)
        if self._process is not None:
            self.orders.close()
            await self.gone()


def _opened(log: Path | None) -> Any:
    """Opens the file for standard error, or inherits ours if there is none."""
    return log.open("ab") if log is not None else contextlib.nullcontext()
