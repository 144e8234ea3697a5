"""Worker processes in virtual time: the real `Worker` and `Channel`, over a socket that is late, repeats itself and loses things.

A process that is killed has sent what it has sent: that still arrives, perhaps with half a frame behind it, and then the end.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from headrace.faultsim.faults import Fault
from headrace.orchestration.workers.process import Worker
from headrace.orchestration.workers.wire import Channel, Frame, name_of, pack

_LENGTH = 4
_encode = msgspec.msgpack.encode


class Chance:
    """The seeded schedule of one life: how long everything takes, and what goes wrong on the way."""

    def __init__(self, seed: str, faults: tuple[Fault, ...], patience: float) -> None:
        """`patience`: seconds that nobody waits for."""
        self.random, self._patience = random.Random(seed), patience
        self._faults = {(one.kind, one.at): one for one in faults}
        self.befell: list[Fault] = []
        self.scale = self.random.choice([0.0, 0.01, 0.01, 0.3])
        """Seconds of a message."""
        self.slow = 1.0
        self._messages = 0

    def due(self, kind: str, at: int) -> Fault | None:
        fault = self._faults.pop((kind, at), None)  # type: ignore[arg-type]
        if fault:
            self.befell.append(fault)
        return fault

    def seconds(self, scale: float) -> float:
        """Often the same, sometimes none, sometimes long."""
        draw = self.random.random()
        return scale * (1.0 if draw < 0.5 else 0.0 if draw < 0.6 else self.random.expovariate(1.0))

    def stall(self, who: str, turn: int) -> float:
        """Seconds that a worker stands still before its `turn`."""
        if self.due(f"{who}_hangs", turn):
            return 1e9
        return 0.3 * self._patience if self.due(f"{who}_slow", turn) else 0.0

    def copies(self) -> int:
        """How often the next message arrives."""
        number, self._messages = self._messages, self._messages + 1
        if self.due("lose", number):
            return 0
        return 2 if self.due("repeat", number) else 1


class Pipe:
    """One direction of a socket: in order, each message as late as it likes."""

    def __init__(self, chance: Chance, arrive: Callable[[bytes], None]) -> None:
        self._chance, self._arrive = chance, arrive
        self._under_way: deque[bytes] = deque()
        self._last = 0.0
        self.closed = False

    def send(self, data: bytes, whole: bool = True) -> None:
        for _ in range(self._chance.copies() if whole else 1):
            self._put(data)

    def end(self) -> None:
        """An empty message is the end."""
        if not self.closed:
            self.closed = True
            self._put(b"")

    def _put(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        self._last = max(self._last, loop.time() + self._chance.seconds(self._chance.scale))
        self._under_way.append(data)
        loop.call_at(self._last, lambda: self._arrive(self._under_way.popleft()))


class _Writer:
    """What a `Channel` wants of an `asyncio.StreamWriter`."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def write(self, data: bytes) -> None:
        self._pipe.send(data)

    def is_closing(self) -> bool:
        return self._pipe.closed

    def close(self) -> None:
        self._pipe.end()


class _Line(Channel):
    """The controller's end."""

    def attach(self, process: Process) -> None:
        reader = asyncio.StreamReader()
        process.to_controller = Pipe(process.chance, lambda data: reader.feed_data(data) if data else reader.feed_eof())
        self._writer = _Writer(Pipe(process.chance, process.arrive))  # type: ignore[assignment]
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))


class Process:
    """A worker process. `serve` is its life; `handle` is called with each frame that arrives, in order."""

    who = ""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance
        self.to_controller: Pipe
        self.alive = True
        self.how = "ended with exit code 0"
        self.inbox: deque[Frame] = deque()
        self._heard = asyncio.Event()
        self._numbers, self._arrived = 0, 0
        self._task = asyncio.get_running_loop().create_task(self._live())

    async def serve(self) -> None:
        raise NotImplementedError

    async def _live(self) -> None:
        try:
            await self.serve()
        except _Died:
            pass
        except Exception as error:
            self.die(f"ended with exit code 1: {error!r}")

    def arrive(self, data: bytes) -> None:
        if not data:
            self.die("ended with exit code 0")
        elif self.alive:
            frame = msgspec.msgpack.decode(data[_LENGTH:], type=Frame)
            if frame.number > self._arrived:
                self.die(f"missed message {self._arrived} of the controller")
            elif frame.number == self._arrived:
                self._arrived += 1
                self.inbox.append(frame)
                self._heard.set()

    async def heard(self) -> None:
        """Returns when there is something in the inbox, or somebody called `wake`."""
        self._heard.clear()
        if not self.inbox:
            await self._heard.wait()

    def wake(self) -> None:
        self._heard.set()

    def push(self, method: str, payload: Any) -> None:
        self._tell(Frame(0, method, msgspec.Raw(_encode(payload))))

    def reply(self, to: Frame, payload: Any) -> None:
        self._tell(Frame(to.id, to.method, msgspec.Raw(_encode(payload))))

    def fail(self, to: Frame, error: Exception) -> None:
        self._tell(Frame(to.id, to.method, msgspec.Raw(_encode(str(error))), name_of(error)))

    def _tell(self, frame: Frame) -> None:
        if self.alive:
            self.to_controller.send(pack(msgspec.structs.replace(frame, number=self._numbers)))
            self._numbers += 1

    async def step_into(self, turn: int) -> None:
        """Before each turn of the worker: where its faults are."""
        if stall := self.chance.stall(self.who, turn):
            await asyncio.sleep(stall)
        if fault := self.chance.due(f"{self.who}_dies", turn):
            await asyncio.sleep(self.chance.seconds(0.1))
            if fault.share > 0.7:  # in the middle of a message
                self.to_controller.send(pack(Frame(0, "output", number=self._numbers))[: int(fault.share * 9)], False)
            self.die("was killed by SIGKILL (simulated)")
            raise _Died

    def die(self, how: str) -> None:
        if self.alive:
            self.alive, self.how = False, how
            self.to_controller.end()
            self._task.cancel()


class _Died(Exception):
    """The process has ended in the middle of its work."""


class SimulatedWorker(Worker):
    """The controller's handle of a simulated process."""

    def __init__(
        self, who: str, begin: Callable[[], Process], chance: Chance, on_push: Callable[[Frame], None] | None = None
    ) -> None:
        super().__init__(who, Path("simulated.log"), on_push)
        self.channel: _Line = _Line(who, on_push or (lambda frame: None), self._lost)
        self._begin, self._chance = begin, chance
        self.process: Process | None = None

    async def start(self, kind: str, fds: Any, cores: Any) -> None:
        self._ended = asyncio.get_running_loop().create_future()
        await asyncio.sleep(self._chance.seconds(1.0))
        self.process = self._begin()
        self.channel.attach(self.process)

    async def close(self) -> None:
        await self.channel.close()
        self.kill()

    def kill(self) -> None:
        if self.process:
            self.process.die("was killed by SIGKILL")

    def _lost(self, wrong: str) -> None:
        assert self._ended is not None and self.process is not None
        if wrong:
            self.kill()
        how, ended = f"was ended: {wrong}" if wrong else self.process.how, self._ended

        async def report() -> None:
            await asyncio.sleep(self._chance.seconds(0.01))
            if not ended.done():
                ended.set_result(how)

        self._reporting = asyncio.ensure_future(report())


Task = Coroutine[Any, Any, None]
