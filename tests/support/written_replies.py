"""Models whose replies are written down: an engine for whole rollouts, and an agent for a function that plays one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import tool_chats

from headrace.environments.workers.talk import AgentReply, BlockingAgent, messages_of
from headrace.rollouts.rollout_session import TurnAsked
from headrace.types import Completion, VersionSpan


class WrittenEngine:
    """Says what is written down for each turn. A turn that it was asked for before is not sampled again, as in a run."""

    def __init__(self, *says: str) -> None:
        self._says = says
        self.sampled: dict[TurnAsked, Completion] = {}
        self.asked: list[TurnAsked] = []

    async def __call__(self, asked: TurnAsked) -> Completion:
        self.asked.append(asked)
        await asyncio.sleep(0)
        if asked not in self.sampled:
            tokens = tuple(tool_chats.tokens_of(self._says[min(asked.turn, len(self._says) - 1)]))
            self.sampled[asked] = Completion(tokens, (-1.0,) * len(tokens), (VersionSpan(0, 0, 0),), "stop")
        return self.sampled[asked]


class WrittenAgent(BlockingAgent):
    """Replies in the same thread. It is at its limit after `limit` turns."""

    def __init__(self, *says: str, seed: int = 0, limit: int | None = None) -> None:
        self.seed = seed
        self._says, self._limit = iter(says), len(says) if limit is None else limit
        self.heard: list[list[dict[str, Any]]] = []
        """The messages of each turn that was asked for."""
        self.rewards: list[tuple[str, float]] = []

    def chat(self, messages: str | Mapping[str, Any] | Sequence[Mapping[str, Any]], tools: Any = None) -> AgentReply:
        self.heard.append(messages_of(messages))
        if len(self.heard) > self._limit:
            return AgentReply("", (), "limit", 0)
        return AgentReply(next(self._says), (), "stop", 1)

    def reward(self, name: str, value: float) -> None:
        self.rewards.append((name, value))
