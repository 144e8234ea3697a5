"""Two loops of the pipeline: `admit` draws prompts; `_roll_group` turns each into a group that is ready, dropped or failed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from headrace.core.batches import Group
from headrace.core.types import Prompt
from headrace.loop.budgets import Budgets
from headrace.loop.loop_plan import LoopPlan
from headrace.loop.outcomes import FirstTexts, Rolled
from headrace.loop.parts import EarlierMetrics, Parts


class Rolling:
    def __init__(self, parts: Parts, plan: LoopPlan, earlier: EarlierMetrics) -> None:
        self._parts, self._plan, self._clock = parts, plan, parts.telemetry.clock
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """The task of each ticket in flight."""
        self._cancelled: dict[int, str] = {}
        """The reason for each ticket that was cancelled."""
        self._budgets = Budgets(plan.watch, plan.rollout.patience, parts.telemetry.record, self._clock)
        self._texts = FirstTexts(parts.telemetry.record, self._clock)
        self._rewards = list(earlier.rewards)
        """Rewards of the groups that ended since the last step."""
        self._mean_drawn = earlier.reward_drawn
        self._diverged = False

    async def admit(self, loops: asyncio.TaskGroup) -> None:
        """Draws prompts until the buffer is closed. In a resumed run, the groups in flight at the kill come first, under their old tickets."""
        buffer, parts = self._parts.buffer, self._parts
        for ticket, prompt in buffer.in_flight.items():
            self._begin(loops, ticket, prompt)
        while True:
            waits, progress = parts.telemetry.waits, parts.groups.progress
            async with waits.named("admission", "a free slot (weights live, or a group ended)", advances=progress):
                await parts.interrupts.admission()
                drawn = await buffer.draw()
            if drawn is None:
                return
            if not parts.interrupts.admits:
                continue
            ticket = drawn
            prompt, choice = parts.curriculum.draw(ticket)
            parts.ledger.drawn(ticket, prompt, choice)
            self._begin(loops, ticket, prompt)

    def cancel_older_than(self, version: int, reason: str) -> int:
        """Drops the groups in flight that have a token older than `version`. Returns the number of rollouts that end."""
        ended = 0
        for ticket, task in self._tasks.items():
            names = self._parts.interrupts.tokens.names(ticket)
            first = self._parts.interrupts.tokens.first_version(names)
            if first is not None and first < version and not task.done():
                self._cancelled[ticket] = reason
                ended += len(self._parts.engine.unfinished(names))
                task.cancel()
        return ended

    def mean_drawn(self, groups: Sequence[Group]) -> float:
        """Mean reward of all groups that ended since the last step, or the previous value if none did. If the metrics of a killed process
        are lost, it is the mean of `groups`, which this step takes."""
        if not self._rewards and math.isnan(self._mean_drawn):
            self._rewards = [one.reward for group in groups for one in group.scored]
        if self._rewards:
            self._mean_drawn = sum(self._rewards) / len(self._rewards)
            self._rewards.clear()
        return self._mean_drawn

    def stop(self) -> None:
        """Cancels all groups in flight. They stay recorded in checkpoint and journal."""
        for task in self._tasks.values():
            task.cancel()

    # -- one group ------------------------------------------------------------------------------------------------------

    def _begin(self, loops: asyncio.TaskGroup, ticket: int, prompt: Prompt) -> None:
        task = self._tasks[ticket] = loops.create_task(self._roll_group(ticket, prompt))
        task.add_done_callback(lambda _: self._tasks.pop(ticket))

    async def _roll_group(self, ticket: int, prompt: Prompt) -> None:
        started = self._clock()
        try:
            async with self._parts.interrupts.group():
                group = await self._parts.groups.trained(ticket, prompt, partial(self._texts.report, prompt))
            rolled = Rolled(
                ticket=ticket,
                prompt=prompt,
                scored=group.scored,
                failures=group.failures,
                seconds=self._clock() - started,
                lost_tokens=self._not_asked_again(ticket),
                between=group.between,
                times=group.times,
            )
            self._rewards += [one.reward for one in group.scored]
            self._judge(rolled)
        except asyncio.CancelledError:
            if ticket not in self._cancelled:
                raise
            interrupts = self._parts.interrupts
            lost = interrupts.tokens.count(interrupts.tokens.names(ticket))
            rolled = Rolled(
                ticket=ticket, prompt=prompt, scored=(), failures=(), seconds=self._clock() - started, lost_tokens=lost
            )
            self._parts.ledger.ended(rolled, "dropped", self._cancelled.pop(ticket))
        self._parts.groups.forget(ticket)

    def _judge(self, rolled: Rolled) -> None:
        algorithm, ledger = self._parts.algorithm, self._parts.ledger
        made = algorithm.rows(rolled.prompt, rolled.scored) if len(rolled.scored) >= algorithm.min_rollouts else ()
        rows = tuple(replace(row, temperature=self._plan.rollout.temperature) for row in made)
        if not rows:
            fact = ledger.ended(rolled, "failed", rolled.commonest_failure)
        elif reason := algorithm.barren(rows):
            fact = ledger.ended(rolled, "dropped", reason)
        else:
            pairs = algorithm.pairs(rolled.scored)
            group = Group(rolled.ticket, rolled.prompt, rolled.scored, rows, rolled.failures, pairs=pairs)
            fact = ledger.ready(group, rolled)
        self._budgets.spend(rolled, fact)

    def _not_asked_again(self, ticket: int) -> int:
        """Number of recorded tokens of turns that this process did not ask for, because the environment took another course after the kill."""
        parts = self._parts
        lost = sum(len(one.tokens) for one in parts.interrupts.tokens.unused(ticket).values())
        if lost and parts.environment.resumes != "restarted" and not self._diverged:
            self._diverged = True
            parts.telemetry.warn(
                f'an environment that declares resumes="{parts.environment.resumes}" asked for other turns than before the run was killed (ticket '
                f"{ticket}), so {lost} sampled tokens are lost. Make it depend only on its prompt, its seed and its turns, or let it "
                'declare resumes="restarted"'
            )
        return lost
