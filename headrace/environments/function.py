"""The environment that is a function of the user: `async def play(agent, prompt, answer, **columns)`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.environments.config import EnvironmentConfig
from headrace.environments.conversation import Conversation, TurnEncoder
from headrace.environments.workers.environment_pool import Pool, check_function
from headrace.environments.workers.episode_frames import ChatAsked, ChatReply
from headrace.environments.workers.process import FunctionSettings, RolloutAsked
from headrace.errors import ConfigError, RolloutFailed
from headrace.playing import Agent, Environment, EnvironmentKind
from headrace.types import Prompt


def open_function(config: EnvironmentConfig, encoder: TurnEncoder, *, system: str, log: Path | None) -> EnvironmentKind:
    """Makes the environments of `environment.function`. `system`: the system message of prompts that are text; `log` receives what the
    function prints. Raises ConfigError if it cannot be loaded."""
    settings = FunctionSettings(
        config.function,
        seconds=config.seconds,
        tool_seconds=config.tool_seconds,
        tool_characters=config.tool_characters,
        memory=int(config.memory_gib * (1 << 30)),
    )
    check_function(settings)
    pool = Pool(settings, config.workers, log)

    def make(prompt: Prompt, seed: int) -> Environment:
        return FunctionEnvironment(prompt, seed, pool=pool, encoder=encoder, config=config, system=system)

    return EnvironmentKind(make, config.limits, config.resumes, pool.close)


class FunctionEnvironment:
    """Protocol `Environment`."""

    def __init__(
        self,
        prompt: Prompt,
        seed: int,
        *,
        pool: Pool,
        encoder: TurnEncoder,
        config: EnvironmentConfig,
        system: str,
    ) -> None:
        self._prompt, self._seed, self._pool = prompt, seed, pool
        self._encoder, self._config, self._system = encoder, config, system
        self._lives = 0

    async def play(self, agent: Agent) -> Mapping[str, float]:
        def listener() -> _Listener:
            self._lives += 1
            if self._lives > 1:
                agent.again()
            talk = Conversation(agent, self._encoder, system=self._system, tools=self._config.tools)
            return _Listener(agent, talk)

        columns = dict(self._prompt.columns)
        asked = columns.pop(self._prompt.chat) if self._prompt.chat else self._prompt.text
        ended = await self._pool.play(RolloutAsked(asked, columns, self._seed), listener)
        if ended.failure:
            raise RolloutFailed(ended.failure.reason, ended.failure.detail, ended.failure.traceback)
        rewards: Mapping[str, Any] = ended.rewards or {}
        return rewards


class _Listener:
    """Answers what the function asks for."""

    def __init__(self, agent: Agent, talk: Conversation) -> None:
        self._agent, self._talk = agent, talk

    async def chat(self, asked: ChatAsked) -> ChatReply:
        try:
            return await self._talk.say(asked.messages, asked.tools)
        except ConfigError as error:  # the template refuses: raised into the function, whose line the person sees
            return ChatReply(refused=str(error))

    def rewarded(self, name: str, value: float) -> None:
        self._agent.reward(name, value)
