"""The port through which the loops get groups, and the groups of this process: prompts go in, scored rollouts come out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from headrace.core.batches import Failure
from headrace.core.protocols import EnvironmentKind, Scorer
from headrace.core.types import Completion, Episode, Prompt, Request, RolloutKey, Scored, Struct
from headrace.episodes.episodes import as_trees, roll_out, with_rewards
from headrace.episodes.rollout import seed_of
from headrace.episodes.rollout_session import Decode, Notebook, Played, Room, TurnAsked
from headrace.facts.waits import Waits
from headrace.loop.loop_plan import LoopPlan
from headrace.loop.openings import CacheSize, Openings
from headrace.loop.partial import Interrupts
from headrace.settings.process_config import EvalConfig

# --- The port through which the loops get groups
# Prompts go in, scored rollouts come back.


class PlayedGroup(Struct, frozen=True):
    """The rollouts of a group, each scored or failed."""

    scored: tuple[Scored, ...] = ()
    failures: tuple[Failure, ...] = ()
    between: tuple[float, ...] = ()
    """Seconds that each scored one spent between its turns."""
    times: tuple[tuple[float, ...], ...] = ()
    """Seconds before the group was scored at which each turn of each scored one was asked for and had ended, in pairs."""


Seen = Callable[[Sequence[Episode]], None]
"""Called with the episodes of a group as soon as they are known."""


class GroupSource(Protocol):
    async def trained(self, ticket: int, prompt: Prompt, seen: Seen) -> PlayedGroup:
        """Returns a group of training rollouts."""

    async def held_out(self, number: int, index: int, prompt: Prompt, seen: Seen) -> PlayedGroup:
        """Returns the rollouts of a held-out prompt. `number`: the measurement; `index`: the place of the prompt in it."""

    def measuring(
        self, evaluation: EvalConfig, environment: EnvironmentKind | None, scorer: Scorer | None
    ) -> GroupSource:
        """Returns the source of another evaluation set's rollouts. None: what the held-out prompts have."""

    def forget(self, ticket: int) -> None:
        """Frees what is kept of a group. Its outcome is in the journal."""

    def progress(self) -> object:
        """Returns what changes as long as groups are sampled."""


# --- Groups of this process
# They are sampled and scored here in a run without a bus, and in each of its rollout hosts otherwise.


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
    openings: Openings = field(default_factory=lambda: Openings(CacheSize()))
    """Holds rollouts of several turns back until the engine's KV cache has room for them."""

    async def trained(self, ticket: int, prompt: Prompt, seen: Seen) -> PlayedGroup:
        rollout, context_length = self.plan.rollout, self.context_length
        if len(prompt.tokens) + rollout.max_tokens > context_length:
            detail = (
                f"prompt of {len(prompt.tokens)} tokens + max_tokens {rollout.max_tokens} > context of {context_length}"
            )
            return PlayedGroup(failures=(Failure("prompt_too_long", detail),) * rollout.of(prompt))

        async def ask(asked: TurnAsked) -> Completion:
            request = self.plan.request(ticket, prompt, asked)
            if self.environment.limits.turns == 1:
                return await self.interrupts.generate(request, asked.heard)
            sizes = {"context": len(asked.context), "most": request.sampling.max_tokens}
            async with self.openings.turn((ticket, asked.rollout), prompt=len(prompt.tokens), **sizes) as done:
                completion = await self.interrupts.generate(request, asked.heard)
                done(completion)
            return completion

        waits, players, progress = self.waits, self.environment.players, partial(self._progress_of, ticket)
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
                ended=lambda number: self.openings.close((ticket, number)),
            )
        if not (played := _played(results, seen)):
            return _group(results)
        async with waits.named("rollouts", "the scorer"):
            judged = await self.scorer.score(prompt, [played_rollout.episode for played_rollout in played])
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
            judged = await self.evaluated_by.score(prompt, [played_rollout.episode for played_rollout in played])
        return _group(results, played, judged)

    def measuring(
        self, evaluation: EvalConfig, environment: EnvironmentKind | None, scorer: Scorer | None
    ) -> OwnGroups:
        return replace(
            self,
            evaluation=evaluation,
            environment=environment or self.environment,
            evaluated_by=scorer or self.evaluated_by,
        )

    def forget(self, ticket: int) -> None:
        self.interrupts.tokens.forget_group(ticket)
        self.notebook.forget_group(ticket)

    def progress(self) -> object:
        return self.interrupts.tokens.progress()

    def _progress_of(self, ticket: int) -> object:
        """Returns what changes as long as the group is worked on. One that is held back waits for all others."""
        tokens = self.interrupts.tokens
        return tokens.progress() if self.openings.holds_back(ticket) else tokens.progress(ticket)

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
    seen([played_rollout.episode for played_rollout in played])
    return played


