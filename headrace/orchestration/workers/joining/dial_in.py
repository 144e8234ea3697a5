"""Workers that the run starts on this machine, and that connect over TCP as those of other machines would."""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path
from typing import Any

from headrace.orchestration.workers.connected import ConnectedWorker
from headrace.orchestration.workers.joining.greeting import ARRIVAL, SEAT, SILENCE, TOKEN, Arrival
from headrace.orchestration.workers.joining.listener import Listener
from headrace.orchestration.workers.launch.child import ChildProcess
from headrace.protocols import Heard, Job


class DialInLauncher:
    """Protocol `Launcher`: starts processes on this machine, which connect over TCP as those of other machines would."""

    def __init__(self, logs: Path, listener: Listener, silence: float = SILENCE) -> None:
        self._logs, self._listener, self._silence = logs, listener, silence

    def worker(self, job: Job, heard: Heard) -> DialInWorker:
        return DialInWorker(job, ChildProcess(job.who, self._logs), self._listener, heard, self._silence)


class DialInWorker(ConnectedWorker):
    """Protocol `Worker`."""

    def __init__(
        self, job: Job, process: ChildProcess, listener: Listener, heard: Heard, silence: float = SILENCE
    ) -> None:
        super().__init__(job.who, heard, silence)
        self._job, self._process, self._listener = job, process, listener

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self) -> None:
        """Returns when the worker has connected or is lost (`watch` then says how)."""
        self._begin()
        seat = secrets.token_hex(8)
        arrival = self._listener.expect(self._job.kind, seat)
        try:
            lifeline = self._spawn(seat)
        except OSError as error:
            raise self._not_started(error) from error
        if await self._arrives(arrival, lifeline):
            self.channel.open(arrival.result().reader, arrival.result().writer)

    def _spawn(self, seat: str) -> int:
        """Starts the process, and returns our end of a pipe. The kernel closes the other end when the process ends, whatever ends it."""
        ours, theirs = os.pipe()
        variables = {TOKEN: self._listener.token, SEAT: seat}
        try:
            self._process.spawn(self._job, ["--connect", self._listener.address], [theirs], variables)
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return ours

    async def _arrives(self, arrival: Arrival, lifeline: int) -> bool:
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[None] = loop.create_future()
        loop.add_reader(lifeline, gone.cancel)
        try:
            waited: list[asyncio.Future[Any]] = [arrival, gone]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED, timeout=ARRIVAL)
        finally:
            loop.remove_reader(lifeline)
            os.close(lifeline)
        if not arrival.done():
            self._lost("" if gone.done() else f"it did not connect within {ARRIVAL:g} seconds")
            arrival.cancel()
            return False
        return True

    async def end(self) -> None:
        await self.channel.close()
        await self._process.end()

    def kill(self) -> None:
        self._process.kill()

    async def _how_it_ended(self, wrong: str) -> str:
        return await asyncio.to_thread(self._process.how_it_ended, wrong)
