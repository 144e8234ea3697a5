"""The engines of rollout hosts, behind the protocol `Engine`: what a run with a bus has in place of an engine of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from headrace.core.reports import Capabilities, EngineStats, LoadReport
from headrace.core.steps import SoFar, StepOutput
from headrace.core.types import Completion, Request
from headrace.core.weights import WeightUpdate
from headrace.engine.request_book import scoring
from headrace.facts.telemetry import Telemetry
from headrace.loop.own_groups import Suspects
from headrace.run.hosts.bus.bus_port import Bus, Notice
from headrace.run.hosts.bus_messages import RUN, WEIGHTS, GroupSizes, RequestErrand, RunNotice, WeightsNotice
from headrace.run.hosts.bus_run import BusDesk, BusGroups
from headrace.version import __version__

T = TypeVar("T")

EARLIER = 100
"""Processes of a run before this one that are remembered."""

SOON = 5.0
"""Seconds for which a run waits for its first host before it says how one is started."""

AGAIN = 1.0
"""Seconds after which the work at the bus is cancelled again, if it has not ended."""

GOODBYE = 10.0
"""Seconds in which a run that ends must have said so on the bus."""


class _OfSession(msgspec.Struct):
    """The fields by which a process of the run knows another one's notices."""

    session: str
    earlier: tuple[str, ...] = ()