def _group(
    results: Sequence[Played | Failure], played: Sequence[Played] = (), scores: Sequence[Scored | Failure] = ()
) -> PlayedGroup:
    judged = with_rewards(scores, played)
    between = {
        of.rollout: of.between for rollout, of in zip(judged, played, strict=True) if isinstance(rollout, Scored)
    }
    now = asyncio.get_running_loop().time()
    times = {
        of.rollout: _before(now, of) for rollout, of in zip(judged, played, strict=True) if isinstance(rollout, Scored)
    }
    joined = as_trees(judged, played)
    return PlayedGroup(
        scored=tuple(result for result in joined if isinstance(result, Scored)),
        failures=tuple(result for result in [*results, *joined] if isinstance(result, Failure)),
        between=tuple(between.values()),
        times=tuple(times.values()),
    )


def _before(now: float, played: Played) -> tuple[float, ...]:
    return tuple(now - moment for pair in played.times for moment in pair)


# --- Tickets that may be what ends the processes that work on them, and when they are given up
#
# A process that dies says of nothing in its hands that it was the cause. So:
#
# 1. Each death is charged to every ticket that the process had in hand.
# 2. A ticket that is charged with all but one of the deaths that it may cost is a *suspect*. Suspects are worked on one at a time, beside any
#    number of other tickets. So no further death is charged to two of them, and an innocent one ends in peace when its turn comes.
# 3. A ticket that is charged with `most` deaths is *given up*: nobody works on it again. Its deaths are forgiven, because a run can do nothing
#    about such a prompt, but has `engine.max_deaths` for an engine that is broken. They are forgiven only if some request was finished since the
#    last time: an engine that dies of everything is broken.


Forgive = Callable[[], None]
"""Takes one death off the count of its process. Repeated calls do nothing."""


def _unforgiving() -> None:
    pass


class Suspects:
    """The deaths that tickets are charged with. The engines of a fleet share one."""

    def __init__(self, most: int) -> None:
        """`most`: deaths with which a ticket is given up."""
        self.most = most
        self.given_up: set[str] = set()
        self._charged: dict[str, list[Forgive]] = {}
        self._turn = ""
        """The suspect that is being worked on, with what of it is in hand."""
        self._in_hand: set[str] = set()
        self._waiting: list[Callable[[], None]] = []
        self._finished = False
        """Whether something was finished since deaths were last forgiven."""

    def charge(self, tickets: Iterable[str], forgive: Forgive = _unforgiving) -> list[str]:
        """Charges a death to these tickets. Returns those that are given up now."""
        found = []
        for ticket in dict.fromkeys(tickets):
            charged = self._charged.setdefault(ticket, [])
            charged.append(forgive)
            if len(charged) >= self.most and ticket not in self.given_up:
                self.given_up.add(ticket)
                found.append(ticket)
                if self._finished:
                    self._finished = False
                    for tell in charged:
                        tell()
        return found

    @property
    def suspects(self) -> list[str]:
        """The tickets that may be worked on one at a time only."""
        return [ticket for ticket in self._charged if self._is_suspect(ticket)]

    def may_begin(self, ticket: str, name: str) -> bool:
        """Takes `name`, which belongs to the ticket, into hand. False if another suspect is being worked on: try again when `listen` calls."""
        if not self._is_suspect(ticket):
            return True
        if self._turn not in ("", ticket):
            return False
        self._turn = ticket
        self._in_hand.add(name)
        return True

    def ended(self, name: str, finished: bool = False) -> None:
        """`name` is in hand no more. `finished`: whether it was done, rather than taken away."""
        self._finished |= finished
        if name in self._in_hand:
            self._in_hand.discard(name)
            if not self._in_hand:
                self._turn = ""
                for waiting in self._waiting:
                    waiting()

    def listen(self, turn_is_free: Callable[[], None]) -> None:
        """`turn_is_free`: called when another suspect may begin."""
        self._waiting.append(turn_is_free)

    def _is_suspect(self, ticket: str) -> bool:
        return len(self._charged.get(ticket, ())) >= max(1, self.most - 1) and ticket not in self.given_up


def ticket_of(request_id: str) -> str:
    """Returns the ticket of a request, as words; the id itself if it belongs to no rollout."""
    key = RolloutKey.read(request_id)
    return request_id if key is None else f"{key.adapter}:t{key.ticket}".removeprefix(":")


def said_of(tickets: Sequence[str], most: int, what: str) -> str:
    """`what`: the processes that died."""
    return (
        f"{', '.join(tickets)} {'is' if len(tickets) == 1 else 'are'} given up: {most} {what} died while they worked on it "
        "(engine.ticket_deaths). Its rollouts are counted as failed"
    )
