"""Workers elsewhere, which have connected to the run: those that joined, and those that a cluster placed. And the places that have them."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import msgspec

from headrace.core.errors import ConfigError, WorkerDied
from headrace.core.protocols import Heard, Job, Launcher
from headrace.facts.facts import WorkerJoined
from headrace.facts.telemetry import Telemetry
from headrace.processes.joining.greeting import LEAVE, LEAVING, SILENCE, Arrival, Arrived, Kind, Terms
from headrace.processes.joining.listener import Listener, listening
from headrace.processes.wire import ConnectedWorker, RankStart
from headrace.processes.worker_place import PlaceSettings, WorkerPlace
from headrace.settings.extras import EXTRAS, install, is_installed
from headrace.settings.process_config import LOCAL_HOSTS
from headrace.settings.secrets import read_token
from headrace.web.tls import server_context

T = TypeVar("T")


ONE_MACHINE = "two machines, only several network namespaces of one"
"""The part of engines elsewhere that was never tried."""


class Seats(NamedTuple):
    """The launchers of a run's workers."""

    engines: Launcher
    trainer: Launcher
    hosts: Launcher
    """The launcher of user hosts."""
    watch: Callable[[], Awaitable[None]] | None = None
    """Raises an error if the place can have no workers any more. None: it is asked nothing."""


class Team(NamedTuple):
    """Seats next to each other whose workers exchange much for every layer, and belong on one node."""

    size: int = 1
    must: bool = True
    """Whether they cannot be on several nodes, rather than only had better not."""


ALONE = Team()


@dataclass(frozen=True, kw_only=True)
class SeatsWanted:
    """All that a place must know to open the seats of a run."""

    settings: PlaceSettings
    seats: Mapping[Kind, Sequence[str]]
    """The names of the seats, by what their workers offer."""
    team: Team
    """The ranks of the trainer that belong on one node."""
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

    @property
    def local_rank(self) -> int:
        return self._arrived.hello.local_rank if self._arrived else 0

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


# --- Workers that were started elsewhere, and offered themselves to the run.


LAST_WORDS = 1.0
"""Seconds for which the last words of a lost worker are awaited. They come over another connection."""


def secrets_of(settings: PlaceSettings) -> tuple[str, ssl.SSLContext | None]:
    """Returns the token, and the context of TLS if there is one. Raises ConfigError for files that cannot be used."""
    token = read_token(Path(settings.token_file), "orchestration.token_file")
    if len(token) < 16:
        raise ConfigError(
            f"orchestration.token_file {settings.token_file} holds a token that could be guessed; use at least 16 random characters "
            f"(openssl rand -hex 32 > {settings.token_file})"
        )
    return token, server_context(Path(settings.cert), Path(settings.key)) if settings.cert else None


def invitation(settings: PlaceSettings, seats: Mapping[Kind, Sequence[str]], address: str) -> str:
    ca = " --ca CERTIFICATE" if settings.cert else ""
    offers = ", or ".join("trainer and --again for a rank" if kind == "trainer" else kind for kind in seats)
    return (
        f"missing until they join: {', '.join(name for names in seats.values() for name in names)}. Start each with: headrace worker --connect "
        f"{address} --token-file {settings.token_file} --offers {offers}{ca}"
    )


class JoinPlace(ElsewherePlace):
    """Any machine, on which somebody starts `headrace worker`. It also seats those who run the user's code, wherever the engines are."""

    name = "join"
    about = "its engines are started elsewhere, on any machine, with `headrace worker`, and connect to the run"
    own = ("token_file", "cert", "key", "reconnect", "listen", "trainer")
    joins = True
    instead_of_cores = ", and start headrace worker under taskset"
    instead_of_gpus = ", and start headrace worker with CUDA_VISIBLE_DEVICES"

    def words(self, settings: PlaceSettings, gpus: int) -> str:
        return f"of other machines, joining at {settings.listen}"

    def check(self, settings: PlaceSettings) -> None:
        secrets_of(settings)

    @asynccontextmanager
    async def open(self, wanted: SeatsWanted) -> AsyncIterator[Seats]:
        settings, telemetry = wanted.settings, wanted.telemetry
        token, tls = secrets_of(settings)
        opening = Listener(
            token,
            settings.host,
            settings.port,
            terms=wanted.terms,
            kinds=list(wanted.seats),
            code=wanted.code,
            tls=tls,
            reconnect=settings.reconnect,
            say=telemetry.warn,
        )
        async with listening(opening, settings, telemetry.warn) as listener:
            if not tls and settings.host not in LOCAL_HOSTS:
                telemetry.warn(
                    f"workers connect to {listener.address} without TLS: whoever can read the network between the machines can read the token; use "
                    "a private network, or set orchestration.cert and orchestration.key"
                )
            telemetry.warn(invitation(settings, wanted.seats, listener.address))
            launcher = JoinLauncher(listener, telemetry, away=settings.reconnect, logs=wanted.logs)
            yield Seats(launcher, launcher, launcher)


