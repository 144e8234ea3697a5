"""The worker of an engine, kept alive: a dead one is replaced at once, a number of times; then the engine is given up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from headrace.errors import HeadraceError, WorkerDied
from headrace.protocols import Heard, Job, Launcher, Worker

T = TypeVar("T")


class WorkerOwner(Protocol):
    """Whose worker it is."""

    async def begin(self, worker: Worker) -> None:
        """Makes a process ready to work, the first one and each that replaces it."""

    async def resume_in(self, worker: Worker) -> None:
        """Gives a process that replaces another what that one had."""

    def died(self, how: str, deaths: int) -> None: ...

    def given_up(self, error: Exception) -> None: ...


class Keeper:
    def __init__(self, launcher: Launcher, job: Job, max_deaths: int, ward: WorkerOwner, heard: Heard) -> None:
        self._launcher, self._job, self._max_deaths, self._ward, self._heard = launcher, job, max_deaths, ward, heard
        self._worker = launcher.worker(job, heard)
        self._deaths = 0
        self._lost: asyncio.Future[None] | None = None
        """Raises what ended it for good."""
        self._keeping: asyncio.Task[None] | None = None
        self._up = asyncio.Event()

    async def launch(self) -> None:
        """Starts the process, which imports what it needs beside whatever else goes on."""
        await self._worker.start()

    async def open(self) -> None:
        self._lost = asyncio.get_running_loop().create_future()
        await self._ward.begin(self._worker)
        self._up.set()
        self._keeping = asyncio.get_running_loop().create_task(self._keep())

    @property
    def is_up(self) -> bool:
        return self._up.is_set()

    @property
    def is_lost(self) -> bool:
        """For good."""
        return self._lost is not None and self._lost.done()

    async def ask(self, method: str, payload: Any, returns: type[T]) -> T:
        """Asks again after a death."""
        return await self.retrying(lambda worker: worker.call(method, payload, returns))

    async def retrying(self, ask: Callable[[Worker], Awaitable[T]]) -> T:
        while True:
            await self.until_up()
            worker = self._worker
            try:
                return await ask(worker)
            except WorkerDied:
                if worker is self._worker:
                    self._up.clear()

    async def ask_once(self, method: str) -> None:
        """Of the process that is there now. A death is no error: whoever asks provides for it."""
        with contextlib.suppress(WorkerDied):
            await self._worker.call(method, None, type(None))

    def push(self, method: str, payload: object) -> None:
        with contextlib.suppress(WorkerDied):  # what is pending is asked of the next process
            self._worker.push(method, payload)

    async def until_up(self) -> None:
        """Returns with a process that is there at this very moment. Raises what ended it for good."""
        assert self._lost is not None
        while not (self._up.is_set() or self._lost.done()):  # it may have died again before this task has its turn
            up: asyncio.Future[Any] = asyncio.ensure_future(self._up.wait())
            await asyncio.wait([self._lost, up], return_when=asyncio.FIRST_COMPLETED)
            up.cancel()
        if self._lost.done():
            self._lost.result()

    async def watch(self) -> None:
        assert self._lost is not None
        await asyncio.shield(self._lost)

    def give_up(self, error: Exception) -> None:
        assert self._lost is not None
        if not self._lost.done():
            self._lost.set_exception(error)
            self._lost.exception()  # whoever watches raises it; nobody watching is no error
            self._ward.given_up(error)

    def kill(self) -> None:
        self._worker.kill()

    async def close(self) -> None:
        if self._keeping:
            self._keeping.cancel()
        await self._worker.end()

    # -- inside ---------------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        who = self._job.who
        try:
            while True:
                how = await self._worker.watch()
                self._up.clear()
                self._deaths += 1
                await self._worker.end()
                self._ward.died(how, self._deaths)
                if self._deaths > self._max_deaths:
                    raise WorkerDied(who, f"{how}; it was its death no. {self._deaths} (engine.max_deaths allows "
                                     f"{self._max_deaths})")  # fmt: skip
                await self._replace()
        except Exception as error:  # nobody else hears of what ends this task, and all who wait for it would wait on
            self.give_up(error if isinstance(error, HeadraceError) else _irreplaceable(who, error))

    async def _replace(self) -> None:
        """Raises WorkerDied where no process can be started. One that dies while it starts counts as a death."""
        self._worker = self._launcher.worker(self._job, self._heard)
        await self._worker.start()
        with contextlib.suppress(WorkerDied):  # died again while starting: the loop counts it
            await self._ward.begin(self._worker)
            await self._ward.resume_in(self._worker)
            self._up.set()


def _irreplaceable(who: str, error: Exception) -> WorkerDied:
    """What the new process could not do: load weights that do not fit any more, say."""
    died = WorkerDied(who, f"died and could not be replaced: {error or repr(error)}")
    died.__cause__ = error
    return died
