"""Rollouts whose turns agents ask for over HTTP, whoever starts these agents."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from headrace.core.chat.messages import arguments_of
from headrace.core.errors import RolloutFailed
from headrace.core.protocols import Agent
from headrace.core.types import Prompt
from headrace.episodes.environments.agents.agent_process import GivenRewards
from headrace.episodes.environments.config import ToolPlace
from headrace.episodes.environments.conversation import NO_ARGUMENTS, Conversation
from headrace.episodes.environments.gateway.gateway import Gateway
from headrace.episodes.environments.gateway.history_trees import ChatTree, GatewayRollout, Talks, TextTree
from headrace.episodes.environments.gateway.turn_request import ROLE, GatewayEncoder, OpenedWith

# --- The file with the address at which agents elsewhere reach a run.


class AddressFile:
    """The file with a run's address, there while the run can be reached. One that a killed process of the run has left names nobody, and is removed."""

    def __init__(self, path: Path) -> None:
        self._path, self._published = path, False
        path.unlink(missing_ok=True)

    def publish(self, address: str) -> None:
        """Writes the address, once, as a whole file that nobody else can read."""
        if self._published:
            return
        part = self._path.with_name(f"{self._path.name}.part")
        part.unlink(missing_ok=True)
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(handle, f"{address}\n".encode())
        finally:
            os.close(handle)
        part.rename(self._path)
        self._published = True

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


# --- served rollouts ------------------------------------------------------------


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
            message = (
                f"gave the role {role} a reward, and it had no turn: its turns are those of the model {ROLE}{role}"
            )
            raise RolloutFailed("environment_reward", message)
        for name, value in given.items():
            if f"{role}.{name}" in rewards:
                message = f"gave the reward {role}.{name} twice, by itself and as one of a role; give one another name"
                raise RolloutFailed("environment_reward", message)
            agent.reward(f"{role}.{name}", value, speaker.last)
    return {name: value for name, value in rewards.items() if not isinstance(value, Mapping)}


def given_of(prompt: Prompt, seed: int) -> dict[str, Any]:
    """Returns what an agent is given."""
    columns = dict(prompt.columns)
    asked: Any = columns.pop(prompt.chat) if prompt.chat else prompt.text
    return {"prompt": asked, "columns": columns, "seed": seed}
