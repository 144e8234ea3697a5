"""The care for one member of a fleet: it is taken out of the rotation when it cannot serve, and back in when it can, with the newest
weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from headrace.core.errors import HeadraceError, IdentityError, WorkerDied
from headrace.core.reports import EngineStats
from headrace.core.weights import WeightUpdate
from headrace.engine.fleet.member import Member
from headrace.engine.fleet.rotation import Rotation

T = TypeVar("T")

AGAIN = 0.5
"""Seconds until an update that a member could not load is loaded again."""
REFUSALS = 5
"""Updates in a row that a member may refuse; then it is lost."""


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
