"""Protocol `Engine`, made of engines.

Rollouts of one group go to the member that has computed their prompt, unless they would wait there longer than another one with room needs for
the prompt (`dispatch.py`); a new group goes to the member with the fewest requests.
A member that dies, hangs, is slow with new weights or fails its probe leaves the rotation at once. Its requests go on elsewhere from
their tokens, and it comes back when it answers and has the newest weights. The fleet is lost when no member is left.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from headrace.core.errors import ConfigError, HeadraceError, IdentityError, WorkerDied
from headrace.core.reports import TOTALS, Capabilities, EngineStats, LoadReport, SleepReport
from headrace.core.steps import SoFar, StepOutput
from headrace.core.types import Completion, Request
from headrace.core.weights import WeightUpdate
from headrace.engine.fleet.member import Member, MemberEngine
from headrace.engine.fleet.rotation import Care, Check, Examination, FleetPatience, Rotation
from headrace.engine.request_book import scoring
from headrace.engine.streaming import check_parts
from headrace.facts.facts import EngineSample, FleetSample, MemberSample
from headrace.facts.telemetry import Telemetry

# --- Statistics of a fleet: those of its members, as those of one engine.


class Totals:
    """Sums that never decrease, whoever joins, leaves or starts anew."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(TOTALS, 0.0)
        self._seen: dict[Member, EngineStats] = {}

    def taken(self, members: Sequence[Member]) -> EngineStats:
        """Returns the statistics of the fleet. Its busy seconds are the mean of its members', so that it is idle to the share to which they
        are on average."""
        own = sum(not member.lent for member in members)
        for member in members:
            before, now = self._seen.get(member, EngineStats()), member.stats
            for name in TOTALS:
                more = max(0, getattr(now, name) - getattr(before, name))
                if name != "busy_seconds":
                    self._sums[name] += more
                elif not member.lent:  # whose devices are the trainer's, which is idle meanwhile
                    self._sums[name] += more / own
            self._seen[member] = now
        self._seen = {member: self._seen[member] for member in members}
        serving = [member for member in members if member.serves]
        sums = {name: value if name == "busy_seconds" else round(value) for name, value in self._sums.items()}
        return EngineStats(
            running=sum(member.stats.running for member in serving),
            waiting=sum(member.stats.waiting for member in serving),
            kv_used=max((member.stats.kv_used for member in serving), default=0.0),
            version=min((member.versions.get("", -1) for member in serving), default=-1),
            **sums,  # type: ignore[arg-type]
        )


def samples(members: Iterable[Member]) -> tuple[MemberSample, ...]:
    return tuple(
        MemberSample(
            name=member.name,
            state=member.state,
            version=member.versions.get("", -1),
            running=len(member.attempts),
            tokens=member.stats.sampled_tokens,
            rate=member.rate if member.serves else 0.0,
            absences=member.absences,
            why=member.why,
            lent=member.lent,
        )
        for member in members
    )


def in_common(all_: Sequence[Capabilities]) -> Capabilities:
    """Returns what every one of them can do."""
    kinds = {abilities.path.partition(" at ")[0] for abilities in all_}
    arithmetic = all_[0].arithmetic if len({abilities.arithmetic for abilities in all_}) == 1 else ""
    flags = [name for name, kind in Capabilities.__annotations__.items() if kind == "bool"]
    each = {name: all(getattr(abilities, name) for abilities in all_) for name in flags}
    each["exact"] &= (
        len(kinds) == 1 and len({abilities.arithmetic for abilities in all_}) == 1
    )  # a request may change its member
    return msgspec.structs.replace(
        all_[0],
        context_length=min(abilities.context_length for abilities in all_),
        adapters=min(abilities.adapters for abilities in all_),
        rows=sum(abilities.rows for abilities in all_) if all(abilities.rows for abilities in all_) else 0,
        kv_tokens=sum(abilities.kv_tokens for abilities in all_)
        if all(abilities.kv_tokens for abilities in all_)
        else 0,
        path=f"{len(all_)} members: {', '.join(sorted(kinds))}",
        arithmetic=arithmetic,
        **each,
    )


# --- The member of a fleet that is on devices which the trainer lends while it waits.
#
#     asleep, resting ──wake──▶ away: it loads the newest weights ──▶ serving ──sleep: a batch is ready──▶ resting ──▶ asleep, or killed
#
# It leaves the rotation before anything is asked of it, so that its requests go on elsewhere from their tokens, whatever becomes of it. The
# devices are given back when it sleeps, or is dead: one that does neither in time is killed.


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
        """Wakes the member, which enters the rotation later, when it has the newest weights. Raises HeadraceError if it is lost for good."""
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
            for end in ends:
                end.cancel()


# --- fleet ------------------------------------------------------------


SAMPLES = 20
"""Members whose statistics are recorded in one second: those of a thousand, every second, would fill a gigabyte in two hours."""

LAST_WORDS = 1.0
"""Seconds in which a member that is removed may report its last statistics."""


