"""Keeps the worker of an engine running: replaces it when it dies, `max_deaths` times in a row, and then gives the engine up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec

from headrace.core.errors import ConfigError, HeadraceError, IdentityError, WorkerDied
from headrace.core.protocols import Heard, Job, Launcher, Worker
from headrace.processes.process_end import Deaths
from headrace.processes.wire import unpack
from headrace.run.worker.worker_messages import LAST_WORDS, LastWords

T = TypeVar("T")


class WorkerOwner(Protocol):
    """The owner of the worker. The keeper calls it when the worker starts, is replaced, dies or is given up."""

    async def begin(self, worker: Worker) -> None:
        """Makes a new process ready to work. Called for the first one and for each replacement."""

    async def resume_in(self, worker: Worker) -> None:
        """Gives a replacement the weights and requests that the dead process had."""

    def went_down(self, forgive: Callable[[], None] | None) -> None:
        """The process that was up has died. `forgive`: takes this death off the count; None: it is no death, the process has left."""

    def died(self, how: str, deaths: int) -> None: ...

    def given_up(self, error: Exception) -> None: ...


class Keeper:
    def __init__(self, launcher: Launcher, job: Job, max_deaths: int, ward: WorkerOwner, heard: Heard) -> None:
        self._launcher, self._job, self._ward, self._heard = launcher, job, ward, heard
        self._worker = launcher.worker(job, self._hear)
        self._said = ""
        """The last words of the present process."""
        self._deaths = Deaths(max_deaths)
        self._lost: asyncio.Future[None] | None = None
        """Carries the error once the worker is given up."""
        self._keeping: asyncio.Task[None] | None = None
        self._up, self._down = asyncio.Event(), asyncio.Event()
        self._how = ""
        """How the last process ended."""
        self._since = 0.0
        """The time at which the last process was ready."""

    async def launch(self) -> None:
        """Starts the process. It imports its libraries while the caller does other work."""
        await self._worker.start()

    async def open(self) -> None:
        self._lost = asyncio.get_running_loop().create_future()
        await self._ward.begin(self._worker)
        self._set_up(True)
        self._keeping = asyncio.get_running_loop().create_task(self._keep())

    @property
    def is_up(self) -> bool:
        return self._up.is_set()

    @property
    def is_lost(self) -> bool:
        """Whether the worker was given up."""
        return self._lost is not None and self._lost.done()

    async def ask(self, method: str, payload: Any, returns: type[T]) -> T:
        """Calls a method; calls it again on the replacement if the process dies meanwhile."""
        return await self.retrying(lambda worker: worker.call(method, payload, returns))

    async def retrying(self, ask: Callable[[Worker], Awaitable[T]]) -> T:
        while True:
            await self.until_up()
            worker = self._worker
            try:
                return await ask(worker)
            except WorkerDied:
                if worker is self._worker:
                    self._set_up(False)

    async def ask_once(self, method: str) -> None:
        """Calls a method of the current process only. Its death raises nothing: the caller handles that case itself."""
        with contextlib.suppress(WorkerDied):
            await self._worker.call(method, None, type(None))

    def push(self, method: str, payload: object) -> None:
        with contextlib.suppress(WorkerDied):  # the next process is given all pending requests anyway
            self._worker.push(method, payload)

    async def until_up(self) -> None:
        """Waits until a process is up. Raises the error with which the worker was given up."""
        assert self._lost is not None
        while not (self._up.is_set() or self._lost.done()):  # it may have died again before this task runs
            up: asyncio.Future[Any] = asyncio.ensure_future(self._up.wait())
            await asyncio.wait([self._lost, up], return_when=asyncio.FIRST_COMPLETED)
            up.cancel()
        if self._lost.done():
            self._lost.result()

    async def absence(self) -> str:
        """Returns how the process ended, as soon as none is up; at once if none is up now."""
        await self._down.wait()
        return self._how or "has no process"

    async def watch(self) -> None:
        assert self._lost is not None
        await asyncio.shield(self._lost)

    def give_up(self, error: Exception) -> None:
        assert self._lost is not None
        if not self._lost.done():
            self._lost.set_exception(error)
            self._lost.exception()  # marks it as retrieved: asyncio would warn if nobody calls `watch`
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
                how = self._how = f"{how}: {self._said}" if self._said else how
                self._set_up(False)
                if not self._worker.left:
                    self._deaths.add()
                await self._worker.end()
                self._ward.died(how, self._deaths.total)
                if self._deaths.too_many:
                    raise WorkerDied(who, f"{how}; {self._deaths.said('engine.max_deaths')}")
                await self._replace()
        except Exception as error:  # else this task would end in silence, and its callers would wait for ever
            self.give_up(error if isinstance(error, HeadraceError) else _irreplaceable(who, error))

    async def _replace(self) -> None:
        """Raises WorkerDied if no process can be started. One that dies while it starts counts as a death."""
        self._worker, self._said = self._launcher.worker(self._job, self._hear), ""
        await self._worker.start()
        with contextlib.suppress(WorkerDied):  # it died while it started: `_keep` counts that
            await self._ward.begin(self._worker)
            await self._ward.resume_in(self._worker)
            self._set_up(True)

    def _hear(self, method: str, payload: msgspec.Raw) -> None:
        if method != LAST_WORDS:
            self._heard(method, payload)
            return
        words = unpack(payload, LastWords)
        self._said = words.why
        if words.error:
            self.give_up((IdentityError if words.error == "IdentityError" else ConfigError)(words.why))

    def _set_up(self, up: bool) -> None:
        now = asyncio.get_running_loop().time()
        if up:
            self._since = now
        elif self._up.is_set():
            forgive = self._deaths.after(now - self._since)
            self._ward.went_down(None if self._worker.left else forgive)
        for event, holds in ((self._up, up), (self._down, not up)):
            event.set() if holds else event.clear()


def _irreplaceable(who: str, error: Exception) -> WorkerDied:
    """The error of a replacement that could not take over, for instance because it could not load the weights."""
    died = WorkerDied(who, f"died and could not be replaced: {error or repr(error)}")
    died.__cause__ = error
    return died
