"""The rotation of a fleet: the members that serve, and the weights that they must have."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.core.errors import HeadraceError, IdentityError, WorkerDied
from headrace.core.reports import EngineStats
from headrace.core.weights import WeightUpdate
from headrace.engine.fleet.dispatch import Requests
from headrace.engine.fleet.member import Held, Member, MemberEngine
from headrace.facts.facts import MemberMoved
from headrace.facts.telemetry import Telemetry

Check = Callable[[MemberEngine], Awaitable[float]]
"""Probes an engine. Returns the difference that it found, and raises IdentityError where that is too large."""


@dataclass(frozen=True)
class Examination:
    """The newest probe of an adapter, or of the base model."""

    version: int
    check: Check


@dataclass(frozen=True)
class FleetPatience:
    """Deadlines, in seconds."""

    nobody: float = 60.0
    """The fleet may be without any member in its rotation."""
    silence: float = 30.0
    """A member may leave a question unanswered, or be behind the first one with new weights."""
    every: float = 1.0
    """Time between two questions to a member that serves, and between two reports of the fleet."""

    @property
    def hung(self) -> float:
        """Time for which a member that is away may say nothing, though its process is there. Then the process is killed."""
        return 10 * self.silence


class Rotation:
    """**C1 with a fleet.** A member is in the rotation only with the newest weights that were given to the fleet when it entered, and a
    version counts as live when every member in the rotation has it: those that have not are out by then. So a request that begins
    while version v is live is sampled by v or later, whichever member it is on and wherever it moves."""

    def __init__(self, patience: FleetPatience, telemetry: Telemetry) -> None:
        self.patience, self.telemetry = patience, telemetry
        self.members: list[Member] = []
        self.requests = Requests(self.members, self.expel, self.give_up)
        self.wanted: dict[str, WeightUpdate] = {}
        """The newest weights by adapter; the base model's have the empty name, and come first."""
        self.held: Held = ""
        self.examinations: dict[str, Examination] = {}
        self.changes = 0
        """Number of times that a member has entered or left."""
        self.opened = False
        """Whether the first members have all entered."""
        self._changed, self._news = asyncio.Event(), asyncio.Event()
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Carries the error once the fleet is given up."""
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def serving(self) -> list[Member]:
        return [member for member in self.members if member.serves]

    def want(self, name: str, update: WeightUpdate) -> None:
        """Sets the newest weights of an adapter, or of the base model, for members in the rotation and out of it."""
        self.wanted[name] = update
        self._if_nobody_is_left()
        self.announce()

    # -- in and out -----------------------------------------------------------------------------------------------------------

    def has_newest(self, member: Member) -> bool:
        return all(member.versions.get(name) == update.version for name, update in self.wanted.items())

    def enter(self, member: Member) -> None:
        assert self.has_newest(member) and member.held == self.held, "a member enters only with the newest weights"
        was_away = bool(member.why)
        member.enter()
        if self.opened and (was_away or not member.lent):  # whoever has rested has not been missed
            self._record(member, "serving")
        if was_away:
            self.telemetry.withdraw(_absence(member))
        if self._alarm:
            self._alarm.cancel()
            self._alarm = None
        self.requests.place_waiting()
        self.requests.look_at(member)
        self.notify()

    def expel(self, member: Member, why: str) -> None:
        """Takes a member out of the rotation, if it is in it. Its requests go on elsewhere."""
        if member.serves:
            member.leave(why)
            self._has_left(member, "away")

    def rest(self, member: Member) -> None:
        """Takes a member on lent devices out of the rotation. It is not expected back: a fleet that has no other is lost."""
        if member.state not in ("serving", "away"):
            return
        served = member.serves
        member.leave(member.why, "resting")
        if served:
            self._has_left(member, "resting")
        self._if_nobody_is_left()

    def lose(self, member: Member, error: Exception) -> None:
        """The member does not come back."""
        served = member.serves
        member.leave(str(error), "lost")
        self._has_left(member, "lost") if served else self._record(member, "lost")
        self._if_nobody_is_left(error)
        self.notify()

    def distrust(self, member: Member, version: int, error: IdentityError) -> None:
        """The member computes something else than the trainer: it serves again when it has passed the probe of another version."""
        member.unlike, member.why = version, str(error)
        self.expel(member, str(error))
        self._if_nobody_is_left(error)

    def remove(self, member: Member) -> None:
        """Takes a member out for good. Its requests go on elsewhere."""
        served = member.serves
        member.leave("was removed", "removed")
        self._has_left(member, "removed") if served else self._record(member, "removed")
        self.members.remove(member)

    def _has_left(self, member: Member, what: str) -> None:
        moved, tokens = self.requests.move(member)
        self._record(member, what, moved, tokens)
        if not self.serving and not self._lost.done() and self._alarm is None:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(self.patience.nobody, self._nobody, member)
        self.notify()

    def _record(self, member: Member, what: str, requests: int = 0, tokens: int = 0) -> None:
        """`what`: what has happened to the member."""
        if what == "resting":  # once a step, and the facts of sleeping say it
            return
        telemetry = self.telemetry
        telemetry.record(
            MemberMoved(
                t=telemetry.clock(),
                member=member.name,
                state=what,
                why=member.why,
                requests=requests,
                tokens=tokens,
                serving=len(self.serving),
            )
        )
        if what in ("away", "lost"):
            went = f"; its {requests} requests go on elsewhere from {tokens} tokens" if requests else ""
            left = f"{len(self.serving)} of {len(self.members)} members serve"
            telemetry.warn(f"engine {member.name} is {what}: {member.why}{went} ({left})", _absence(member))

    # -- the end --------------------------------------------------------------------------------------------------------------

    def _nobody(self, last: Member) -> None:
        message = f"; the last to leave was {last.name}: {last.why}"
        self.give_up(
            WorkerDied("engine", f"fleet had no member for {self.patience.nobody:g} s (engine.patience){message}")
        )

    def _if_nobody_is_left(self, error: Exception | None = None) -> None:
        if any(member.serves or (member.state == "away" and self._may_pass(member)) for member in self.members):
            return
        if error and (isinstance(error, IdentityError) or len(self.members) == 1):
            self.give_up(error)
            return
        whys = "; ".join(f"{member.name}: {member.why}" for member in self.members)
        if any(member.unlike >= 0 for member in self.members):
            self.give_up(IdentityError(f"no engine is left that computes the policy that is trained: {whys}"))
        else:
            self.give_up(WorkerDied("engine", f"fleet has no member left: {whys}"))

    def _may_pass(self, member: Member) -> bool:
        """A member that has failed its probe waits for that of another version. Unless it is there already, none follows while nobody
        serves."""
        newest = {name: update.version for name, update in self.wanted.items()}
        probes = [
            examination.version
            for name, examination in self.examinations.items()
            if examination.version == newest.get(name)
        ]
        return member.unlike < 0 or max(probes, default=-1) > member.unlike

    def give_up(self, error: Exception) -> None:
        if not self._lost.done():
            self._lost.set_exception(error)
            self._lost.exception()  # marks it as retrieved: asyncio would warn if nobody calls `watch`
            self.requests.book.give_up(error)
            self.announce()

    async def watch(self) -> None:
        await asyncio.shield(self._lost)

    @property
    def is_lost(self) -> bool:
        return self._lost.done()

    def check(self) -> None:
        """Raises the error with which the fleet was given up."""
        if self._lost.done():
            self._lost.result()

    # -- waiting --------------------------------------------------------------------------------------------------------------

    def notify(self) -> None:
        """Wakes all that wait for a change, who check their conditions again."""
        self.changes += 1
        self._changed.set()
        self._changed.clear()

    def announce(self) -> None:
        """Tells every member that there is news. The coming and going of others is none: of a thousand that start, each would wake all the others."""
        self._news.set()
        self._news.clear()
        self.notify()

    async def change(self) -> None:
        """Returns when something has changed: a member has come or gone, or there is news. Raises the error with which the fleet was given up."""
        self.check()
        await self._changed.wait()
        self.check()

    async def news(self) -> None:
        """Returns when other weights are wanted, or a probe is there. Raises the error with which the fleet was given up."""
        self.check()
        await self._news.wait()
        self.check()


# --- The care for one member of a fleet
# It is taken out of the rotation when it cannot serve, and back in when it can, with the newest weights.


T = TypeVar("T")

AGAIN = 0.5
"""Seconds until an update that a member could not load is loaded again."""
REFUSALS = 5
"""Updates in a row that a member may refuse; then it is lost."""


def _absence(member: Member) -> str:
    """Returns the key of warnings about a member that does not serve."""
    return f"engine {member.name} does not serve"


class Care:
    def __init__(self, rotation: Rotation, member: Member) -> None:
        self._rotation, self._member = rotation, member
        self._refusals = 0

    async def run(self) -> None:
        """Runs as long as the member is one. The fleet loses it where its engine is lost for good."""
        try:
            await self._until_lost()
        except Exception as error:  # no other task learns of the error that ends this one
            self._rotation.give_up(error)

    async def _until_lost(self) -> None:
        engine = self._member.engine
        watch, turns = asyncio.ensure_future(engine.watch()), asyncio.ensure_future(self._turns())
        tasks: list[asyncio.Future[Any]] = [watch, turns]
        if self._member.lent:
            tasks.append(asyncio.ensure_future(self._until_dead()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        except HeadraceError as error:
            if not self._rotation.is_lost:
                self._rotation.lose(self._member, error)
        finally:
            for task in tasks:
                task.cancel()

    async def _until_dead(self) -> None:
        """Ends the care for a member on lent devices with its process: the next one sleeps until they are lent again, and nobody may wait for it."""
        why = await self._member.engine.absence()
        self._rotation.expel(self._member, why)
        self._rotation.rest(self._member)

    async def _turns(self) -> None:
        while True:
            await self._until_fit()
            self._rotation.enter(self._member)
            self._rotation.expel(self._member, await self._until_unwell())

    # -- in the rotation ----------------------------------------------------------------------------------------------------

    async def _until_unwell(self) -> str:
        """Returns the reason, also where somebody else has taken the member out."""
        member = self._member
        absence = asyncio.ensure_future(member.engine.absence())
        silence = asyncio.ensure_future(self._until_silent())
        try:
            ends: list[asyncio.Future[Any]] = [member.gone, absence, silence]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return next((task.result() for task in (absence, silence) if task.done()), member.why)
        finally:
            await _cancelled(absence, silence)

    async def _until_silent(self) -> str:
        clock, before = self._rotation.telemetry.clock, self._rotation.telemetry.clock()
        while True:
            await asyncio.sleep(self._rotation.patience.every)
            stats = await self._answer(self._member.engine.stats())
            if stats is None:
                return f"has not answered for {self._rotation.patience.silence:g} s"
            now = clock()
            self._member.sampled(stats, now - before)
            self._rotation.requests.look_at(self._member)
            before = now

    async def _answer(self, question: Awaitable[EngineStats]) -> EngineStats | None:
        """Returns None if there is no answer in time. An answer that came while this process itself was stopped is read first."""
        asked = asyncio.ensure_future(question)
        try:
            for patience in (self._rotation.patience.silence, AGAIN):
                await asyncio.wait([asked], timeout=patience)
                if asked.done():
                    return asked.result()
            return None
        finally:
            asked.cancel()

    # -- out of it ----------------------------------------------------------------------------------------------------------

    async def _until_fit(self) -> None:
        """Returns when the member may enter the rotation. Meanwhile an engine that hangs is ended: nothing else would ever replace it."""
        ending = asyncio.ensure_future(self._end_if_it_hangs())
        try:
            await self._catch_up()
        finally:
            ending.cancel()  # not awaited: the member may enter only until the next await

    async def _end_if_it_hangs(self) -> None:
        engine, patience = self._member.engine, self._rotation.patience.hung
        while True:
            answer, absence = asyncio.ensure_future(engine.stats()), asyncio.ensure_future(engine.absence())
            try:
                await asyncio.wait([answer, absence], timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                hangs = not answer.done() and not absence.done()
            finally:
                await _cancelled(answer, absence)
            if hangs:
                self._rotation.telemetry.warn(
                    f"engine {self._member.name} has a process that has not answered for {patience:g} s more; it is killed, and replaced"
                )
                engine.kill()
            await asyncio.sleep(patience)

    async def _catch_up(self) -> None:
        """Returns when the member may enter the rotation; until the next `await` of the caller, that stays so."""
        rotation, member = self._rotation, self._member
        while member.leaving:
            await asyncio.wait(member.leaving)
        while True:
            for name, update in list(rotation.wanted.items()):
                if member.versions.get(name) != update.version:
                    await self._load(name, update)
            may_enter = await self._while_true(lambda: rotation.has_newest(member), self._may_enter())
            if rotation.has_newest(member):
                if may_enter and member.held == rotation.held:
                    return
                if may_enter is False:
                    await rotation.news()

    async def _may_enter(self) -> bool:
        """Waits until the member is held as the fleet is, and answers. Returns whether it computes what the trainer does."""
        # One that is held answers no probe, and nobody else may be there to end the drain.
        await self._member.engine.resume()
        self._member.held = ""
        like = await self._is_like_the_trainer()
        await self._hold()
        self._member.stats = await self._member.engine.stats()  # it has read everything that was sent before
        return like

    async def _hold(self) -> None:
        """Brings the member's admission to the state of the fleet's."""
        member, held = self._member, self._rotation.held
        await (member.engine.drain() if held else member.engine.resume())
        member.held = held

    async def _load(self, name: str, update: WeightUpdate) -> None:
        """Loads an update unless the fleet is given a newer one meanwhile."""
        rotation, member = self._rotation, self._member
        is_newest = lambda: rotation.wanted.get(name) is update  # noqa: E731
        try:
            report = await self._while_true(is_newest, member.engine.load(update))
        except (IdentityError, ValueError) as error:
            if is_newest():
                await self._refused(error)
            return
        if report is not None:
            member.reports[name], member.versions[name] = report, update.version
            self._refusals = 0

    async def _while_true(self, holds: Callable[[], bool], work: Coroutine[Any, Any, T]) -> T | None:
        """Returns the result of `work`, or None as soon as `holds` no longer returns True. An engine that is away answers nothing until it
        is back, and is then given the weights that it was asked to load last: it has to be asked for newer ones before, because
        the files of older ones are removed."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done() and holds():
                news = asyncio.ensure_future(self._rotation.news())
                await asyncio.wait([task, news], return_when=asyncio.FIRST_COMPLETED)
                await _cancelled(news)
                self._rotation.check()
            return task.result() if task.done() else None
        finally:
            await _cancelled(task)

    async def _refused(self, error: Exception) -> None:
        self._refusals += 1
        if self._refusals >= REFUSALS:
            raise WorkerDied(f"engine {self._member.name}", f"refuses every update: {error}") from error
        await asyncio.sleep(AGAIN)

    async def _is_like_the_trainer(self) -> bool:
        """Probes the member if a probe of its version is there. One that was taken out for its probe needs another one to come back."""
        rotation, member = self._rotation, self._member
        for name, update in list(rotation.wanted.items()):
            examination = rotation.examinations.get(name)
            if examination is None or examination.version != update.version:
                continue
            if member.unlike == update.version:
                return False
            try:
                await examination.check(member.engine)
            except IdentityError as error:
                if rotation.wanted.get(name) is update:
                    rotation.distrust(member, update.version, error)
                    return False
            else:
                member.unlike = -1
        return member.unlike < 0


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
