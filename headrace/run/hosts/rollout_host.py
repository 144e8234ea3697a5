"""A rollout host: it takes errands from a bus, and answers them with its own engine, environments and scorers.

  loop        waits for                                    woken by
  ----        ---------                                    --------
  sessions    another process of the run, or its end       the notice `run`; no sign of the run for too long
  weights     newer weights                                the notice `weights`
  errands     a place, then a letter                       an errand that is done; the bus
  beats       one second                                   the clock

A host keeps nothing: all that it loses when it is killed is the errands in its hand, which others get as soon as it has been silent for the
lease of the bus. `drain` ends it without a loss: it takes no more, finishes what it has if that is soon, and gives back the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.core.errors import ConfigError, HeadraceError, IdentityError, PoisonedRequest, WorkerDied
from headrace.core.protocols import Engine
from headrace.core.reports import EngineStats
from headrace.facts.waits import Waits
from headrace.loop.own_groups import GroupSource
from headrace.loop.partial import Interrupts
from headrace.run.hosts.bus.bus_port import Bus, Letter, Posting
from headrace.run.hosts.bus_messages import (
    ALIVE,
    ANSWERS,
    RUN,
    SUSPECTS,
    TICKETS,
    WEIGHTS,
    AliveNotice,
    Errand,
    ErrandLetter,
    ErrandReply,
    GroupErrand,
    HeldOutErrand,
    HostEntry,
    RequestErrand,
    RunNotice,
    SuspectsNotice,
    WeightsNotice,
    beat_of,
)
from headrace.version import __version__

LOOK = 1.0
"""Seconds for which the bus may hold back an answer."""

OVERTAKEN = 10.0
"""Seconds in which newer weights must be announced, or the trainer's death, if those that were announced can no longer be fetched. Where ranks are
elsewhere, the run notices it later."""

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, kw_only=True)
class HostParts:
    """The parts of a host, for one session of the run."""

    engine: Engine
    interrupts: Interrupts
    groups: GroupSource
    adapter: str
    """The policy's; empty if all weights are trained."""
    share: Callable[[int], int]
    """The most errands that it has in hand, given the number of hosts."""
    close: Callable[[], Awaitable[None]]
    waits: Waits
    sets: Mapping[str, GroupSource] = field(default_factory=dict)
    """The sources of the further evaluation sets, by name."""
    overtaken: float = OVERTAKEN


@dataclass(frozen=True, kw_only=True)
class HostPatience:
    """Seconds."""

    run: float = 600.0
    """The time without a sign of the run until the host leaves."""
    drain: float = 30.0
    """The time for the errands in hand, once the host is to leave."""


class Deserted(HeadraceError):
    """A run gives no sign of itself any more."""


class RolloutHost:
    def __init__(
        self,
        bus: Bus,
        who: str,
        open_parts: Callable[[RunNotice], Awaitable[HostParts]],
        *,
        patience: HostPatience = HostPatience(),
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        """`who`: a name that no other process has. `open_parts`: raises ConfigError if this machine cannot serve the run."""
        self._bus, self._who, self._open_parts, self._patience, self._say = bus, who, open_parts, patience, say
        self._leaving = asyncio.Event()
        self._session: _Session | None = None

    def drain(self) -> None:
        """Lets the host leave: it gives back what it cannot finish soon."""
        self._leaving.set()
        if self._session:
            self._session.wake()

    async def run(self) -> None:
        """Serves until the run is over, or `drain` is called. Raises what ends it: ConfigError, IdentityError, WorkerDied, Deserted."""
        served = ""
        while not self._leaving.is_set():
            notice = await self._notice(served)
            if notice is None:
                return
            served = notice.session
            await self._serve(notice)

    async def _notice(self, served: str) -> RunNotice | None:
        """Returns the notice of a session that was not served yet; None if the run is over, or this host leaves."""
        signs = _Signs(self._bus, self._patience.run, self._say)
        while not self._leaving.is_set():
            notice = await signs.next()
            if notice is None:
                continue
            if notice.over and notice.died:
                self._say("the trainer has died: waiting for the run to go on from its checkpoint")
            elif notice.over and notice.begun:
                self._say("the run is over")
                return None
            elif notice.over:
                self._say("the run ended before it began: waiting for its next start")
            elif notice.session != served:
                return notice
        return None

    async def _serve(self, notice: RunNotice) -> None:
        try:
            parts = await self._open_parts(notice)
        except HeadraceError as error:  # the run would wait for a host, and nobody there would know why none comes
            await self._sign(_entry(notice.session, beat=1, leaving=True, trouble=str(error)))
            raise
        session = self._session = _Session(
            bus=self._bus,
            who=self._who,
            name=notice.session,
            mark=notice.mark,
            parts=parts,
            patience=self._patience,
            leaving=self._leaving,
            say=self._say,
        )
        trouble, begun = "", tuple[str, ...]()
        try:
            await session.run()
        except Exception as error:
            trouble = str(error) if isinstance(error, HeadraceError) else repr(error)
            if isinstance(error, WorkerDied) or not isinstance(error, HeadraceError):
                begun = session.begun  # what it worked on may be the cause
            raise
        finally:
            self._session = None
            await self._sign(session.entry(leaving=True, trouble=trouble, begun=begun))
            await parts.close()

    async def _sign(self, last: HostEntry) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK):
                await self._bus.sign(self._who, _encode(last))


