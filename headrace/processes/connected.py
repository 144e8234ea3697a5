"""The base class of workers that are reached over a stream: protocol `Worker`, except for starting and ending the process."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from headrace.core.errors import WorkerDied
from headrace.core.protocols import Heard
from headrace.processes.wire import Channel

T = TypeVar("T")


class ConnectedWorker:
    left = False

    def __init__(self, who: str, heard: Heard, silence: float | None = None, away: float = 0.0) -> None:
        self.who = who
        self.channel = Channel(who, heard, self._lost, silence, away)
        self._ended: asyncio.Future[str] | None = None
        self._reporting: asyncio.Task[None] | None = None

    @property
    def door(self) -> str:
        return ""

    async def call(self, method: str, payload: Any, returns: type[T]) -> T:
        try:
            return await self.channel.call(method, payload, returns)
        except WorkerDied:
            raise WorkerDied(self.who, await self.watch()) from None

    def push(self, method: str, payload: Any) -> None:
        self.channel.push(method, payload)

    async def watch(self) -> str:
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        raise NotImplementedError

    async def _how_it_ended(self, wrong: str) -> str:
        """Waits for the process where that is possible, and says how it ended. `wrong`: why we killed it, or empty."""
        raise NotImplementedError

    def _begin(self) -> None:
        self._ended = asyncio.get_running_loop().create_future()

    def _not_started(self, why: object) -> WorkerDied:
        """The error of a worker that could not be started. It also wakes callers of `watch`."""
        assert self._ended is not None
        self._ended.set_result(how := f"could not be started: {why}")
        return WorkerDied(self.who, how)

    def _lost(self, wrong: str) -> None:
        """Called when the connection ends. For a process on this machine the kernel closes it at once when the process dies. `wrong`: why
        the connection was given up (a damaged message, silence), or empty."""
        if wrong:
            self.kill()
        self._reporting = asyncio.ensure_future(self._report(wrong))

    async def _report(self, wrong: str) -> None:
        try:
            how = await self._how_it_ended(wrong)
        except Exception as error:  # such as no thread to wait in: callers of `watch` must be woken in any case
            how = f"closed its connection; how it ended could not be determined: {error!r}"
        assert self._ended is not None
        if not self._ended.done():
            self._ended.set_result(how)
