"""An environment of several turns without a tokenizer, for tests and simulations: its replies follow from the sampled
tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from headrace.playing import Agent, EnvironmentKind, Limits, Resumes
from headrace.types import Completion, Prompt

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

    async def play(self, agent: Agent) -> Mapping[str, float]:
        done = await agent.turn(self.prompt.tokens)
        for _ in range(self.turns - 1):
            await asyncio.sleep(self.seconds)
            done = await agent.turn(self.reply(done, self.seed))
        return {"scripted": self.reward}


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
    make = partial(ScriptedTurns, turns=turns, reply=reply, seconds=seconds, reward=reward)
    return EnvironmentKind(make, limits or Limits(turns=turns), resumes)


TWO_TURNS = scripted()
