"""Workers elsewhere, which have connected to the run: those that joined, and those that a cluster placed. And the places that have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import msgspec

from headrace.core.errors import ConfigError, WorkerDied
from headrace.core.protocols import Heard, Launcher
from headrace.facts.facts import WorkerJoined
from headrace.facts.telemetry import Telemetry
from headrace.processes.connected import ConnectedWorker
from headrace.processes.joining.greeting import Arrival, Arrived, Kind, Terms
from headrace.processes.wire import RankStart
from headrace.processes.worker_place import PlaceSettings, WorkerPlace
from headrace.settings.extras import EXTRAS, install, is_installed

T = TypeVar("T")


ONE_MACHINE = "two machines, only several network namespaces of one"
"""The part of engines elsewhere that was never tried."""


class Seats(NamedTuple):
    """The launchers of a run's workers."""

    engines: Launcher
    trainer: Launcher
    hosts: Launcher
    """Those of user hosts."""


@dataclass(frozen=True, kw_only=True)
class SeatsWanted:
    """All that a place must know to open the seats of a run."""

    settings: PlaceSettings
    seats: Mapping[Kind, Sequence[str]]
    """The names of the seats, by what their workers offer."""
    threads: Mapping[Kind, int]
    """The threads of each engine, and of each rank of the trainer; 0: as many as its machine has cores for it."""
    terms: Terms
    code: Mapping[Kind, Terms]
    """The terms of those who run the user's code."""
    logs: Path
    telemetry: Telemetry


class ElsewherePlace(WorkerPlace):
    """The base of places on other machines."""

    elsewhere = True
    untried = ONE_MACHINE
    needs: ClassVar[tuple[str, str] | None] = None
    """The extra with its package, and the package's name in words."""

    def check(self, settings: PlaceSettings) -> None:
        """Raises ConfigError for what a run can know before it listens anywhere."""
        if self.needs and not is_installed(EXTRAS[self.needs[0]].module):
            extra, words = self.needs
            raise ConfigError(
                f'orchestration.kind = "{self.name}" needs {words}, which is not installed: {install(extra)}'
            )

    def open(self, wanted: SeatsWanted) -> AbstractAsyncContextManager[Seats]:
        """Raises ConfigError if the run cannot listen, or if nobody can take its seats."""
        raise NotImplementedError


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
