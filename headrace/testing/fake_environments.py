"""An environment of several turns without a tokenizer, for tests and simulations: its replies follow from the sampled
tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from headrace.core.protocols import KEPT, Agent, EnvironmentKind, Limits, Resumes
from headrace.core.types import Completion, Prompt

ChatReply = Callable[[Completion, int], Sequence[int]]
"""The tokens that follow a turn, given its completion and the seed of the rollout."""


def echo(done: Completion, seed: int) -> Sequence[int]:
    """Returns tokens that depend on the completion's length and its last token."""
    return 98, len(done.tokens), *done.tokens[-1:]


@dataclass(kw_only=True)
class ScriptedTurns:
    """Protocol `Environment`: asks for `turns` turns, with the tokens of `reply` between two of them."""

    prompt: Prompt = field(kw_only=False)
    seed: int = field(kw_only=False)
    turns: int = 2
    reply: ChatReply = echo
    seconds: float = 0.0
    """Seconds between two turns. Only `asyncio.sleep`, so that it works in virtual time."""
    reward: float = 0.5
    """Its own reward, by the name `scripted`."""
    keeps: bool = False
    """Whether it keeps what it said: then `reply` is not asked again after a kill."""

    async def play(self, agent: Agent) -> Mapping[str, float]:
        replies = [msgspec.msgpack.decode(note) for note in agent.kept]
        done = await agent.turn(self.prompt.tokens)
        for number in range(self.turns - 1):
            if number == len(replies):
                replies.append(await self._reply(agent, done))
            done = await agent.turn(replies[number])
        return {"scripted": self.reward}

    async def _reply(self, agent: Agent, done: Completion) -> Sequence[int]:
        await asyncio.sleep(self.seconds)
        reply = self.reply(done, self.seed)
        if self.keeps:
            agent.keep(msgspec.msgpack.encode(reply))
        return reply


def scripted(
    turns: int = 2,
    *,
    reply: ChatReply = echo,
    seconds: float = 0.0,
    reward: float = 0.5,
    limits: Limits | None = None,
    resumes: Resumes = "replayed",
) -> EnvironmentKind:
    """`limits`: as many turns as it asks for, unless given."""
    keeps = resumes in KEPT
    make = partial(ScriptedTurns, turns=turns, reply=reply, seconds=seconds, reward=reward, keeps=keeps)
    return EnvironmentKind(make, limits or Limits(turns=turns), resumes)


TWO_TURNS = scripted()