class Fleet:
    def __init__(
        self, parts: Mapping[str, MemberEngine], patience: FleetPatience, telemetry: Telemetry, lent: str | None = None
    ) -> None:
        """`parts`: the engines, which are open, by their names for people. `lent`: the one that is on lent devices, and asleep."""
        self._rotation = Rotation(patience, telemetry)
        self._telemetry = telemetry
        self._totals, self._names = Totals(), itertools.count()
        self._tasks: dict[Member | None, asyncio.Task[None]] = {}
        """The care of each member, and the reports."""
        self.capabilities = Capabilities(context_length=0)
        for name, part in parts.items():
            self._join(name, part, name == lent)

    async def open(self) -> None:
        """Returns when all members serve."""
        self.capabilities = in_common([member.engine.capabilities for member in self.members])
        for member in (member for member in self.members if not member.lent):
            self._mind(member)
        while any(member.state == "away" for member in self.members):
            await self._rotation.change()
        self._rotation.opened = True
        self._tasks[None] = asyncio.get_running_loop().create_task(self._report())

    @property
    def members(self) -> Sequence[Member]:
        return self._rotation.members

    # -- requests -----------------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        self._rotation.check()
        if request.adapter and request.adapter not in self._rotation.wanted:
            raise ValueError(f"no adapter {request.adapter} is loaded; load it before naming it in a request")
        return await self._rotation.requests.generate(request)

    async def score(self, tokens: Sequence[int], adapter: str = "") -> Completion:
        return await self.generate(scoring(f"fleet-score/{next(self._names)}", tokens, priority=-1, adapter=adapter))

    def unfinished(self, among: Iterable[str] | None = None) -> Mapping[str, SoFar]:
        return self._rotation.requests.book.unfinished(among)

    def listen(self, listener: Callable[[StepOutput], None]) -> None:
        self._rotation.requests.book.listen(listener)

    # -- weights ------------------------------------------------------------------------------------------------------------

    async def load(self, update: WeightUpdate, parts: int = 1) -> LoadReport:
        """Returns when every member in the rotation has the update. A member that has it later than the first one by more than the patience
        of the fleet, or refuses what others have taken, has left the rotation by then."""
        check_parts(update, parts)
        rotation, name = self._rotation, update.adapter.name if update.adapter else ""
        rotation.check()
        before = rotation.wanted.get(name)
        rotation.want(name, update)
        errors = await self._load_everywhere(name, update, parts)
        if errors and all(member in errors for member in rotation.serving):
            if before is None:
                del rotation.wanted[name]
            else:
                rotation.wanted[name] = before
            raise next(iter(errors.values()))
        for member, error in errors.items():
            rotation.expel(member, str(error))
        while not rotation.serving:  # whoever comes back has it
            await rotation.change()
        rotation.requests.place_waiting()
        reports = [member.reports[name] for member in rotation.serving]
        return LoadReport(
            version=update.version,
            verify_seconds=max(report.verify_seconds for report in reports),
            swap_seconds=max(report.swap_seconds for report in reports),
            mixed_tokens=sum(report.mixed_tokens for report in reports),
            received=sum(report.received for report in reports),
            engines=sum(report.received > 0 for report in reports),
        )

    async def _load_everywhere(self, name: str, update: WeightUpdate, parts: int) -> dict[Member, Exception]:
        """Returns the errors of the members that have refused the update, and are in the rotation with their earlier weights."""
        errors: dict[Member, Exception] = {}

        async def load(member: Member) -> bool:
            try:
                report = await member.while_serving(member.engine.load(update, parts))
            except (HeadraceError, ValueError) as error:
                errors[member] = error
                return False
            if report is not None:
                member.reports[name], member.versions[name] = report, update.version
            return report is not None

        loading = {asyncio.ensure_future(load(member)): member for member in self._rotation.serving}
        try:
            await self._until_loaded(loading, update)
        finally:
            for task in loading:
                task.cancel()
        return {member: error for member, error in errors.items() if member.serves}

    async def _until_loaded(self, loading: Mapping[asyncio.Task[bool], Member], update: WeightUpdate) -> None:
        """Returns when all have ended. Members that are too late are expelled."""
        waiting, has_it = set(loading), False
        while waiting and not has_it:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            has_it = any(task.result() for task in done)
        if waiting:  # in one wait, not in one for each member: these would cost the square of their number
            _, late = await asyncio.wait(waiting, timeout=self._rotation.patience.silence)
            for task in [task for task in loading if task in late]:  # a set has another order in each process
                self._rotation.expel(loading[task], self._late(update))
            if late:
                await asyncio.wait(late)

    def _late(self, update: WeightUpdate) -> str:
        return (
            f"was more than {self._rotation.patience.silence:g} s later than another one with version {update.version}"
        )

    async def examine(self, version: int, check: Check, adapter: str = "") -> float:
        """Probes every member in the rotation under a version that is live, and whoever enters under it later. Returns the largest
        difference. A member whose probe fails leaves; raises its IdentityError if it is the last one."""
        rotation = self._rotation
        rotation.examinations[adapter] = Examination(version, check)
        rotation.announce()  # for members that have failed an earlier one
        found, errors = await self.ask_serving(check)
        if errors and not found:
            raise next(iter(errors.values()))
        for member, error in errors.items():
            rotation.distrust(member, version, error)
        while not rotation.serving:  # whoever comes back has passed
            await rotation.change()
        return max(found.values(), default=0.0)

    async def ask_serving(self, check: Check) -> tuple[dict[Member, float], dict[Member, IdentityError]]:
        """Returns what the check finds at each member in the rotation, all at once, and the members that fail it. Those that are lost meanwhile
        are in neither."""
        found: dict[Member, float] = {}
        errors: dict[Member, IdentityError] = {}

        async def ask(member: Member) -> None:
            try:
                difference = await member.while_serving(check(member.engine))
            except IdentityError as error:
                errors[member] = error
                return
            except HeadraceError:  # the member is lost, and its care hears of it
                return
            if difference is not None:
                found[member] = difference

        await asyncio.gather(*map(ask, self._rotation.serving))
        return found, errors

    # -- control ------------------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        rotation = self._rotation
        rotation.held = "drain"
        while rotation.held:
            before = rotation.changes
            await asyncio.gather(*(self._drain(member) for member in rotation.serving))
            if (
                rotation.changes == before and rotation.serving
            ):  # else requests may have moved to a member that had drained
                return
            if not rotation.serving:
                await rotation.change()

    async def _drain(self, member: Member) -> None:
        member.held = "drain"
        await member.while_serving(member.engine.drain())

    async def resume(self) -> None:
        self._rotation.held = ""
        self._rotation.announce()
        await asyncio.gather(*(self._resume(member) for member in self._rotation.serving))

    async def _resume(self, member: Member) -> None:
        member.held = ""
        await member.while_serving(member.engine.resume())

    async def abort(self) -> None:
        self._rotation.requests.abort()
        await asyncio.gather(*(member.while_serving(member.engine.abort()) for member in self._rotation.serving))

    async def stats(self) -> EngineStats:
        async def take(member: Member) -> None:
            stats = await member.while_serving(member.engine.stats())
            if stats is not None:
                member.stats = stats

        await asyncio.gather(*map(take, self._rotation.serving))
        return self._totals.taken(self.members)

    async def watch(self) -> None:
        await self._rotation.watch()

    def kill(self) -> None:
        for member in self.members:
            member.engine.kill()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*(member.engine.close() for member in self.members))

    # -- members --------------------------------------------------------------------------------------------------------------

    def add(self, name: str, part: MemberEngine) -> None:
        """Adds an engine that is open. It enters the rotation when it has the newest weights."""
        if any(member.name == name for member in self.members):
            raise ConfigError(f"{name} is a member already")
        self._mind(self._join(name, part))

    async def remove(self, name: str) -> None:
        """Takes a member out for good; its requests go on elsewhere. Raises ConfigError for the last one that serves."""
        member = next((member for member in self.members if member.name == name), None)
        if member is None:
            there = ", ".join(other.name for other in self.members)
            raise ConfigError(f"there is no member {name}; there are {there}")
        if member.lent:
            raise ConfigError(f"{name} is on the trainer's devices; resume the run with orchestration.lend = false")
        if [other for other in self._rotation.serving if not other.lent] in ([], [member]):
            raise ConfigError(f"no other member than {name} serves; add one first, or stop the run")
        with suppress(TimeoutError, HeadraceError):  # one that is away has reported what it could
            async with asyncio.timeout(LAST_WORDS):
                member.stats = await member.engine.stats()
        self._totals.taken(self.members)
        self._rotation.remove(member)
        if care := self._tasks.pop(member, None):
            care.cancel()
        await member.engine.close()

    def on_lent_devices(self, patience: float) -> LentEngine:
        """The member on lent devices, as an engine that sleeps. `patience`: seconds in which it must give them back."""
        (member,) = (member for member in self.members if member.lent)
        return LentEngine(self._rotation, member, self._tasks, patience)

    def _join(self, name: str, part: MemberEngine, lent: bool = False) -> Member:
        member = Member(name=name, engine=part, lent=lent, state="resting" if lent else "away")
        self._rotation.members.append(member)
        part.listen(lambda output: self._rotation.requests.heard(member, output))
        return member

    def _mind(self, member: Member) -> None:
        self._tasks[member] = asyncio.get_running_loop().create_task(Care(self._rotation, member).run())

    async def _report(self) -> None:
        """Records the statistics, as a single engine does; those of single members less often, the more there are."""
        telemetry, due = self._telemetry, 0.0
        telemetry.record(FleetSample(telemetry.clock(), samples(self.members)))  # who they are is known from the start
        while True:
            await asyncio.sleep(self._rotation.patience.every)
            now = telemetry.clock()
            telemetry.record(EngineSample(now, self._totals.taken(self.members)))
            if now >= due:
                due = now + len(self.members) / SAMPLES
                telemetry.record(FleetSample(now, samples(self.members)))
