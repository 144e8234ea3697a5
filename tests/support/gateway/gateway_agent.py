"""One rollout behind a gateway, whose agent is a function of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import openai

from headrace.core.batches import Failure
from headrace.core.protocols import Agent, Limits
from headrace.core.types import Prompt
from headrace.episodes.environments.agents.served_rollouts import talks_of
from headrace.episodes.environments.conversation import NO_ARGUMENTS
from headrace.episodes.environments.gateway.gateway import Gateway
from headrace.episodes.environments.gateway.history_trees import GatewayRollout
from headrace.episodes.rollout_session import Played, RolloutSession
from headrace.web.limits import ServerLimits

LONGEST = 120
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def user(text: str) -> Any:
    return {"role": "user", "content": text}


class Asks:
    """The client of an agent, and what it has at hand."""

    def __init__(self, agent: Agent, rollout: GatewayRollout, gateway: Gateway) -> None:
        self.url = url = gateway.url(rollout)
        self.agent, self.rollout, self.gateway = agent, rollout, gateway
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=rollout.secret, max_retries=0)

    async def chat(self, *messages: Any, **more: Any) -> Any:
        return await self.client.chat.completions.create(model="gpt-5", messages=list(messages), **more)

    async def said(self, *messages: Any, **more: Any) -> Any:
        """The message of the reply, as clients put it into the next request."""
        return (await self.chat(*messages, **more)).choices[0].message


Case = Callable[[Asks], Awaitable[None]]


def played(
    model: Any,
    case: Case,
    *,
    limits: Limits | None = None,
    stop: Sequence[str] = (),
    server: ServerLimits | None = None,
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
) -> Played | Failure:
    """Plays one rollout whose agent is `case`. `arguments`: those of its row for the template."""
    encoder = model.encoder
    found: list[Played | Failure] = []

    async def main() -> None:
        gateway = Gateway(encoder, stop, SAMPLING, server or ServerLimits())

        class Environment:
            def __init__(self, prompt: Prompt, seed: int) -> None:
                pass

            async def play(self, agent: Any) -> Mapping[str, float]:
                rollout = await gateway.open(talks_of(agent, encoder, stops=stop, arguments=arguments))
                asks = Asks(agent, rollout, gateway)
                try:
                    await case(asks)
                finally:
                    await asks.client.close()
                    await gateway.shut(rollout)
                return {"won": 1.0}

        session = RolloutSession(0, model, encoder.decode, limits=limits or Limits(turns=20))
        try:
            async with asyncio.timeout(LONGEST):
                found.append(await session.play(Environment, Prompt("p", "?", (1,)), 0))
        finally:
            await gateway.close()

    asyncio.run(main())
    return found[0]


def parents(found: Played | Failure) -> list[tuple[int, ...]]:
    assert isinstance(found, Played), found
    return [turn.parents for turn in found.episode.turns]
