"""A worker without a process, for tests and the fault simulation. It uses the real `Channel` and its frames; the network below may
delay, repeat or lose messages.

Messages that were sent before the process is killed still arrive, perhaps followed by half a frame, and then the connection ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from headrace.core.protocols import Heard, Job
from headrace.processes.frames import HEAD
from headrace.processes.wire import BEAT, ConnectedWorker, Frame, decode, name_of, pack, pack_payload
from headrace.run.worker.worker_messages import TrainerStart
from headrace.weight_sync.shared_memory import SharedMemory


class Network(Protocol):
    """Decides how long messages take and how often they arrive."""

    @property
    def scale(self) -> float:
        """Seconds that a message takes on average."""

    def seconds(self, scale: float) -> float:
        """The duration of the next event, whose average is `scale` seconds."""

    def copies(self) -> int:
        """The number of times that the next message arrives: 0 if it is lost, 2 if it is repeated."""


class InstantNetwork:
    """Every message arrives at once, exactly once."""

    scale = 0.0

    def seconds(self, scale: float) -> float:
        return 0.0

    def copies(self) -> int:
        return 1


class Pipe:
    """One direction of a stream. Messages arrive in order, each after its own delay. Protocol `wire.Writer`."""

    def __init__(self, network: Network, arrive: Callable[[bytes], None]) -> None:
        self._network, self._arrive = network, arrive
        self._under_way: deque[bytes] = deque()
        self._last = 0.0
        self._closed = False

    def write(self, data: bytes) -> None:
        for _ in range(self._network.copies()):
            self.put(data)

    def put(self, data: bytes) -> None:
        """Sends the data exactly once."""
        loop = asyncio.get_running_loop()
        self._last = max(self._last, loop.time() + self._network.seconds(self._network.scale))
        self._under_way.append(data)
        loop.call_at(self._last, lambda: self._arrive(self._under_way.popleft()))

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Sends an empty message, which stands for the end of the stream."""
        if not self._closed:
            self._closed = True
            self.put(b"")


class FakeProcess:
    """The worker's end. It lives as long as `serve` runs."""

    def __init__(self, network: Network | None = None) -> None:
        self.network = network or InstantNetwork()
        self.to_controller: Pipe
        self.alive, self.ended = True, asyncio.Event()
        self.how = "ended with exit code 0"
        self.inbox: deque[Frame] = deque()
        self.number = 0
        """Number of the next frame to the controller."""
        self._heard, self._arrived = asyncio.Event(), 0
        self._task = asyncio.get_running_loop().create_task(self._live())

    async def serve(self) -> None:
        raise NotImplementedError

    async def _live(self) -> None:
        try:
            await self.serve()
        except Died:
            pass
        except Exception as error:
            self.die(f"ended with exit code 1: {error!r}")

    def arrive(self, data: bytes) -> None:
        if not data:
            self.die("ended with exit code 0")
        elif self.alive:
            frame = decode(data[HEAD:])
            if frame.number > self._arrived:
                self.die(f"missed message {self._arrived} of the controller")
            elif frame.number == self._arrived:
                self._arrived += 1
                if frame.method != BEAT:
                    self.inbox.append(frame)
                self._heard.set()

    async def heard(self) -> None:
        """Waits until the inbox holds a frame or `wake` was called."""
        self._heard.clear()
        if not self.inbox:
            await self._heard.wait()

    async def receive(self) -> Frame:
        while not self.inbox:
            await self.heard()
        return self.inbox.popleft()

    def wake(self) -> None:
        self._heard.set()

    def push(self, method: str, payload: Any) -> None:
        self.send(Frame(0, method, pack_payload(payload)))

    def reply(self, to: Frame, payload: Any) -> None:
        self.send(Frame(to.id, to.method, pack_payload(payload)))

    def fail(self, to: Frame, error: Exception) -> None:
        self.send(Frame(to.id, to.method, pack_payload(str(error)), name_of(error)))

    def send(self, frame: Frame) -> None:
        """Sends a frame under the next number."""
        if self.alive:
            self.to_controller.write(pack(msgspec.structs.replace(frame, number=self.number)))
            self.number += 1

    def die(self, how: str) -> None:
        if self.alive:
            self.alive, self.how = False, how
            self.ended.set()
            self.to_controller.close()
            self._task.cancel()


class Died(Exception):
    """Raised inside a process to end it in the middle of its work."""


Begin = Callable[[], FakeProcess]


class FakeWorker(ConnectedWorker):
    """Protocol `Worker`."""

    def __init__(self, who: str, begin: Begin, heard: Heard, network: Network, silence: float | None = None) -> None:
        super().__init__(who, heard, silence)
        self._begin_process, self._network = begin, network
        self.process: FakeProcess | None = None

    async def start(self) -> None:
        self._begin()
        await asyncio.sleep(self._network.seconds(1.0))
        self.process = process = self._begin_process()
        reader = asyncio.StreamReader()
        process.to_controller = Pipe(self._network, lambda data: reader.feed_data(data) if data else reader.feed_eof())
        self.channel.open(reader, Pipe(self._network, process.arrive))

    async def end(self) -> None:
        await self.channel.close()
        self.kill()

    def kill(self) -> None:
        if self.process:
            self.process.die("was killed by SIGKILL")

    async def _how_it_ended(self, wrong: str) -> str:
        assert self.process is not None
        how = f"was ended: {wrong}" if wrong else self.process.how
        await asyncio.sleep(self._network.seconds(0.01))
        return how


class FakeLauncher:
    """Protocol `Launcher`. `begin`: for each kind of job, a function that makes its process."""

    def __init__(self, begin: Mapping[str, Begin], network: Network | None = None) -> None:
        self._begin, self._network = begin, network or InstantNetwork()

    def worker(self, job: Job, heard: Heard) -> FakeWorker:
        return FakeWorker(job.who, self._begin[job.kind], heard, self._network)


def bare_start(**more: Any) -> TrainerStart:
    """The start message of a trainer that has no model. Its transport is never opened: what stands for weights travels by other ways."""
    bare = {"model_dir": "", "train": {}, "algo": {}, "seed": 0, "serving_dtype": "", "keep_routing": False}
    return TrainerStart(**{**bare, "transport": SharedMemory(-1), **more})
