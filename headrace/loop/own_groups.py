"""Groups that are sampled and scored in this process: in a run without a bus, and in each of its rollout hosts otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace.core.batches import Failure
from headrace.core.protocols import EnvironmentKind, Scorer
from headrace.core.types import Completion, Prompt, Request, Scored
from headrace.episodes.episodes import as_trees, roll_out, with_rewards
from headrace.episodes.notebook import Notebook
from headrace.episodes.rollout import seed_of
from headrace.episodes.rollout_session import Decode, Played, Room, TurnAsked
from headrace.facts.waits import Waits
from headrace.loop.group_source import PlayedGroup, Seen
from headrace.loop.loop_plan import LoopPlan
from headrace.loop.partial import Interrupts
from headrace.settings.process_config import EvalConfig


@dataclass(frozen=True, kw_only=True)
class OwnGroups:
    """Protocol `GroupSource`: the engine, environments and scorers of this process."""

    plan: LoopPlan
    evaluation: EvalConfig
    interrupts: Interrupts
    environment: EnvironmentKind
    scorer: Scorer
    evaluated_by: Scorer
    """Scores held-out rollouts, without penalties and teachers' log-probs."""
    notebook: Notebook
    decode: Decode
    waits: Waits
    context_length: int

    async def trained(self, ticket: int, prompt: Prompt, seen: Seen) -> PlayedGroup:
        rollout, context_length = self.plan.rollout, self.context_length
        if len(prompt.tokens) + rollout.max_tokens > context_length:
            detail = (
                f"prompt of {len(prompt.tokens)} tokens + max_tokens {rollout.max_tokens} > context of {context_length}"
            )
            return PlayedGroup(failures=(Failure("prompt_too_long", detail),) * rollout.of(prompt))

        async def ask(asked: TurnAsked) -> Completion:
            return await self.interrupts.generate(self.plan.request(ticket, prompt, asked), asked.heard)

        waits, players, progress = (
            self.waits,
            self.environment.players,
            partial(self.interrupts.tokens.progress, ticket),
        )
        goes_on: dict[str, Any] = {"advances": progress, "allows": self.environment.limits.seconds}
        async with (
            waits.named("rollouts", f"the engine, or {players}", **goes_on)
            if players
            else waits.named("rollouts", "the engine", **goes_on)
        ):
            results = await roll_out(
                self.environment,
                prompt,
                self.plan.environment_seeds(ticket, prompt),
                ask=ask,
                decode=self.decode,
                room=self._room,
                page=partial(self.notebook.page, ticket),
                forks=rollout.forks,
            )
        if not (played := _played(results, seen)):
            return _group(results)
        async with waits.named("rollouts", "the scorer"):
            judged = await self.scorer.score(prompt, [one.episode for one in played])
        return _group(results, played, judged)

    async def held_out(self, number: int, index: int, prompt: Prompt, seen: Seen) -> PlayedGroup:
        async def ask(asked: TurnAsked) -> Completion:
            return await self.interrupts.once(self._held_out_request(number, index, asked), asked.heard)

        seeds = [seed_of("held-out environment", index, i) for i in range(self.evaluation.samples)]
        waits, players = self.waits, self.environment.players
        goes_on: dict[str, Any] = {"advances": self.progress, "allows": self.environment.limits.seconds}
        async with (
            waits.named("evaluation", f"the engine, or {players}", **goes_on)
            if players
            else waits.named("evaluation", "the engine", **goes_on)
        ):
            results = await roll_out(self.environment, prompt, seeds, ask=ask, decode=self.decode, room=self._room)
        if not (played := _played(results, seen)):
            return _group(results)
        async with waits.named("evaluation", "the scorer"):
            judged = await self.evaluated_by.score(prompt, [one.episode for one in played])
        return _group(results, played, judged)

    def forget(self, ticket: int) -> None:
        self.interrupts.tokens.forget_group(ticket)
        self.notebook.forget_group(ticket)

    def progress(self) -> object:
        return self.interrupts.tokens.progress()

    @property
    def _room(self) -> Room:
        return Room(self.context_length, self.plan.rollout.max_tokens)

    def _held_out_request(self, number: int, index: int, asked: TurnAsked) -> Request:
        """Makes a request. Its seed does not depend on the step, so that before and after differ only by the weights."""
        turn = (asked.turn,) if asked.turn else ()
        name = "/".join(map(str, (number, index, asked.rollout, *turn)))
        adapter = self.plan.adapter
        request = self.plan.rollout.evaluation(
            f"eval:{adapter}:{name}",  # adapters share an engine, so the name must be unique
            asked.context,
            seed_of("held-out", index, asked.rollout, *turn),
            self.evaluation.temperature,
            adapter,
            constraint=asked.constraint,
        )
        return asked.limited(request)


def _played(results: Sequence[Played | Failure], seen: Seen) -> list[Played]:
    played = [result for result in results if isinstance(result, Played)]
    seen([one.episode for one in played])
    return played


def _group(
    results: Sequence[Played | Failure], played: Sequence[Played] = (), scores: Sequence[Scored | Failure] = ()
) -> PlayedGroup:
    judged = with_rewards(scores, played)
    between = {of.rollout: of.between for one, of in zip(judged, played, strict=True) if isinstance(one, Scored)}
    now = asyncio.get_running_loop().time()
    times = {of.rollout: _before(now, of) for one, of in zip(judged, played, strict=True) if isinstance(one, Scored)}
    joined = as_trees(judged, played)
    return PlayedGroup(
        scored=tuple(result for result in joined if isinstance(result, Scored)),
        failures=tuple(result for result in [*results, *joined] if isinstance(result, Failure)),
        between=tuple(between.values()),
        times=tuple(times.values()),
    )


def _before(now: float, played: Played) -> tuple[float, ...]:
    return tuple(now - moment for pair in played.times for moment in pair)
