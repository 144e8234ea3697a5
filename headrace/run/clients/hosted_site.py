"""A worker elsewhere that runs the user's code, as the machine that pools of processes see (protocol `Site`)."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.core.protocols import Job, Launcher, Worker
from headrace.facts.facts import WorkerLost
from headrace.facts.telemetry import Telemetry
from headrace.processes.asked_process import RunningProcess, SiteLost, UserProgram
from headrace.processes.health.patience import waited_for_a_core
from headrace.processes.joining.greeting import Terms
from headrace.processes.wire import unpack
from headrace.run.clients.keeper import Keeper
from headrace.run.hosts.user_host import PULSE, ProcessBytes, ProcessGone, SpawnAsked, UserHostStart

LATE = 2.5 * PULSE
"""Seconds without a pulse that are nothing unusual. Longer silence is no part of the deadlines of processes there."""


class HostedProcess:
    """Protocol `RunningProcess`, and `OrderPipe` for its own input."""

    def __init__(self, number: int, site: HostedSite) -> None:
        self.pid, self.lost = -number, False
        self.reports, self.orders = asyncio.StreamReader(), self
        self.starved = 0.0
        """Seconds for which it had to wait for a core, as its host says."""
        self._site, self._number = site, number
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def write(self, data: bytes, /) -> None:
        self._tell("tell", ProcessBytes(self._number, data))

    async def drain(self) -> None:
        """Does nothing: what the run sends is small."""

    def close(self) -> None:
        self._tell("shut", self._number)

    def kill(self) -> None:
        self._tell("kill", self._number)

    def _tell(self, method: str, payload: Any) -> None:
        if not self._ended.done():  # else its host does not know it any more, or is another one
            self._site.push(method, payload)

    def waited(self, thread: int) -> float:
        return self.starved + self._site.silence if thread == self.pid else waited_for_a_core(thread)

    async def gone(self) -> str:
        return await asyncio.shield(self._ended)

    def said(self, data: bytes) -> None:
        self.reports.feed_data(data) if data else self.reports.feed_eof()

    def end(self, how: str, lost: bool = False) -> None:
        if not self._ended.done():
            self.lost = lost
            self.reports.feed_eof()
            self._ended.set_result(how)


class HostedSite:
    """Protocol `Site`, and `WorkerOwner`. Its seat is taken by another worker when one is lost; there is no limit to that."""

    def __init__(self, job: Job, telemetry: Telemetry) -> None:
        self.up = False
        self.changed: Callable[[], object] = lambda: None
        """Is called when it has come up, or is lost."""
        self._job, self._telemetry = job, telemetry
        self._keeper: Keeper | None = None
        self._start = UserHostStart(code=Terms("", {}))
        self._numbers = itertools.count(1)
        self._processes: dict[int, HostedProcess] = {}
        self._heard_at = self._silent = 0.0
        """The time of the last pulse, and the seconds of unusual silence before it."""

    async def open(self, launcher: Launcher, start: UserHostStart) -> None:
        """Returns when a worker has taken the seat, and has loaded the user's code. Raises StalledError and WorkerDied."""
        self._start = start
        self._keeper = Keeper(launcher, self._job, sys.maxsize, self, self._heard)
        await self._keeper.launch()
        await self._keeper.open()

    async def spawn(self, program: UserProgram) -> RunningProcess:
        if not self.up:
            raise SiteLost(f"could not be started: there is no {self._job.who}")
        assert program.foreign is None, "a host starts our own modules only"
        number = next(self._numbers)
        process = self._processes[number] = HostedProcess(number, self)
        self.push("spawn", SpawnAsked(number, program.who, list(program.words)))
        return process

    def push(self, method: str, payload: Any) -> None:
        if self._keeper:
            self._keeper.push(method, payload)

    @property
    def silence(self) -> float:
        """Seconds in which unusually little was heard of it."""
        return self._silent + max(0.0, self._now() - self._heard_at - LATE)

    async def close(self) -> None:
        """Releases its worker. Processes that still run there end with it."""
        self.up = False
        if self._keeper:
            await self._keeper.close()
        self._lose("has been released")

    # -- WorkerOwner ------------------------------------------------------------------------------------------------------------

    async def begin(self, worker: Worker) -> None:
        await worker.call("start", self._start, type(None))
        self._heard_at = self._now()
        self.up = True
        self.changed()

    async def resume_in(self, worker: Worker) -> None:
        """Does nothing: its processes are started anew by those who need them."""

    def went_down(self, forgive: Callable[[], None] | None) -> None:
        self.up = False

    def died(self, how: str, deaths: int) -> None:
        self.up = False
        self._telemetry.record(WorkerLost(self._telemetry.clock(), self._job.who, how, deaths))
        self._lose(how)
        self.changed()

    def given_up(self, error: Exception) -> None:
        self.up = False
        self._telemetry.warn(f"the {self._job.who} is given up: {error}")
        self._lose(str(error))

    # -- inside -----------------------------------------------------------------------------------------------------------------

    def _lose(self, how: str) -> None:
        for process in self._processes.values():
            process.end(f"was lost with its machine (the {self._job.who} {how})", lost=True)
        self._processes.clear()

    def _heard(self, method: str, payload: msgspec.Raw) -> None:
        match method:
            case "said":
                piece = unpack(payload, ProcessBytes)
                if process := self._processes.get(piece.number):
                    process.said(piece.data)
            case "gone":
                gone = unpack(payload, ProcessGone)
                if process := self._processes.pop(gone.number, None):
                    process.end(gone.how)
            case "pulse":
                self._silent, self._heard_at = self.silence, self._now()
                for number, seconds in unpack(payload, dict[int, float]).items():
                    if process := self._processes.get(number):
                        process.starved = seconds

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
