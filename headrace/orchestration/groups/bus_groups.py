"""Groups that rollout hosts sample and score, reached over a bus."""

from __future__ import annotations

import itertools

from headrace.observe.health.waits import Waits
from headrace.orchestration.groups.desk import BusDesk
from headrace.orchestration.groups.errands import GroupErrand, HeldOutErrand
from headrace.orchestration.groups.group_source import PlayedGroup, Seen
from headrace.types import Prompt


class BusGroups:
    """Protocol `GroupSource`."""

    def __init__(self, desk: BusDesk, session: str, waits: Waits) -> None:
        self._desk, self._session, self._waits = desk, session, waits
        self._evaluations = itertools.count()

    async def trained(self, ticket: int, prompt: Prompt, seen: Seen) -> PlayedGroup:
        errand = GroupErrand(ticket, prompt, at_least=self._desk.newest)
        async with self._waits.named("rollouts", "a rollout host"):
            reply = await self._desk.ask(str(ticket), errand)
        return _shown(reply.group, seen)

    async def held_out(self, number: int, index: int, prompt: Prompt, seen: Seen) -> PlayedGroup:
        key = f"held out {self._session} {next(self._evaluations)}"
        errand = HeldOutErrand(number, index, prompt, at_least=self._desk.newest)
        async with self._waits.named("evaluation", "a rollout host"):
            reply = await self._desk.ask(key, errand)
        self._desk.forget(key)
        return _shown(reply.group, seen)

    def forget(self, ticket: int) -> None:
        self._desk.forget(str(ticket))


def _shown(group: PlayedGroup | None, seen: Seen) -> PlayedGroup:
    assert group is not None, "a host answers a group with a group"
    seen([one.episode for one in group.scored])
    return group
