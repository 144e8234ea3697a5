"""Outages of a server: it is checked every second, its absence is noticed at once and waited out for a while, and its state is
restored when it is back. A server that the run has started itself is started again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from headrace.core.errors import ConfigError, HeadraceError, WorkerDied
from headrace.engine.remote.connection import Busy, Connection, Unreachable
from headrace.engine.remote.dialect import Dialect, ServerState
from headrace.processes.process_end import Deaths

T = TypeVar("T")

EVERY = 1.0
"""Seconds between two checks of a server."""
SILENT = 5.0
"""Seconds without an answer after which it counts as gone: a process that is stopped closes no connection."""
AGAIN = 0.2
"""Seconds between two attempts to reach a server that is gone."""
STARTING = 900.0
"""Seconds that a server of the run's own may take to come up: it loads a model and may compile it. Its death is noticed at once."""


class Dependent(Protocol):
    """An object whose state lies on the server."""

    async def restore(self, state: ServerState) -> None:
        """Restores the server's weights and adapters. Raises Unreachable if it is gone again."""

    def seen(self, state: ServerState) -> None: ...

    def lost(self, how: str, deaths: int) -> None: ...

    def given_up(self, error: Exception) -> None: ...


class OwnServer(Protocol):
    """The process of a server that belongs to the run."""

    @property
    def who(self) -> str: ...

    def start(self) -> None: ...

    def ended(self) -> str:
        """How the process ended; empty while it runs."""

    def error(self) -> str:
        """The error by which the process ended by itself; empty if there is none, as where it was killed."""

    def not_loaded(self) -> frozenset[str]:
        """Returns what it has warned of since the last call that it has not loaded."""

    def kill(self) -> None:
        """Ends it at once, with all that it started."""

    async def end(self) -> None:
        """Ends the process and waits until nothing of it is left."""


