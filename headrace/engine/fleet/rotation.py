"""The rotation of a fleet: the members that serve, and the weights that they must have."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from headrace.core.errors import IdentityError, WorkerDied
from headrace.core.weights import WeightUpdate
from headrace.engine.fleet.member import Held, Member, MemberEngine
from headrace.engine.fleet.moving_requests import Requests
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
        return [one for one in self.members if one.serves]

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
            telemetry.warn(f"engine {member.name} is {what}: {member.why}{went} ({left})")

    # -- the end --------------------------------------------------------------------------------------------------------------

    def _nobody(self, last: Member) -> None:
        said = f"; the last to leave was {last.name}: {last.why}"
        self.give_up(
            WorkerDied("engine", f"fleet had no member for {self.patience.nobody:g} s (engine.patience){said}")
        )

    def _if_nobody_is_left(self, error: Exception | None = None) -> None:
        if any(one.serves or (one.state == "away" and self._may_pass(one)) for one in self.members):
            return
        if error and (isinstance(error, IdentityError) or len(self.members) == 1):
            self.give_up(error)
            return
        whys = "; ".join(f"{one.name}: {one.why}" for one in self.members)
        if any(one.unlike >= 0 for one in self.members):
            self.give_up(IdentityError(f"no engine is left that computes the policy that is trained: {whys}"))
        else:
            self.give_up(WorkerDied("engine", f"fleet has no member left: {whys}"))

    def _may_pass(self, member: Member) -> bool:
        """A member that has failed its probe waits for that of another version. Unless it is there already, none follows while nobody
        serves."""
        newest = {name: update.version for name, update in self.wanted.items()}
        probes = [one.version for name, one in self.examinations.items() if one.version == newest.get(name)]
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
        """There is news for every member. The coming and going of others is none: of a thousand that start, each would wake all the others."""
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
