"""The environment that code in processes plays: a function of the user, `async def play(agent, prompt, answer, **columns)`, or a class that
goes from turn to turn, as those of other libraries are (`libraries/`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from headrace.core.chat.messages import arguments_of
from headrace.core.errors import ConfigError, RolloutFailed
from headrace.core.protocols import KEPT, Agent, Environment, EnvironmentKind, Resumes
from headrace.core.types import Prompt
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.conversation import Conversation, TurnEncoder
from headrace.episodes.environments.kinds import LIBRARIES
from headrace.episodes.environments.turn_log import TurnLog
from headrace.episodes.environments.workers.environment_pool import Beginning, Pool, check_function
from headrace.episodes.environments.workers.episode_frames import (
    ChatAsked,
    ChatReply,
    FunctionLoaded,
    ResumedTurn,
    Rewarded,
    RolloutDone,
    ToolAnswered,
)
from headrace.episodes.environments.workers.loading import LibrarySettings
from headrace.episodes.environments.workers.process import FunctionSettings, RolloutAsked
from headrace.episodes.sandbox.sandbox_limits import DEFAULT, SandboxSettings
from headrace.processes.asked_process import HERE, Sites


def open_function(
    config: EnvironmentConfig,
    encoder: TurnEncoder,
    *,
    system: str,
    log: Path | None,
    alone: bool = True,
    sandbox: SandboxSettings = DEFAULT,
    sites: Sites = HERE,
) -> EnvironmentKind:
    """Makes the environments of `environment.function` or of a library. `system`: the system message of prompts that are text; `log`
    receives what the code prints; `alone`: whether nothing else gives rewards; `sandbox`: the settings of programs that it runs; `sites`: the
    machines on which it runs. Raises ConfigError if it cannot be loaded."""
    settings = function_settings(config, sandbox)
    resumes = _resumes(config, check_function(settings))
    pool = Pool(replace(settings, resumes=resumes), config.workers, log, sites)
    keeps = resumes in KEPT

    def make(prompt: Prompt, seed: int) -> Environment:
        return FunctionEnvironment(
            prompt, seed, pool=pool, encoder=encoder, config=config, system=system, alone=alone, keeps=keeps
        )

    return EnvironmentKind(make, config.limits, resumes, close=pool.close)


def function_settings(config: EnvironmentConfig, sandbox: SandboxSettings) -> FunctionSettings:
    """The settings of processes that play `environment.function` or a library."""
    return FunctionSettings(
        spec=config.function or LIBRARIES[config.kind],
        what=f"environment.function = {config.function}" if config.function else config.setting,
        library=None if config.function else LibrarySettings(config.name, dict(config.options), config.max_turns),
        seconds=config.seconds,
        tool_seconds=config.tool_seconds,
        tool_characters=config.tool_characters,
        memory=int(config.memory_gib * (1 << 30)),
        sandbox=sandbox.as_text(),
    )


def _resumes(config: EnvironmentConfig, loaded: FunctionLoaded) -> Resumes:
    """Returns how rollouts go on after a kill. Raises ConfigError if the environment cannot do what the setting says."""
    if config.resumes == "auto":
        return "exported" if loaded.exports and not loaded.exports_if_set else "replayed"
    needs = {"exported": loaded.exports, "stateless": loaded.stepped}
    if not needs.get(config.resumes, True):
        methods = "step, export_state and restore" if config.resumes == "exported" else "step"
        raise ConfigError(
            f'environment.resumes = "{config.resumes}" needs a class with {methods}, and {config.function or config.setting} is none; '
            "write one (docs/environments.md), or remove environment.resumes"
        )
    return config.resumes


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
        keeps: bool,
    ) -> None:
        """`keeps`: whether it goes on from its last turn after a kill, instead of beginning again."""
        self._prompt, self._seed, self._pool = prompt, seed, pool
        self._encoder, self._config, self._system = encoder, config, system
        self._alone, self._keeps = alone, keeps
        self._lives = 0
        self._given = False
        """Whether a turn got a reward."""

    async def play(self, agent: Agent) -> Mapping[str, float]:
        columns = dict(self._prompt.columns)
        prompt = columns.pop(self._prompt.chat) if self._prompt.chat else self._prompt.text
        listener = self._listen(agent)
        resumed = await listener.resume()

        async def begin() -> Beginning:
            nonlocal listener, resumed
            if self._lives:
                agent.again()
                listener = self._listen(agent)
                resumed = await listener.resume()
            self._lives += 1
            return RolloutAsked(prompt, columns, self._seed, resumed), listener

        ended = listener.ended or await self._pool.play(begin)
        listener.end(ended)
        if ended.failure:
            raise RolloutFailed(ended.failure.reason, ended.failure.detail, ended.failure.traceback)
        if self._alone and not ended.rewards and not self._given:
            raise RolloutFailed("environment_reward", "returned no reward, and there is no reward function")
        rewards: Mapping[str, Any] = ended.rewards or {}
        return rewards

    def _listen(self, agent: Agent) -> _Listener:
        self._given = False
        return _Listener(agent, self._talk, self._was_given, TurnLog(agent) if self._keeps else None)

    def _talk(self, agent: Agent, role: str) -> Conversation:
        return Conversation(
            agent,
            self._encoder,
            system=self._system,
            tools=self._config.tools,
            role=role,
            arguments=arguments_of(self._prompt.columns),
        )

    def _was_given(self) -> None:
        self._given = True


class _Listener:
    """Answers what the function asks for."""

    def __init__(
        self,
        agent: Agent,
        talk: Callable[[Agent, str], Conversation],
        given: Callable[[], None],
        log: TurnLog | None,
    ) -> None:
        """`talk`: makes the conversation of a role; `log`: keeps the turns; None if they are not kept."""
        self._agent, self._make, self._given, self._log = agent, talk, given, log
        self._talks: dict[str, Conversation] = {}
        self._pending: ChatReply | None = None
        """The reply of the turn in which the rollout goes on."""
        self.ended: RolloutDone | None = None
        """How the rollout ended, if that was kept."""

    async def resume(self) -> ResumedTurn | None:
        """Leads the conversation again up to the last turn that was kept, and waits for its reply. Returns None if none was kept."""
        log, last = self._log, None
        for note in log.turns if log else ():
            assert log is not None
            if note.after != log.after:  # its completions are lost, as after a loss of power, or with another tokenizer
                log.cut(note.number)
                break
            for given in note.rewards:
                self._reward(given)
            last, self._pending = note.asked, await self._say(note.asked)
        if log is None or last is None:
            return None
        if log.end:
            self.ended = log.end.ended
            for given in log.end.rewards:
                self._reward(given)
        return ResumedTurn(state=last.state, role=last.role, results=log.results)

    async def chat(self, asked: ChatAsked) -> ChatReply:
        if asked.resumes:
            reply, self._pending = self._pending, None
            assert reply is not None, "it goes on, and no turn was kept"
            return reply
        if self._log:
            self._log.asked(asked)
        return await self._say(asked)

    async def _say(self, asked: ChatAsked) -> ChatReply:
        if asked.role not in self._talks:
            self._talks[asked.role] = self._make(self._agent, asked.role)
        talk = self._talks[asked.role]
        try:
            reply = await talk.say(asked.messages, asked.tools)
        except ConfigError as error:  # the template refuses: raised into the function, whose line the person sees
            return ChatReply(refused=str(error))
        if self._log and not reply.over and talk.last:
            self._log.said(talk.last.tokens)
        return reply

    def rewarded(self, given: Rewarded) -> None:
        if self._log:
            self._log.rewarded(given)
        self._reward(given)

    def answered(self, given: ToolAnswered) -> None:
        if self._log:
            self._log.answered(given)

    def end(self, ended: RolloutDone) -> None:
        if self._log and not self.ended and not ended.failure:
            self._log.ended(ended)

    def _reward(self, given: Rewarded) -> None:
        self._given()
        name = f"{given.role}.{given.name}" if given.role else given.name
        talk = self._talks.get(given.role)
        if talk is None or talk.last is None:
            raise RolloutFailed("environment_reward", f"gave the reward {name} to a turn before there was one")
        self._agent.reward(name, given.value, talk.last)