class JoinLauncher:
    """Protocol `Launcher`. A worker begins when one that was started elsewhere takes its seat."""

    def __init__(
        self,
        arrivals: Arrivals,
        telemetry: Telemetry,
        silence: float = SILENCE,
        away: float = 0.0,
        logs: Path | None = None,
    ) -> None:
        """`away`: seconds for which the connection of a worker may be broken. `logs`: the directory for what workers print; None keeps nothing."""
        self._logs = logs
        self._arrivals, self._telemetry, self._silence, self._away = arrivals, telemetry, silence, away
        self._taken: set[str] = set()
        """The seats that had a worker before."""

    def worker(self, job: Job, heard: Heard) -> JoinedWorker:
        if job.kind == "shared trainer" or job.inherited:
            raise ConfigError(f"the {job.who} cannot join from elsewhere: it shares files with another process")
        again = job.who in self._taken
        self._taken.add(job.who)
        log = self._logs / f"{job.who.replace(' ', '-')}.log" if self._logs else None
        seated = {"silence": self._silence, "away": self._away}
        return JoinedWorker(job, heard, self._arrivals, self._telemetry, again=again, log=log, **seated)


class JoinedWorker(SeatedWorker):
    """Protocol `Worker`."""

    def __init__(
        self,
        job: Job,
        heard: Heard,
        arrivals: Arrivals,
        telemetry: Telemetry,
        *,
        silence: float,
        away: float,
        again: bool,
        log: Path | None,
    ) -> None:
        """`again`: whether it replaces one that was lost. The run then goes on without it if it can, and its other waits have deadlines."""

        def heard_here(method: str, payload: msgspec.Raw) -> None:
            self._lives()
            if method != LEAVING:
                heard(method, payload)
            elif not self.left:
                self.left = True
                self._lost("")  # its connection lasts until `end`, which releases it

        super().__init__(job.who, heard_here, telemetry, silence, away)
        self._job, self._arrivals, self._again, self._log = job, arrivals, again, log

    async def start(self) -> None:
        """Returns when a worker has taken the seat. Raises StalledError."""
        self._begin()
        arrival = self._arrivals.expect(self._job.kind)
        try:
            async with self._telemetry.waits.named(
                "start", f"a worker to join at {self._arrivals.address} as {self.who}", endless=self._again
            ):
                arrived = await arrival
        finally:
            arrival.cancel()
        self._seat(arrived, arrived.model_dir)
        if arrived.words and self._log:
            hello = arrived.hello
            arrived.words.begin(self._log, f"{hello.host}, process {hello.pid}, from {arrived.address}")

    async def call(self, method: str, payload: Any, returns: type[T]) -> T:
        answer = await super().call(method, payload, returns)
        self._lives()
        return answer

    def _lives(self) -> None:
        if self._arrived and (words := self._arrived.words):
            words.lives()

    async def end(self) -> None:
        """The worker ends by itself when it reads this."""
        with contextlib.suppress(WorkerDied):
            self.push(LEAVE, None)
        await self.channel.close()

    def kill(self) -> None:
        """Closes the connection, at which the worker ends itself."""
        if self._arrived:
            self._arrived.writer.close()

    async def _how_it_ended(self, wrong: str) -> str:
        assert self._arrived
        hello, message = self._arrived.hello, ""
        if self.left:
            return f"on {hello.host} (process {hello.pid}) has left: it was asked to end there"
        if (words := self._arrived.words) and self._log:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS):
                    await words.ended.wait()
            log = f"logs/{self._log.name}"
            last = words.last_lines
            message = f"; the end of {log}: {last}" if last else f"; it said nothing of it (its output is in {log})"
        return f"on {hello.host} (process {hello.pid}) is lost: {wrong or 'its connection has ended'}{message}"
