"""The worker's end of a user host: it offers to run the user's code, reward functions or environments, for a run elsewhere, and starts the
processes that the run asks for.

    controller                                   user host                         process of the user's code
    HostedSite    ─── start ─────────────▶       loads the code once, to see that it can
                  ─── spawn, tell, kill ─▶       OwnSite.spawn       ── stdin ──▶   reward_worker, environment_worker
                  ◀── said, gone, pulse ──                           ◀─ stdout ─

The processes are those that a run has on its own machine, with the same frames. A host passes their bytes on and reads none of them. Deadlines
stay with the run, and the time in which nothing was heard of a host is no part of them. The controller's end is
`run/clients/hosted_site.py`; whether the user's files are the run's is found out in `processes/joining/same_model.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.printing import say
from headrace.core.types import Struct
from headrace.episodes.environments.workers.environment_pool import FunctionSettings, check_function
from headrace.episodes.scoring.workers.processes import check_functions
from headrace.processes.asked_process import OWN_SITE, RunningProcess, UserProgram
from headrace.processes.joining.dial import refuse
from headrace.processes.joining.greeting import Terms
from headrace.processes.joining.same_model import code_problem
from headrace.processes.wire import Frame, WorkerEnd, answer, begun, unpack, vital

# --- The messages between the controller and a user host.


PULSE = 1.0
"""Seconds between two pulses of a host."""


class RewardsLoaded(Struct, frozen=True):
    """Reward functions that a host must be able to load."""

    specs: tuple[str, ...]
    sandbox: str
    """The settings of programs that they run."""


class UserHostStart(Struct, frozen=True, kw_only=True):
    """The first call. A host that cannot load all of it is none for this run."""

    code: Terms
    """The user's files, and the packages that they import (`same_model.py`)."""
    rewards: tuple[RewardsLoaded, ...] = ()
    environments: tuple[FunctionSettings, ...] = ()


# -- pushes of the controller; `shut` (close its input) and `kill` have the number of a process alone ---------------------------------


class SpawnAsked(Struct, frozen=True):
    number: int
    who: str
    """The process's name in messages."""
    words: list[str]
    """The module that it runs, and its arguments."""


class ProcessBytes(Struct, frozen=True):
    """Bytes for the input of a process (`tell`) or from its output (`said`). Empty: its output has ended."""

    number: int
    data: bytes


# -- pushes of the host; a `pulse` has the seconds for which each process had to wait for a core, by number ---------------------------


class ProcessGone(Struct, frozen=True):
    number: int
    how: str
    """How it ended: `ended with exit code 1`."""


# --- The worker's end of a user host
# It starts the processes that the run asks for, and passes bytes on.


PIECE = 1 << 16
"""Bytes of output that are passed on at once."""


def serve_user_code(end: WorkerEnd, inbox: queue.Queue[Frame]) -> None:
    """Serves until the connection ends, and the process with it."""
    frame = inbox.get()
    start = unpack(frame.payload, UserHostStart)
    answer(end, frame, lambda: load(start))
    begun()
    asyncio.run(_Host(end, start.code).serve(inbox))


def load(start: UserHostStart) -> None:
    """Raises ConfigError if this machine cannot load the user's code."""
    try:
        if problem := code_problem(start.code):
            raise ConfigError(problem)
        for reward in start.rewards:
            check_functions(reward.specs, reward.sandbox)
        for settings in start.environments:
            check_function(settings)
    except ConfigError as error:
        say(f"this machine cannot serve the run: {error}")
        raise


class _Host:
    def __init__(self, end: WorkerEnd, code: Terms) -> None:
        self._end, self._code = end, code
        self._orders: dict[int, asyncio.Queue[Frame]] = {}
        """The orders for each process, from before it is there until it has ended."""
        self._running: dict[int, RunningProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, inbox: queue.Queue[Frame]) -> None:
        loop = asyncio.get_running_loop()

        def pass_on() -> None:
            while True:
                loop.call_soon_threadsafe(self._obey, inbox.get())

        threading.Thread(target=vital, args=(pass_on,), daemon=True).start()
        while True:
            await asyncio.sleep(PULSE)
            self._end.push("pulse", {number: process.waited(process.pid) for number, process in self._running.items()})

    def _obey(self, frame: Frame) -> None:
        match frame.method:
            case "spawn":
                asked = unpack(frame.payload, SpawnAsked)
                self._orders[asked.number] = asyncio.Queue()
                self._keep(self._run(asked))
            case "tell":
                self._pass(unpack(frame.payload, ProcessBytes).number, frame)
            case "shut" | "kill":
                self._pass(unpack(frame.payload, int), frame)

    def _pass(self, number: int, frame: Frame) -> None:
        if number in self._orders:  # else it has ended meanwhile
            self._orders[number].put_nowait(frame)

    def _keep(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, asked: SpawnAsked) -> None:
        """Starts a process, and passes on what it says until it has ended."""
        if problem := code_problem(self._code):  # it would compute something else than the processes before it
            refuse(f"the user's code has changed since this worker joined: {problem}")
        number = asked.number
        try:
            process = await OWN_SITE.spawn(UserProgram(who=asked.who, words=asked.words, log=None))
        except OSError as error:  # no memory, no descriptors
            self._over(number, f"could not be started: {error}")
            return
        self._running[number] = process
        obeying = self._keep(_order(process, self._orders[number]))
        while data := await process.reports.read(PIECE):
            self._end.push("said", ProcessBytes(number, data))
        self._end.push("said", ProcessBytes(number, b""))
        how = await process.gone()
        obeying.cancel()
        del self._running[number]
        self._over(number, how)

    def _over(self, number: int, how: str) -> None:
        del self._orders[number]
        self._end.push("gone", ProcessGone(number, how))


async def _order(process: RunningProcess, orders: asyncio.Queue[Frame]) -> None:
    while True:
        frame = await orders.get()
        with contextlib.suppress(ConnectionError, RuntimeError):  # it has ended, or closed its input
            match frame.method:
                case "tell":
                    process.orders.write(unpack(frame.payload, ProcessBytes).data)
                case "shut":
                    process.orders.close()
                case "kill":
                    process.kill()