class BusEngine:
    """Protocol `Engine`. Hosts carry out `partial.mode` themselves, so that there is nothing here to drain or to abort."""

    def __init__(
        self,
        where: str,
        open_bus: Callable[[], Awaitable[tuple[Bus, str]]],
        adapter: str,
        telemetry: Telemetry,
        *,
        sizes: GroupSizes,
        suspects: Suspects,
    ) -> None:
        """`where`: the address of the bus. `open_bus` also returns what it keeps, in words. `adapter`: the policy's; empty if all weights
        are trained."""
        self._where, self._open, self._adapter, self._telemetry = where, open_bus, adapter, telemetry
        self._sizes, self._suspects = sizes, suspects
        self.capabilities = Capabilities(context_length=0)
        self._session = secrets.token_hex(4)
        self._bus: Bus | None = None
        self._working: asyncio.Task[None] | None = None
        self._notice = RunNotice(self._session, __version__)
        self._updates: dict[str, WeightUpdate] = {}
        self._announced = False
        """Whether hosts were told of this process of the run."""
        self._begun = False
        """Whether a host has served the first weights of the policy."""
        self.trainer_died = False
        """Whether the engine is closed because the trainer has died: the hosts wait for the run to go on."""
        self._requests, self._scorings = itertools.count(), itertools.count()
        self._announcing, self._counted = asyncio.Lock(), 1
        self._pinned: dict[str, bytes] = {}
        """The notices of this process, by name."""
        self._moved = asyncio.Event()
        """Set when a host has come or gone, or serves other weights."""

    async def launch(self) -> None:
        """Opens the bus, as soon as it answers, and gives signs of life on it from then on. Does nothing the second time. Raises ConfigError if it
        cannot be used, and StalledError."""
        if self._bus:
            return
        async with self._telemetry.waits.named("start", f"the bus {self._where} to answer"):
            self._bus, self._kept = await self._open()
            self._notice = msgspec.structs.replace(self._notice, earlier=await self._earlier())
        self._desk = BusDesk(self._bus, self._session, self._telemetry, self._hosts_changed, self._suspects)
        await self._desk.begin()
        self._working = asyncio.ensure_future(self._desk.live())

    async def _earlier(self) -> tuple[str, ...]:
        """Returns the sessions of earlier processes of the run, the latest first."""
        assert self._bus
        if (found := await self._bus.newer(RUN)) is None:
            return ()
        try:
            before = msgspec.msgpack.decode(found.body, type=_OfSession)
        except ValueError:  # no process of ours has written it
            return ()
        return (before.session, *before.earlier)[:EARLIER]

    async def open(self, notice: RunNotice) -> None:
        """Announces the run, and returns when the first host is there. `notice`: without its session."""
        assert self._bus
        self._notice = msgspec.structs.replace(notice, session=self._session, earlier=self._notice.earlier)
        self._desk.mark = notice.mark
        await self._announce()
        await self._pin(RUN, msgspec.msgpack.encode(self._notice))
        self._announced = True
        await self._stop()
        if self._working and not self._working.cancelled():
            self._working.result()  # what has ended it
        self._working = asyncio.ensure_future(self._desk.run())
        late = asyncio.get_running_loop().call_later(SOON, self._desk.invite, f"headrace rollouts --bus {self._where}")
        try:
            async with self._telemetry.waits.named("start", f"a rollout host on {self._where} (headrace rollouts)"):
                first = await self._until(self._first_capabilities)
        finally:
            late.cancel()
        self.capabilities = msgspec.structs.replace(first, path=f"{first.path} ({self._kept})")

    def groups(self, in_flight: Collection[int]) -> BusGroups:
        """`in_flight`: the tickets that were in flight when an earlier process of the run ended."""
        self._desk.expect([str(ticket) for ticket in in_flight])
        return BusGroups(self._desk, self._session, self._telemetry.waits, self._sizes)

    async def generate(self, request: Request) -> Completion:
        key = f"request {self._session} {next(self._requests)}"
        reply = await self._desk.ask(key, RequestErrand(request, at_least=self._desk.newest))
        self._desk.forget(key)
        if reply.completion is None:
            raise ValueError(reply.refused)
        return reply.completion

    async def load(self, update: WeightUpdate, parts: int = 1) -> LoadReport:
        """Announces the weights: from now on no errand is begun with older ones (C1). Hosts fetch and prove them at their own pace. The first
        weights of the policy are awaited, so that no run begins that no host can serve."""
        name = update.adapter.name if update.adapter else ""
        is_first = name == self._adapter and name not in self._updates
        self._updates[name] = update
        if name == self._adapter:
            self._desk.announced(update.version)
        await self._announce()
        if is_first:
            await self._until(lambda: self._serves(update.version))
            self._begun = True
        return LoadReport(update.version, 0.0, 0.0)

    async def score(self, tokens: Sequence[int], adapter: str = "") -> Completion:
        return await self.generate(scoring(f"score/{next(self._scorings)}", tokens, priority=-1, adapter=adapter))

    async def drain(self) -> None:
        """Does nothing: see the class."""

    async def resume(self) -> None:
        """Does nothing: see the class."""

    async def abort(self) -> None:
        """Does nothing: see the class."""

    def unfinished(self, among: Iterable[str] | None = None) -> Mapping[str, SoFar]:
        """Returns nothing: tokens in flight stay with the hosts, and a group whose host is lost is sampled anew."""
        return {}

    def listen(self, listener: Callable[[StepOutput], None]) -> None:
        """Does nothing: see `unfinished`."""

    async def stats(self) -> EngineStats:
        return self._desk.stats

    async def watch(self) -> None:
        assert self._working
        await asyncio.shield(self._working)

    def kill(self) -> None:
        if self._working:
            self._working.cancel()

    async def close(self) -> None:
        """Says on the bus that the run is over, and takes its letters off. Does nothing the second time. A process that was never announced
        says nothing, and leaves the letters of an earlier one to the next."""
        await self._stop()
        if self._bus is None:
            return
        over = RunNotice(
            self._session,
            __version__,
            earlier=self._notice.earlier,
            over=True,
            begun=self._begun,
            died=self.trainer_died,
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE):
                if self._announced:
                    await self._bus.pin(RUN, msgspec.msgpack.encode(over))
                if self._announced or not self._desk.found_letters:
                    await self._bus.wipe()
        bus, self._bus = self._bus, None
        await bus.close()

    async def _stop(self) -> None:
        """Ends the work at the bus."""
        while self._working and not self._working.done():
            self._working.cancel()
            await asyncio.wait([self._working], timeout=AGAIN)

    def _serves(self, version: int) -> bool:
        return any(host.entry.version == version for host in self._desk.hosts.values())

    async def _announce(self) -> None:
        assert self._bus
        async with self._announcing:  # else an older notice could be the last one that is pinned
            self._counted = max(1, len(self._desk.hosts))
            weights = WeightsNotice(self._session, self._updates, self._counted)
            await self._pin(WEIGHTS, msgspec.msgpack.encode(weights))

    async def _pin(self, name: str, body: bytes) -> None:
        assert self._bus
        self._pinned[name] = body
        await self._bus.pin(name, body)

    async def _hosts_changed(self) -> None:
        """Every host reads what is announced, so that nothing is announced that they know."""
        assert self._bus
        self._moved.set()
        async with self._announcing:  # what is being pinned is not there yet
            there = {name: await self._bus.newer(name) for name in self._pinned}
        forgotten = any(self._is_lost(name, found) for name, found in there.items())
        if forgotten or self._counted != max(1, len(self._desk.hosts)):
            await self._announce()
        if forgotten:  # the bus has lost its memory, or the newest part of it
            await self._bus.register()
            await self._pin(RUN, msgspec.msgpack.encode(self._notice))

    def _is_lost(self, name: str, found: Notice | None) -> bool:
        """Whether the board has an earlier state again. The notice of a later process of the run, which nobody here can know, stays."""
        if found is None or found.body == self._pinned[name]:
            return found is None
        try:
            session = msgspec.msgpack.decode(found.body, type=_OfSession).session
        except ValueError:  # no process of ours has written it
            return True
        return session in (self._session, *self._notice.earlier)

    def _first_capabilities(self) -> Capabilities | None:
        return next((host.entry.capabilities for host in self._desk.hosts.values() if host.entry.capabilities), None)

    async def _until(self, look: Callable[[], T | None]) -> T:
        assert self._working
        while not (found := look()):
            self._moved.clear()
            moved = asyncio.ensure_future(self._moved.wait())
            try:
                await asyncio.wait([moved, self._working], return_when=asyncio.FIRST_COMPLETED)
            finally:
                moved.cancel()
            if self._working.done():
                self._working.result()
        return found
