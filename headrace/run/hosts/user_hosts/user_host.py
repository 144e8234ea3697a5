"""The worker's end of a user host: it starts the processes that the run asks for, and passes bytes on."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Mapping
from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.printing import say
from headrace.episodes.environments.workers.environment_pool import check_function
from headrace.episodes.scoring.workers.processes import check_functions
from headrace.processes.asked_process import OWN_SITE, RunningProcess, UserProgram
from headrace.processes.joining.dial import refuse
from headrace.processes.joining.same_model import code_problem
from headrace.processes.wire import Frame, WorkerEnd, answer, begun, unpack, vital
from headrace.run.hosts.user_hosts.host_messages import (
    PULSE,
    ProcessBytes,
    ProcessGone,
    SpawnAsked,
    UserHostStart,
)

PIECE = 1 << 16
"""Bytes of output that are passed on at once."""


def serve_user_code(end: WorkerEnd, inbox: queue.Queue[Frame]) -> None:
    """Serves until the connection ends, and the process with it."""
    frame = inbox.get()
    start = unpack(frame.payload, UserHostStart)
    answer(end, frame, lambda: load(start))
    begun()
    asyncio.run(_Host(end, start.files).serve(inbox))


def load(start: UserHostStart) -> None:
    """Raises ConfigError if this machine cannot load the user's code."""
    try:
        if problem := code_problem(start.files):
            raise ConfigError(problem)
        for one in start.rewards:
            check_functions(one.specs, one.sandbox)
        for settings in start.environments:
            check_function(settings)
    except ConfigError as error:
        say(f"this machine cannot serve the run: {error}")
        raise


class _Host:
    def __init__(self, end: WorkerEnd, files: Mapping[str, str]) -> None:
        self._end, self._files = end, files
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
            self._end.push("pulse", {number: one.waited(one.pid) for number, one in self._running.items()})

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
        if problem := code_problem(self._files):  # it would compute something else than the processes before it
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
