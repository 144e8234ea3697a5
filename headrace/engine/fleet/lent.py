"""The member of a fleet that is on devices which the trainer lends while it waits.

    asleep, resting ──wake──▶ away: it loads the newest weights ──▶ serving ──sleep: a batch is ready──▶ resting ──▶ asleep, or killed

It leaves the rotation before anything is asked of it, so that its requests go on elsewhere from their tokens, whatever becomes of it. The
devices are given back when it sleeps, or is dead: one that does neither in time is killed.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Protocol

from msgspec.structs import replace

from headrace.core.errors import HeadraceError, WorkerDied
from headrace.core.reports import SleepReport
from headrace.engine.fleet.care import Care
from headrace.engine.fleet.member import Member, MemberEngine
from headrace.engine.fleet.rotation import Rotation


class LentMember(MemberEngine, Protocol):
    """A member that can sleep. One that has died begins asleep again, and whoever wakes it loads all weights."""

    async def sleep(self, keep: bool) -> SleepReport: ...

    async def wake(self, replaced: bool) -> SleepReport: ...

    async def ended(self) -> str:
        """Returns as soon as it has no process, which would have devices. One whose process has just begun again is absent, but not ended: it
        may be waking."""


class LentEngine:
    """The member as an engine that sleeps (`SleepingEngine` in `loop/turns.py`). Both calls may be repeated, and cut off."""

    def __init__(
        self, rotation: Rotation, member: Member, cares: dict[Member | None, asyncio.Task[None]], patience: float
    ) -> None:
        """`cares`: of the fleet's members. `patience`: seconds in which it must have given its devices back."""
        self._rotation, self._member, self._cares, self._patience = rotation, member, cares, patience
        self._engine: LentMember = member.engine  # type: ignore[assignment]
        self._counted = 0
        """Tokens of it that an earlier sleep has reported."""

    async def wake(self, replaced: bool) -> SleepReport:
        """It enters the rotation later, when it has the newest weights. Raises HeadraceError if it is lost for good."""
        if self._member.state == "lost":
            raise WorkerDied(f"engine {self._member.name}", self._member.why)
        try:
            report = await self._engine.wake(replaced)
        except HeadraceError as error:
            self._rotation.lose(self._member, error)
            raise
        if self._member.state == "resting":
            self._member.state = "away"
            self._cares[self._member] = asyncio.get_running_loop().create_task(Care(self._rotation, self._member).run())
        return report

    async def sleep(self, keep: bool) -> SleepReport:
        """Returns when its devices are free. Whatever its care was about to do, it does not enter: it is known to have no weights."""
        if care := self._cares.pop(self._member, None):
            care.cancel()
        self._rotation.rest(self._member)
        report = await self._freed(keep)
        tokens, self._counted = self._member.accepted - self._counted, self._member.accepted
        return replace(report, tokens=tokens)

    async def _freed(self, keep: bool) -> SleepReport:
        """Returns an empty report where its process is dead: a new one begins asleep."""
        asleep = asyncio.ensure_future(self._engine.sleep(keep))
        dead = asyncio.ensure_future(self._engine.ended())
        ends: list[asyncio.Future[Any]] = [asleep, dead]
        try:
            done, _ = await asyncio.wait(ends, timeout=self._patience, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self._rotation.telemetry.warn(
                    f"engine {self._member.name} has not given the trainer's devices back within {self._patience:g} s "
                    "(orchestration.give_way); it is killed, and comes back when they are lent again"
                )
                self._engine.kill()
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            with suppress(HeadraceError):  # it is lost for good, and has nothing left to give back
                if asleep.done():
                    return asleep.result()
            return SleepReport()
        finally:
            for one in ends:
                one.cancel()
