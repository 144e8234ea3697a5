"""One rollout while its environment plays it: the session records what was sampled, and keeps it within its limits."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from headrace.errors import RolloutFailed, RolloutOver
from headrace.playing import Environment, Limits
from headrace.settings.user_code import one_line, traceback_of
from headrace.types import Completion, Episode, Failure, Prompt, Request, Turn

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


class Room(NamedTuple):
    """The engine's room for a path of an episode."""

    context: int
    """The most tokens of a request with its completion."""
    turn: int
    """The most tokens of a completion."""


ENDLESS = Room(1 << 62, 0)


@dataclass(frozen=True)
class Played:
    """An episode that is over, with the rewards that its environment gave."""

    episode: Episode
    rewards: Mapping[str, float]
    turn_rewards: tuple[dict[str, float], ...] = ()
    """Rewards of single turns by name, one dict per turn; empty if no turn got one."""


class RolloutSession:
    """Protocol `Agent`."""

    def __init__(self, rollout: int, ask: Ask, decode: Decode, *, limits: Limits, room: Room = ENDLESS) -> None:
        self._rollout, self._ask, self._decode, self._limits = rollout, ask, decode, limits
        self._longest = min(limits.tokens or room.context, room.context) - room.turn
        """The most tokens that a turn may come after."""
        self._clock: asyncio.Timeout | None = None
        self._asking = False
        self._failure: Failure | None = None
        self._broken: BaseException | None = None
        """The error that ended the engine. It ends the run, even if the environment catches it."""
        self._begin()

    def _begin(self) -> None:
        self._turns: list[Turn] = []
        self._rewards: list[dict[str, float]] = []
        self._path: tuple[int, ...] = ()
        """All tokens so far of the path that the next turn extends."""
        self._cut = ""

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

    async def turn(
        self,
        context: Sequence[int],
        *,
        fresh: bool = False,
        messages: Sequence[Mapping[str, Any]] = (),
        read: Callable[[Completion], dict[str, Any]] | None = None,
    ) -> Completion:
        if self._asking:
            raise RuntimeError("an environment asks for one turn at a time: await the one before")
        number = len(self._turns)
        if self._cut:
            raise self._over("environment_turns", f"asked for a turn after it was cut off at its limit of {self._cut}")
        if number >= self._limits.turns:
            raise self._over("environment_turns", f"asked for more turns than its limit of {self._limits.turns}")
        path = self._path_to(context, fresh)
        self._asking = True
        try:
            done = await self._sampled(TurnAsked(self._rollout, number, path))
        finally:
            self._asking = False
        reply = read(done) if read else {}
        parents = (number - 1,) if number and not fresh else ()
        self._turns.append(
            Turn(tuple(context), done, parents=parents, messages=tuple(map(dict, messages)), reply=reply)
        )
        self._rewards.append({})
        self._path = (*path, *done.tokens)
        return done

    def cut_off(self, context: Sequence[int], *, fresh: bool = False) -> str:
        if len(self._turns) >= self._limits.turns:
            self._cut = "turns"
        elif len(self._path_to(context, fresh)) > self._longest:
            self._cut = "tokens"
        return self._cut

    def reward(self, name: str, value: float) -> None:
        if not self._turns:
            self._fail("environment_reward", f"gave the reward {name} to a turn before there was one")
        elif not _is_number(value):
            self._fail("environment_reward", f"the reward {name} of a turn is {value!r:.60}, not a finite number")
        else:
            given = self._rewards[-1]
            given[name] = given.get(name, 0.0) + float(value)

    def again(self) -> None:
        self._begin()
        if self._clock and self._clock.when() is not None:
            self._clock.reschedule(asyncio.get_running_loop().time() + self._limits.seconds)

    def _path_to(self, context: Sequence[int], fresh: bool) -> tuple[int, ...]:
        return (*self._path, *context) if self._path and not fresh else tuple(context)

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
        self._fail(reason, detail)
        return RolloutOver(detail)

    def _fail(self, reason: str, detail: str) -> None:
        self._failure = self._failure or Failure(reason, detail)

    def _raised(self, error: BaseException) -> Failure:
        if self._broken:
            raise self._broken
        if isinstance(error, RolloutFailed):
            return self._failure or Failure(error.reason, error.detail, error.traceback)
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
        given = tuple(self._rewards) if any(self._rewards) else ()
        named = {str(name): float(value) for name, value in rewards.items()}
        return Played(Episode(tuple(self._turns), self._cut), named, given)


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float)) and math.isfinite(value)
