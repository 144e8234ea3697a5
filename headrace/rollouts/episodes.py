"""One prompt -> G episodes: environments ask for turns, the engine samples them, and whatever fails is data with a reason.

Nothing of an environment is saved. When a run is resumed, the environment of each rollout that was under way is made again, and asks for
its turns again: a turn whose request has the same name was sampled already, so that it costs nothing. The name contains a digest of
all tokens before the turn (`name_of_turn`), so that what was recorded is used for no other context than its own.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from headrace.errors import RolloutOver
from headrace.protocols import Environment, EnvironmentKind, Limits
from headrace.rollout_key import RolloutKey
from headrace.settings.user_code import one_line, traceback_of
from headrace.types import Completion, Episode, Failure, Prompt, Request, Scored, Turn

Decode = Callable[[Sequence[int]], str]
Generate = Callable[[Request], Awaitable[Completion]]


@dataclass(frozen=True)
class TurnAsked:
    """A turn that an environment asks for."""

    rollout: int
    """The place of the rollout in its group, from 0."""
    turn: int
    """The place of the turn in its rollout, from 0."""
    context: tuple[int, ...]
    """All tokens before it."""


Ask = Callable[[TurnAsked], Awaitable[Completion]]
"""Samples a turn. Raises `ValueError` where the engine refuses the request."""


@dataclass(frozen=True)
class Played:
    """An episode that is over, with the rewards that its environment gave."""

    episode: Episode
    rewards: Mapping[str, float]


def name_of_turn(ticket: int, prompt: Prompt, asked: TurnAsked, adapter: str = "") -> RolloutKey:
    """The key under which a turn is sampled and recorded."""
    context = "" if asked.context == prompt.tokens else xxhash.xxh3_64_hexdigest(array("q", asked.context).tobytes())
    return RolloutKey(ticket, asked.rollout, asked.turn, adapter, context)


async def roll_out(
    kind: EnvironmentKind, prompt: Prompt, seeds: Sequence[int], ask: Ask, decode: Decode
) -> list[Played | Failure]:
    """The rollouts of one prompt, side by side: one for each of `seeds`, which their environments get."""
    agents = [_Session(rollout, ask, decode, kind.limits) for rollout in range(len(seeds))]
    return await asyncio.gather(
        *(agent.play(kind.make, prompt, seed) for agent, seed in zip(agents, seeds, strict=True))
    )


def with_rewards(judged: Sequence[Scored | Failure], played: Sequence[Played]) -> list[Scored | Failure]:
    """Adds the environments' rewards to those of the scorer. The two never share a name."""
    return [
        one if isinstance(one, Failure) else _with_rewards(one, of.rewards)
        for one, of in zip(judged, played, strict=True)
    ]


def _with_rewards(scored: Scored, rewards: Mapping[str, float]) -> Scored | Failure:
    if not rewards:
        return scored
    if both := sorted(scored.rewards.keys() & rewards.keys()):
        return Failure("environment_reward", f"the environment and a reward function both give {both[0]}; rename one")
    total = scored.reward + sum(rewards.values())
    return msgspec.structs.replace(scored, reward=total, rewards={**scored.rewards, **rewards})


class _Session:
    """Protocol `Agent`: records the turns of one rollout, and keeps it within its limits."""

    def __init__(self, rollout: int, ask: Ask, decode: Decode, limits: Limits) -> None:
        self._rollout, self._ask, self._decode, self._limits = rollout, ask, decode, limits
        self._turns: list[Turn] = []
        self._path: tuple[int, ...] = ()
        """All tokens so far."""
        self._clock: asyncio.Timeout | None = None
        self._asking = False
        self._failure: Failure | None = None
        self._broken: BaseException | None = None
        """The error that ended the engine. It ends the run, even if the environment catches it."""

    async def play(self, make: Callable[[Prompt, int], Environment], prompt: Prompt, seed: int) -> Played | Failure:
        """The one place where a failed rollout becomes data. What is not the rollout's own fault propagates."""
        try:
            async with asyncio.timeout(self._limits.seconds or None) as self._clock:
                try:
                    rewards = await make(prompt, seed).play(self)
                except (Exception, SystemExit) as error:
                    return self._raised(error)
        except TimeoutError:
            return Failure("environment_timeout", f"took more than {self._limits.seconds:g} s between its turns")
        return self._ended(rewards)

    async def turn(self, context: Sequence[int]) -> Completion:
        if self._asking:
            raise RuntimeError("an environment asks for one turn at a time: await the one before")
        number = len(self._turns)
        if number >= self._limits.turns:
            raise self._over("environment_turns", f"asked for more turns than its limit of {self._limits.turns}")
        path = (*self._path, *context) if self._path else tuple(context)
        self._asking = True
        try:
            done = await self._sampled(TurnAsked(self._rollout, number, path))
        finally:
            self._asking = False
        self._turns.append(Turn(tuple(context), done, parents=(number - 1,) if number else ()))
        self._path = (*path, *done.tokens)
        return done

    async def _sampled(self, asked: TurnAsked) -> Completion:
        loop, clock = asyncio.get_running_loop(), self._clock
        assert clock is not None
        left = None if (until := clock.when()) is None else until - loop.time()
        clock.reschedule(None)  # the engine's time is not the environment's
        try:
            done = await self._ask(asked)
        except ValueError as error:
            raise self._over("request_refused", str(error)) from error
        except Exception as error:
            self._broken = error
            raise
        finally:
            if left is not None:
                clock.reschedule(loop.time() + left)
        if done.stop == "error":
            raise self._over("engine_error", done.error)
        return msgspec.structs.replace(done, text=self._decode(done.tokens))

    def _over(self, reason: str, detail: str) -> RolloutOver:
        self._failure = self._failure or Failure(reason, detail)
        return RolloutOver(detail)

    def _raised(self, error: BaseException) -> Failure:
        if self._broken:
            raise self._broken
        return self._failure or Failure("environment_raised", one_line(error), traceback_of(error))

    def _ended(self, rewards: object) -> Played | Failure:
        if self._broken:
            raise self._broken
        if self._failure:
            return self._failure
        if not self._turns:
            return Failure("environment_turns", "ended without asking for a turn")
        if not isinstance(rewards, Mapping):
            return Failure("environment_reward", f"returned {type(rewards).__name__}, not rewards by name")
        if wrong := [name for name, value in rewards.items() if not _is_number(value)]:
            return Failure(
                "environment_reward", f"the reward {wrong[0]} is {rewards[wrong[0]]!r:.60}, not a finite number"
            )
        return Played(Episode(tuple(self._turns)), {str(name): float(value) for name, value in rewards.items()})


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float)) and math.isfinite(value)
