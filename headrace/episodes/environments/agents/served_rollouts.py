"""Rollouts whose turns agents ask for over HTTP, whoever starts these agents."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from headrace.core.chat.messages import arguments_of
from headrace.core.errors import RolloutFailed
from headrace.core.protocols import Agent
from headrace.core.types import Prompt
from headrace.episodes.environments.agents.printed_reward import GivenRewards
from headrace.episodes.environments.config import ToolPlace
from headrace.episodes.environments.conversation import NO_ARGUMENTS, Conversation
from headrace.episodes.environments.gateway.chat_tree import ChatTree
from headrace.episodes.environments.gateway.gateway import Gateway
from headrace.episodes.environments.gateway.gateway_rollout import GatewayRollout, Talks
from headrace.episodes.environments.gateway.opened_with import GatewayEncoder, OpenedWith
from headrace.episodes.environments.gateway.text_tree import TextTree
from headrace.episodes.environments.gateway.turn_request import ROLE


class ServedRollouts:
    def __init__(self, opened: OpenedWith, gateway: Gateway) -> None:
        self.config, self.gateway = opened.config, gateway
        self._encoder, self._system = opened.encoder, opened.system

    @asynccontextmanager
    async def open(self, agent: Agent, prompt: Prompt) -> AsyncIterator[GatewayRollout]:
        """A rollout that can be asked for turns within the context."""
        talks = talks_of(
            agent,
            self._encoder,
            system=self._system,
            tools=self.config.tools,
            stops=self.gateway.stop,
            arguments=arguments_of(prompt.columns),
        )
        rollout = await self.gateway.open(talks)
        try:
            yield rollout
        finally:
            await self.gateway.shut(rollout)


def talks_of(
    agent: Agent,
    encoder: GatewayEncoder,
    *,
    stops: Sequence[str],
    system: str = "",
    tools: ToolPlace = "template",
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
) -> Talks:
    """Returns what makes the conversations of each agent of a rollout. The settings are those of `Conversation`."""

    def talks(role: str) -> tuple[ChatTree, TextTree]:
        settings: dict[str, Any] = {"system": system, "tools": tools, "stops": stops, "arguments": arguments}
        begin = partial(Conversation, agent, encoder, role=role, **settings)
        return ChatTree(begin), TextTree(agent, encoder, stops, role)

    return talks


def give(agent: Agent, rollout: GatewayRollout, rewards: GivenRewards) -> dict[str, float]:
    """Gives each role its rewards, as those of its last turn, and returns those of the rollout. Raises RolloutFailed for a role without
    a turn."""
    for role, given in rewards.items():
        if not isinstance(given, Mapping):
            continue
        speaker = rollout.speaker_named(role)
        if speaker is None or speaker.last is None:
            said = f"gave the role {role} a reward, and it had no turn: its turns are those of the model {ROLE}{role}"
            raise RolloutFailed("environment_reward", said)
        for name, value in given.items():
            agent.reward(f"{role}.{name}", value, speaker.last)
    return {name: value for name, value in rewards.items() if not isinstance(value, Mapping)}


def given_of(prompt: Prompt, seed: int) -> dict[str, Any]:
    """Returns what an agent is given."""
    columns = dict(prompt.columns)
    asked: Any = columns.pop(prompt.chat) if prompt.chat else prompt.text
    return {"prompt": asked, "columns": columns, "seed": seed}