class Presence:
    def __init__(
        self,
        connection: Connection,
        dialect: Dialect,
        dependent: Dependent,
        *,
        patience: float,
        max_deaths: int,
        host: OwnServer | None = None,
    ) -> None:
        """`patience`: seconds that it may be away. `max_deaths`: processes of it that may end in a row. `host`: its process, if this run
        starts it; then it has `STARTING` seconds to come up."""
        self._connection, self._dialect, self._dependent = connection, dialect, dependent
        self._patience, self._host = patience, host
        self._was_up = False
        """Whether the present process has answered."""
        self._has_served = False
        """Whether any process has done what a request asked for."""
        self._deaths, self._boot = Deaths(max_deaths), ""
        self._since = 0.0
        """The time from which on it has been up."""
        self._up, self._missed = asyncio.Event(), asyncio.Event()
        self._room, self._vacant = asyncio.Event(), asyncio.Event()
        """Whether a process may be started; whether there is none, because the last one ended."""
        self._room.set()
        self._why = ""
        self._outage: asyncio.Future[None] | None = None
        self._given_up: asyncio.Future[None] | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def open(self) -> ServerState:
        """Waits until the server answers, and then watches it. Raises WorkerDied if it never answers, ConfigError if it ends before."""
        if self._host:
            self._host.start()
        self._given_up = asyncio.get_running_loop().create_future()
        state = await self._found()
        self._boot = state.boot
        self._begin()
        self._keeping = asyncio.get_running_loop().create_task(self._keep())
        return state

    @property
    def outage(self) -> asyncio.Future[None]:
        """Done as soon as the server is missed the next time."""
        assert self._outage is not None
        return self._outage

    def miss(self, why: str) -> None:
        """Notes that a request got no answer."""
        if self._up.is_set():
            self._deaths.after(asyncio.get_running_loop().time() - self._since)
            self._why = why
            self._up.clear()
            self._missed.set()
            if not self.outage.done():
                self.outage.set_result(None)

    def served(self) -> None:
        """Notes that a request was answered with tokens or scores."""
        self._has_served = True

    async def doubt(self, why: str) -> None:
        """One answer was lost: it is missed unless it answers now, and is the process that it was."""
        try:
            state = await self._dialect.look(self._connection, SILENT)
        except (Unreachable, Busy) as error:
            self.miss(str(error))
        else:
            if state.boot != self._boot:
                self.miss(why)

    async def until_up(self) -> None:
        """Waits until the server is up. Raises the error that ended the watch for good."""
        await self._until(self._up)

    async def _until(self, *any_of: asyncio.Event) -> None:
        assert self._given_up is not None
        while not (any(event.is_set() for event in any_of) or self._given_up.done()):
            events: list[asyncio.Future[Any]] = [asyncio.ensure_future(event.wait()) for event in any_of]
            await asyncio.wait([self._given_up, *events], return_when=asyncio.FIRST_COMPLETED)
            for event in events:
                event.cancel()
        if self._given_up.done():
            self._given_up.result()

    async def retrying(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Asks again when the server is back."""
        while True:
            await self.until_up()
            try:
                return await ask()
            except Unreachable as error:
                await self.doubt(str(error))
                await asyncio.sleep(AGAIN)

    async def vacating(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Asks the server to give its device up, again when it is back. Returns when it has, or when its process has ended. The run's own server
        is not started again before `may_start`: a new process would take the device from whoever has it then."""
        self._room.clear()
        while True:
            await self._until(self._up, self._vacant)
            if self._vacant.is_set():
                return
            try:
                await ask()
                return
            except Unreachable as error:
                await self.doubt(str(error))
                await asyncio.sleep(AGAIN)

    def may_start(self) -> None:
        self._room.set()

    @property
    def is_vacant(self) -> bool:
        """Whether the run's own server has ended, and is not started again before `may_start`."""
        return self._vacant.is_set()

    def give_up(self, error: Exception) -> None:
        assert self._given_up is not None
        if not self._given_up.done():
            self._up.clear()
            self._given_up.set_exception(error)
            self._given_up.exception()  # the watcher raises it; without one it is no error
            self._dependent.given_up(error)

    async def absence(self) -> str:
        """Returns the reason as soon as the server is missed; at once if it is missed now."""
        await asyncio.shield(self.outage)
        return self._why

    async def watch(self) -> None:
        assert self._given_up is not None
        await asyncio.shield(self._given_up)

    async def close(self) -> None:
        if self._keeping:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._outage = asyncio.get_running_loop().create_future()
        self._missed.clear()
        self._was_up, self._since = True, asyncio.get_running_loop().time()
        self._up.set()

    async def _keep(self) -> None:
        try:
            while True:
                await self._while_there()
                await self._back()
        except Exception as error:  # no other task learns of the error that ends this one
            self.give_up(error if isinstance(error, HeadraceError) else WorkerDied("engine", f"was lost: {error!r}"))

    async def _while_there(self) -> None:
        while not self._missed.is_set():
            try:
                state = await self._dialect.look(self._connection, SILENT)
            except (Unreachable, Busy) as error:
                self.miss(str(error))
                return
            if state.boot != self._boot:
                self.miss("it was started anew")
                return
            self._dependent.seen(state)
            try:
                async with asyncio.timeout(EVERY):
                    await self._missed.wait()
            except TimeoutError:
                continue

    async def _back(self) -> None:
        """Returns when it is there again, with the weights that it had."""
        while True:
            state = await self._found()
            if state.boot != self._boot:
                self._boot = state.boot
                if self._host is None:
                    self._died(f"at {self._connection.url} ended", self._why)
            try:
                await self._dependent.restore(state)
            except (Unreachable, Busy) as error:
                self._why = str(error)
                continue
            self._begin()
            return

    def _died(self, who: str, how: str) -> None:
        self._deaths.add()
        self._dependent.lost(how, self._deaths.total)
        if self._deaths.too_many:
            raise WorkerDied("engine", f"{who}; {self._deaths.said('engine.max_deaths')}")

    async def _found(self) -> ServerState:
        """Raises WorkerDied where it does not come back in time."""
        began = asyncio.get_running_loop().time()
        patience = max(self._patience, STARTING) if self._host else self._patience
        try:
            async with asyncio.timeout(patience) as deadline:
                while True:
                    try:
                        return await self._dialect.look(self._connection, SILENT)
                    except (Unreachable, Busy) as error:
                        self._why = str(error)
                    if self._host and self._is_gone(self._host, began):
                        deadline.reschedule(None)
                        await self._start_again(self._host)
                        deadline.reschedule(asyncio.get_running_loop().time() + patience)
                    await asyncio.sleep(AGAIN)
        except TimeoutError:
            message = f"at {self._connection.url} was away for {patience:g} s (engine.patience): {self._why}"
            raise WorkerDied("engine", message) from None

    def _is_gone(self, host: OwnServer, missed: float) -> bool:
        """Returns whether the run's own server has died, and counts that. Ends it where it was up and has been silent too long since `missed`."""
        if how := host.ended():
            self._refuse_hopeless(host, how)
            self._was_up = False
            self._died(f"{host.who} {how}", how)
            return True
        if self._was_up and asyncio.get_running_loop().time() - missed > self._patience:
            host.kill()
        return False

    async def _start_again(self, host: OwnServer) -> None:
        self._vacant.set()
        await self._room.wait()
        self._vacant.clear()
        host.start()

    def _refuse_hopeless(self, host: OwnServer, how: str) -> None:
        """Raises ConfigError for a server that would end in the same way again, because nothing of it has ever worked: the first process
        ended before it was up, or one ended with an error before any has served a request. vLLM finds out only in its first forward pass
        that it has no kernel for a model."""
        if not self._boot:
            raise ConfigError(f"{host.who} did not come up: it {how}")
        if not self._has_served and host.error():
            raise ConfigError(f"{host.who} came up and ended before it had served a request: it {how}")
