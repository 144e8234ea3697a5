"""Groups that rollout hosts sample and score, reached over a bus."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable

from headrace.core.batches import Failure
from headrace.core.errors import PoisonedRequest
from headrace.core.types import Prompt
from headrace.facts.waits import Waits
from headrace.loop.own_groups import PlayedGroup, Seen
from headrace.run.hosts.desk import BusDesk
from headrace.run.hosts.errands import ErrandReply, GroupErrand, GroupSizes, HeldOutErrand


class BusGroups:
    """Protocol `GroupSource`."""

    def __init__(self, desk: BusDesk, session: str, waits: Waits, sizes: GroupSizes) -> None:
        self._desk, self._session, self._waits, self._sizes = desk, session, waits, sizes
        self._evaluations = itertools.count()

    async def trained(self, ticket: int, prompt: Prompt, seen: Seen) -> PlayedGroup:
        errand = GroupErrand(ticket, prompt, at_least=self._desk.newest)
        async with self._waits.named("rollouts", "a rollout host", advances=self.progress):
            group = await _played(self._desk.ask(str(ticket), errand), prompt.rollouts or self._sizes.trained)
        return _shown(group, seen)

    async def held_out(self, number: int, index: int, prompt: Prompt, seen: Seen) -> PlayedGroup:
        key = f"held out {self._session} {next(self._evaluations)}"
        errand = HeldOutErrand(number, index, prompt, at_least=self._desk.newest)
        async with self._waits.named("evaluation", "a rollout host", advances=self.progress):
            group = await _played(self._desk.ask(key, errand), self._sizes.held_out)
        self._desk.forget(key)
        return _shown(group, seen)

    def forget(self, ticket: int) -> None:
        self._desk.forget(str(ticket))

    def progress(self) -> object:
        return self._desk.stats.sampled_tokens


async def _played(asked: Awaitable[ErrandReply], rollouts: int) -> PlayedGroup:
    """Returns the group that a host has played. One that was given up is data with a reason, like any other that failed."""
    try:
        reply = await asked
    except PoisonedRequest as error:
        return PlayedGroup(failures=(Failure("engine_died", str(error)),) * rollouts)
    assert reply.group is not None, "a host answers a group with a group"
    return reply.group


def _shown(group: PlayedGroup, seen: Seen) -> PlayedGroup:
    seen([one.episode for one in group.scored])
    return group
