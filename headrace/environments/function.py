"""The environment that code in processes plays: a function of the user, `async def play(agent, prompt, answer, **columns)`, or an
environment of another library (`libraries/`), which is such a function too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.environments.config import EnvironmentConfig
from headrace.environments.conversation import Conversation, TurnEncoder
from headrace.environments.kinds import LIBRARIES
from headrace.environments.workers.environment_pool import Pool, check_function
from headrace.environments.workers.episode_frames import ChatAsked, ChatReply, Rewarded
from headrace.environments.workers.loading import LibrarySettings
from headrace.environments.workers.process import FunctionSettings, RolloutAsked
from headrace.errors import ConfigError, RolloutFailed
from headrace.playing import Agent, Environment, EnvironmentKind
from headrace.sandbox.sandbox_limits import DEFAULT, SandboxSettings
from headrace.types import Prompt


def open_function(
    config: EnvironmentConfig,
    encoder: TurnEncoder,
    *,
    system: str,
    log: Path | None,
    alone: bool = True,
    sandbox: SandboxSettings = DEFAULT,
) -> EnvironmentKind:
    """Makes the environments of `environment.function` or of a library. `system`: the system message of prompts that are text; `log`
    receives what the code prints; `alone`: whether nothing else gives rewards; `sandbox`: the settings of programs that it runs. Raises
    ConfigError if it cannot be loaded."""
    settings = FunctionSettings(
        spec=config.function or LIBRARIES[config.kind],
        what=f"environment.function = {config.function}" if config.function else config.setting,
        library=None if config.function else LibrarySettings(config.name, dict(config.options), config.max_turns),
        seconds=config.seconds,
        tool_seconds=config.tool_seconds,
        tool_characters=config.tool_characters,
        memory=int(config.memory_gib * (1 << 30)),
        sandbox=sandbox.as_text(),
    )
    check_function(settings)
    pool = Pool(settings, config.workers, log)

    def make(prompt: Prompt, seed: int) -> Environment:
        return FunctionEnvironment(prompt, seed, pool=pool, encoder=encoder, config=config, system=system, alone=alone)

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
        alone: bool,
    ) -> None:
        self._prompt, self._seed, self._pool = prompt, seed, pool
        self._encoder, self._config, self._system = encoder, config, system
        self._alone = alone
        self._lives = 0
        self._given = False
        """Whether a turn got a reward."""

    async def play(self, agent: Agent) -> Mapping[str, float]:
        def listener() -> _Listener:
            self._lives, self._given = self._lives + 1, False
            if self._lives > 1:
                agent.again()
            return _Listener(agent, self._talk, self._was_given)

        columns = dict(self._prompt.columns)
        asked = columns.pop(self._prompt.chat) if self._prompt.chat else self._prompt.text
        ended = await self._pool.play(RolloutAsked(asked, columns, self._seed), listener)
        if ended.failure:
            raise RolloutFailed(ended.failure.reason, ended.failure.detail, ended.failure.traceback)
        if self._alone and not ended.rewards and not self._given:
            raise RolloutFailed("environment_reward", "returned no reward, and there is no reward function")
        rewards: Mapping[str, Any] = ended.rewards or {}
        return rewards

    def _talk(self, agent: Agent, role: str) -> Conversation:
        return Conversation(agent, self._encoder, system=self._system, tools=self._config.tools, role=role)

    def _was_given(self) -> None:
        self._given = True


class _Listener:
    """Answers what the function asks for."""

    def __init__(self, agent: Agent, talk: Callable[[Agent, str], Conversation], given: Callable[[], None]) -> None:
        """`talk`: makes the conversation of a role."""
        self._agent, self._make, self._given = agent, talk, given
        self._talks: dict[str, Conversation] = {}

    async def chat(self, asked: ChatAsked) -> ChatReply:
        if asked.role not in self._talks:
            self._talks[asked.role] = self._make(self._agent, asked.role)
        try:
            return await self._talks[asked.role].say(asked.messages, asked.tools)
        except ConfigError as error:  # the template refuses: raised into the function, whose line the person sees
            return ChatReply(refused=str(error))

    def rewarded(self, given: Rewarded) -> None:
        self._given()
        name = f"{given.role}.{given.name}" if given.role else given.name
        talk = self._talks.get(given.role)
        if talk is None or talk.last is None:
            raise RolloutFailed("environment_reward", f"gave the reward {name} to a turn before there was one")
        self._agent.reward(name, given.value, talk.last)
