"""A user host without processes, for tests in virtual time. Each process is a function of the test that answers its input."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from headrace.processes.wire import unpack
from headrace.run.hosts.user_host import PULSE, ProcessBytes, ProcessGone, SpawnAsked
from headrace.testing.fake_worker import FakeProcess, Network

Say = Callable[[bytes], None]
Program = Callable[[asyncio.StreamReader, Say], Awaitable[None]]
"""Reads its input, and says bytes. The process ends when it returns."""


class FakeUserHost(FakeProcess):
    """The programs of its processes are all the same."""

    def __init__(self, program: Program, network: Network | None = None) -> None:
        super().__init__(network)
        self._program = program
        self._inputs: dict[int, asyncio.StreamReader] = {}
        self._processes: dict[int, asyncio.Task[None]] = {}
        self.frozen = False
        """Whether it is stopped, as by SIGSTOP: it sends no pulses."""
        self.starved = 0.0
        """Seconds for which each of its processes had to wait for a core, as its pulses say."""

    async def serve(self) -> None:
        pulse = asyncio.create_task(self._pulse())
        try:
            while True:
                frame = await self.receive()
                match frame.method:
                    case "start":
                        self.reply(frame, None)
                    case "spawn":
                        number = unpack(frame.payload, SpawnAsked).number
                        self._inputs[number] = asyncio.StreamReader()
                        self._processes[number] = asyncio.create_task(self._run(number))
                    case "tell":
                        told = unpack(frame.payload, ProcessBytes)
                        self._inputs[told.number].feed_data(told.data)
                    case "shut":
                        self._inputs[unpack(frame.payload, int)].feed_eof()
                    case "kill":
                        self._processes[unpack(frame.payload, int)].cancel()
        finally:
            pulse.cancel()
            for process in self._processes.values():
                process.cancel()

    async def _run(self, number: int) -> None:
        how = "ended with exit code 0"
        try:
            await self._program(self._inputs[number], lambda data: self.push("said", ProcessBytes(number, data)))
        except asyncio.CancelledError:
            how = "was killed by SIGKILL"
        self.push("said", ProcessBytes(number, b""))
        self.push("gone", ProcessGone(number, how))

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(PULSE)
            if not self.frozen:
                self.push("pulse", dict.fromkeys(self._processes, self.starved))