class _Signs:
    """All that a host hears of its run on the board: notices, and signs of life."""

    def __init__(self, bus: Bus, patience: float, say: Callable[[str], None]) -> None:
        self._bus, self._patience, self._say = bus, patience, say
        self._run, self._alive = "", ""
        """The ids of the last notice and of the last sign of life."""
        self._heard = asyncio.get_running_loop().time()
        self.lives = Counter[str]()
        """The number of signs of life that were seen, by session."""

    async def next(self) -> RunNotice | None:
        """Returns the notice of the run as soon as there is another one; None if there was none for a moment, or it cannot be read. Raises Deserted
        without any sign for the patience, whether the run or the bus is silent, and ConfigError for a run of another version."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(self._heard + self._patience):
                found = await self._bus.newer(RUN, self._run, LOOK)
                sign = await self._bus.newer(ALIVE, self._alive)
        except TimeoutError:
            raise Deserted(f"there was no sign of the run for {self._patience:g} s (--patience)") from None
        if found or sign:
            self._heard = loop.time()
        if sign:
            self._alive = sign.id
            if alive := _read(sign.body, AliveNotice, "the run's sign of life", self._say):
                self.lives[alive.session] += 1
        if found:
            self._run = found.id
            return _notice_of(found.body, self._say)
        return None


def _entry(session: str, **more: Any) -> HostEntry:
    return HostEntry(session, host=socket.gethostname(), pid=os.getpid(), **more)


@dataclass(eq=False, kw_only=True)
class _Session:
    """A host during one session of the run."""

    bus: Bus
    who: str
    name: str
    mark: str
    """The mark of the run's settings."""
    parts: HostParts
    patience: HostPatience
    leaving: asyncio.Event
    say: Callable[[str], None]
    _beat: int = 0
    _signs: _Signs = field(init=False)
    _version: int = -1
    """The version of the policy that is served."""
    _hosts: int = 1
    _begun: dict[str, None] = field(default_factory=dict)
    """The keys of the errands that are worked on, in their order."""
    _suspects: SuspectsNotice = SuspectsNotice("")
    _suspects_id: str = ""
    _broken: bool = False
    """Whether an errand has failed with an error, which ends this host."""
    _signing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _one_suspect: asyncio.Lock = field(default_factory=asyncio.Lock)
    _hand: dict[str, tuple[Letter, asyncio.Task[None]]] = field(default_factory=dict)
    """The errands in hand, by the id of their letter."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an errand is done, weights are live, or the host is to leave; there is a new one for the next change."""
    _stats: EngineStats = EngineStats()

    def __post_init__(self) -> None:
        self._signs = _Signs(self.bus, self.patience.run, self.say)

    def wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def begun(self) -> tuple[str, ...]:
        return tuple(self._begun)

    def entry(self, **more: Any) -> HostEntry:
        self._beat += 1
        return _entry(
            self.name,
            beat=self._beat,
            version=self._version,
            groups=len(self._hand),
            capabilities=self.parts.engine.capabilities,
            stats=self._stats,
            **more,
        )

    async def run(self) -> None:
        """Returns when the session is over or the host has drained."""
        works = (self._until_over(), self._weights(), self._beats(), self._errands(), self.parts.engine.watch())
        loops = [asyncio.ensure_future(work) for work in works]
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            tasks = [*loops, *(task for _, task in self._hand.values())]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_over(self) -> None:
        while True:
            notice = await self._signs.next()
            if notice and (notice.over or notice.session != self.name):
                return

    async def _beats(self) -> None:
        while True:
            self._stats = await self.parts.engine.stats()  # an engine that hangs makes the host silent
            await self._sign()
            await self.bus.keep(TICKETS, self.who, list(self._hand))
            await asyncio.sleep(beat_of(self._hosts))

    async def _sign(self) -> None:
        async with self._signing:  # else an older entry could be the last one that is written
            await self.bus.sign(self.who, _encode(self.entry(begun=self.begun)))

    # -- weights --------------------------------------------------------------------------------------------------------

    async def _weights(self) -> None:
        than, wait, loaded = "", LOOK, dict[str, int]()
        failure: IdentityError | None = None
        refused, heard = WeightsNotice(self.name), 0
        while True:
            found = await self.bus.newer(WEIGHTS, than, wait)
            if found is None:
                # A process of the run that was killed has left one sign at most, and may be resumed.
                if failure and self._signs.lives[self.name] > heard + 1:
                    raise failure
                continue
            than, notice = found.id, _read(found.body, WeightsNotice, "the notice of weights", self.say)
            if notice is None or notice.session != self.name:
                continue
            self._hosts = notice.hosts
            if failure and notice.updates == refused.updates:
                raise failure
            failure, wait = None, LOOK
            try:
                await self._load(notice, loaded)
            except (
                IdentityError
            ) as error:  # the trainer keeps two versions: these may be gone, and newer ones announced
                error.add_note("this rollout host ends; start it again when the cause is gone")
                failure, refused, wait, heard = error, notice, self.parts.overtaken, self._signs.lives[self.name]
            self.wake()

    async def _load(self, notice: WeightsNotice, loaded: dict[str, int]) -> None:
        for name, update in sorted(notice.updates.items()):  # the base before the adapter
            if update.version <= loaded.get(name, -1):  # older: the bus has an earlier state again
                continue
            if name == self.parts.adapter:
                await self.parts.interrupts.deliver(update)
                self._version = update.version
            else:
                await self.parts.engine.load(update)
            loaded[name] = update.version

    # -- errands --------------------------------------------------------------------------------------------------------

    async def _errands(self) -> None:
        while not self.leaving.is_set():
            self._tidy()
            room = self.parts.share(self._hosts) - len(self._hand)
            if self._version < 0 or room <= 0:
                await self._changed.wait()
                continue
            for letter in await self.bus.claim(TICKETS, self.who, room, LOOK):
                if letter.id in self._hand:  # it was kept too late, and is still in hand
                    continue
                asked = _read(letter.body, ErrandLetter, f"errand {letter.key}", self.say)
                if asked and asked.session != self.name:
                    await self._leave_out(letter)
                elif asked is None or any(letter.key == other.key for other, _ in self._hand.values()):
                    # What cannot be read the run finds missing if it is its own. The requests of a repetition would have the same names.
                    await self.bus.settle(TICKETS, [letter.id])
                else:
                    self._hand[letter.id] = letter, asyncio.ensure_future(self._do(letter, asked))
        until = asyncio.get_running_loop().time() + self.patience.drain
        while self._hand and (left := until - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait([task for _, task in self._hand.values()], timeout=left)
            self._tidy()
        for letter, task in list(self._hand.values()):
            task.cancel()
            await self._give_back(letter)

    async def _leave_out(self, letter: Letter) -> None:
        """Removes the letter of an earlier process of the run. One of a later process, which this host has not heard of yet, is given back."""
        found = await self.bus.newer(RUN)
        notice = _read(found.body, RunNotice, "the notice of the run", self.say) if found else None
        if notice and notice.session == self.name:
            await self.bus.settle(TICKETS, [letter.id])
        else:
            await asyncio.sleep(LOOK)  # or this host would claim it again at once
            await self._give_back(letter)

    async def _give_back(self, letter: Letter) -> None:
        await self.bus.settle(TICKETS, [letter.id], then=Posting(TICKETS, letter.key, letter.body))

    def _tidy(self) -> None:
        """Forgets the errands that are done. Raises the error of one."""
        for number, (_, task) in list(self._hand.items()):
            if task.done():
                del self._hand[number]
                task.result()

    async def _do(self, letter: Letter, asked: ErrandLetter) -> None:
        try:
            errand = asked.errand
            if self._version < errand.at_least:
                async with self.parts.waits.named("rollouts", f"the weights of version {errand.at_least}"):
                    while self._version < errand.at_least:
                        await self._changed.wait()
            await self._read_suspects()
            if letter.key in self._suspects.given_up:
                await self.bus.settle(TICKETS, [letter.id])
                return
            async with self._one_suspect if letter.key in self._suspects.suspects else contextlib.nullcontext():
                if not self._broken:  # else this host ends, and what it begins now would be blamed too
                    await self._work(letter, asked)
        finally:
            self.wake()

    async def _work(self, letter: Letter, asked: ErrandLetter) -> None:
        """Signs before it begins: if this process dies at once, the run must know what it had begun."""
        self._begun[letter.key] = None
        await self._sign()
        try:
            reply = msgspec.structs.replace(
                await self._reply(asked.errand), mark=self.mark, session=self.name, asked=asked.asked
            )
        except Exception:
            self._broken = True
            raise
        del self._begun[letter.key]  # not after an error, which may be the errand's
        await self.bus.settle(TICKETS, [letter.id], then=Posting(ANSWERS, letter.key, _encode(reply)))

    async def _read_suspects(self) -> None:
        if found := await self.bus.newer(SUSPECTS, self._suspects_id):
            self._suspects_id = found.id
            if notice := _read(found.body, SuspectsNotice, "the notice of suspects", self.say):
                self._suspects = notice if notice.session == self.name else SuspectsNotice("")

    async def _reply(self, errand: Errand) -> ErrandReply:
        match errand:
            case GroupErrand():
                group = await self.parts.groups.trained(errand.ticket, errand.prompt, lambda episodes: None)
                self.parts.groups.forget(errand.ticket)
                return ErrandReply(self.who, group)
            case HeldOutErrand():
                source = self.parts.sets[errand.of] if errand.of else self.parts.groups
                group = await source.held_out(errand.number, errand.index, errand.prompt, lambda episodes: None)
                return ErrandReply(self.who, group)
            case RequestErrand():
                try:
                    return ErrandReply(self.who, completion=await self.parts.interrupts.once(errand.request))
                except (ValueError, PoisonedRequest) as error:
                    return ErrandReply(self.who, refused=str(error))


class _Versioned(msgspec.Struct):
    """The one field that every version of a notice has."""

    version: str


def _notice_of(body: bytes, say: Callable[[str], None]) -> RunNotice | None:
    """Raises ConfigError for the notice of another version of headrace, whose other fields may have another meaning."""
    found = _read(body, _Versioned, what := "the notice of the run", say)
    if found and found.version != __version__:
        raise ConfigError(
            f"the run has headrace {found.version}, and this host {__version__}; install the same version on both"
        )
    return _read(body, RunNotice, what, say) if found else None


def _read(body: bytes, kind: Any, what: str, say: Callable[[str], None]) -> Any:
    """Returns what a process has put on the bus; None if it is no `kind`, which is said. Anybody with the bus's password may write there, and
    what one host cannot read no other one can: it must not end them all."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except ValueError as error:  # msgspec's own errors, and text that is not UTF-8
        say(f"{what} on the bus cannot be read ({error}); it is left out")
        return None
