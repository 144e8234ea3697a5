"""Rollouts whose turns agents ask for over HTTP, whoever starts these agents."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from headrace.environments.config import EnvironmentConfig
from headrace.environments.conversation import Conversation, TurnEncoder
from headrace.environments.gateway.chat_tree import ChatTree
from headrace.environments.gateway.gateway import Gateway
from headrace.environments.gateway.gateway_rollout import GatewayRollout
from headrace.environments.gateway.text_tree import TextEncoder, TextTree
from headrace.playing import Agent
from headrace.types import Prompt


class GatewayEncoder(TurnEncoder, TextEncoder, Protocol):
    """The part of `models.chat.ChatEncoder` that the gateway uses."""

    directory: Path

    def end_tokens(self) -> frozenset[int]: ...


class ServedRollouts:
    def __init__(self, config: EnvironmentConfig, encoder: GatewayEncoder, gateway: Gateway, system: str) -> None:
        """`system`: the system message of conversations that have none."""
        self.config, self.gateway = config, gateway
        self._encoder, self._system = encoder, system

    @asynccontextmanager
    async def open(self, agent: Agent) -> AsyncIterator[GatewayRollout]:
        """A rollout that can be asked for turns within the context."""
        encoder, stops = self._encoder, self.gateway.stop
        begin = partial(Conversation, agent, encoder, system=self._system, tools=self.config.tools, stops=stops)
        rollout = await self.gateway.open(ChatTree(begin), TextTree(agent, encoder, stops))
        try:
            yield rollout
        finally:
            await self.gateway.shut(rollout)


def given_of(prompt: Prompt, seed: int) -> dict[str, Any]:
    """Returns what an agent is given."""
    columns = dict(prompt.columns)
    asked: Any = columns.pop(prompt.chat) if prompt.chat else prompt.text
    return {"prompt": asked, "columns": columns, "seed": seed}


def publish_address(path: Path, text: str) -> None:
    """Writes the address at which agents elsewhere reach the run, as a whole file that nobody else can read."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)
    part.rename(path)
