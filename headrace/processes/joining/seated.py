"""The base class of workers elsewhere, which have connected to the run: of those that joined, and of those that a cluster placed."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import msgspec

from headrace.core.errors import ConfigError, WorkerDied
from headrace.core.protocols import Heard
from headrace.facts.facts import WorkerJoined
from headrace.facts.telemetry import Telemetry
from headrace.processes.connected import ConnectedWorker
from headrace.processes.joining.greeting import Arrival, Arrived
from headrace.processes.wire import RankStart

T = TypeVar("T")


class Arrivals(Protocol):
    """The place where workers connect: a `Listener`, or its fake.

    >>> from headrace.testing.fake_arrivals import FakeArrivals
    >>> FakeArrivals().address
    '127.0.0.1:0'
    """

    address: str
    token: str

    def expect(self, kind: str, seat: str = "") -> Arrival:
        """A future of the next worker of that kind."""


class SeatedWorker(ConnectedWorker):
    """Protocol `Worker`, except for its start and its end."""

    def __init__(self, who: str, heard: Heard, telemetry: Telemetry, silence: float, away: float = 0.0) -> None:
        super().__init__(who, heard, silence, away)
        self._telemetry = telemetry
        self._arrived: Arrived | None = None
        self._model_dir = ""
        """The model's directory on its machine."""

    def _seat(self, arrived: Arrived, model_dir: str) -> None:
        self._arrived, self._model_dir = arrived, model_dir
        self.channel.open(arrived.reader, arrived.writer)
        hello, clock = arrived.hello, self._telemetry.clock
        self._telemetry.record(WorkerJoined(clock(), self.who, hello.host, hello.pid, arrived.address))

    @property
    def door(self) -> str:
        return self._arrived.hello.door if self._arrived else ""

    async def call(self, method: str, payload: Any, returns: type[T]) -> T:
        if method != "start":
            return await super().call(method, payload, returns)
        own = msgspec.structs.replace(payload, model_dir=self._model_dir) if self._model_dir else payload
        if isinstance(own, RankStart):  # what one rank cannot do ends the run
            return await super().call(method, msgspec.structs.replace(own, door=self.door), returns)
        try:
            return await super().call(method, own, returns)
        except ConfigError as error:  # another machine may be able to
            self._lost(f"it cannot serve this run: {error}")
            raise WorkerDied(self.who, await self.watch()) from error
