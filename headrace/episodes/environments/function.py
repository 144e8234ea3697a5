"""The environment that code in processes plays: a function of the user, `async def play(agent, prompt, answer, **columns)`, or a class that
goes from turn to turn, as those of other libraries are (`libraries/`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from msgspec.structs import replace

from headrace.core.chat.messages import arguments_of
from headrace.core.errors import ConfigError, RolloutFailed
from headrace.core.protocols import KEPT, Agent, Environment, EnvironmentKind, Resumes
from headrace.core.types import Prompt, Struct
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.conversation import Conversation, TurnEncoder
from headrace.episodes.environments.kinds import LIBRARIES
from headrace.episodes.environments.workers.environment_pool import (
    Beginning,
    EnvironmentPool,
    FunctionSettings,
    RolloutAsked,
    check_function,
)
from headrace.episodes.environments.workers.episode_frames import (
    ChatAsked,
    ChatReply,
    FunctionLoaded,
    ResumedTurn,
    Rewarded,
    RolloutDone,
    ToolAnswered,
)
from headrace.episodes.environments.workers.player import LibrarySettings
from headrace.episodes.sandbox.sandbox_limits import DEFAULT, SandboxSettings
from headrace.episodes.tasks.conversations import as_messages, with_files
from headrace.processes.asked_process import HERE, Sites

# --- The turns of a rollout as its environment keeps them
# What it asked for, with its state before each, so that another process goes on.
#
# A note is written when a turn is asked for, and holds all that has happened since the turn before: one step of the environment is there as a
# whole or not at all. When a rollout goes on, the conversation is led again from the notes. Its turns are recorded, so that only the last
# one may still have to be sampled; the user's code is called again with the state and the reply of that one.


class TurnNote(Struct, frozen=True, tag="turn"):
    number: int
    """Its place among the turns, from 0. It replaces an earlier note of that number, and all behind it."""
    asked: ChatAsked
    rewards: tuple[Rewarded, ...]
    """The rewards that were given since the turn before was sampled."""
    after: str
    """A digest of all completions before it. It belongs to no others."""


class CallNote(Struct, frozen=True, tag="call"):
    """The result of a tool call of the last turn, where each is kept."""

    answered: ToolAnswered
    after: str
    """The digest, like that of a turn."""


class EndNote(Struct, frozen=True, tag="end"):
    """The end of the rollout, which may be killed again before its group is scored."""

    ended: RolloutDone
    rewards: tuple[Rewarded, ...]
    """Rewards since the last turn was sampled."""
    after: str


AnyNote = TurnNote | CallNote | EndNote
_decoder = msgspec.msgpack.Decoder(AnyNote)


class TurnLog:
    """The notes of one rollout."""

    def __init__(self, agent: Agent) -> None:
        """Reads what was kept."""
        self._agent = agent
        self._turns: list[TurnNote] = []
        self._calls: list[CallNote] = []
        self._end: EndNote | None = None
        for data in agent.kept:
            self._add(_decoder.decode(data))
        self._rewards: list[Rewarded] = []
        self._said = xxhash.xxh3_64()

    @property
    def turns(self) -> tuple[TurnNote, ...]:
        return tuple(self._turns)

    @property
    def results(self) -> tuple[dict[str, Any], ...]:
        """The results of the tool calls of the last turn."""
        return tuple(call.answered.message for call in self._calls if call.after == self.after)

    @property
    def after(self) -> str:
        """The digest of the completions so far."""
        return self._said.hexdigest()

    def said(self, tokens: Sequence[int]) -> None:
        """Counts a completion."""
        self._said.update(array("q", tokens).tobytes() + b"|")

    def rewarded(self, given: Rewarded) -> None:
        self._rewards.append(given)

    def asked(self, asked: ChatAsked) -> None:
        """Keeps a turn, before it is sampled."""
        self._keep(TurnNote(len(self._turns), asked, tuple(self._rewards), self.after))
        self._rewards.clear()

    def answered(self, given: ToolAnswered) -> None:
        self._keep(CallNote(given, self.after))

    def cut(self, number: int) -> None:
        """Forgets the turns from `number` on: they follow completions that are lost."""
        del self._turns[number:]
        self._calls.clear()
        self._end = None

    def ended(self, ended: RolloutDone) -> None:
        self._keep(EndNote(ended, tuple(self._rewards), self.after))

    @property
    def end(self) -> EndNote | None:
        """The end, if the rollout has ended behind these completions."""
        return self._end if self._end and self._end.after == self.after else None

    def _keep(self, note: AnyNote) -> None:
        self._agent.keep(msgspec.msgpack.encode(note))
        self._add(note)

    def _add(self, note: AnyNote) -> None:
        match note:
            case TurnNote():
                self.cut(note.number)
                self._turns.append(note)
            case CallNote():
                self._calls.append(note)
            case EndNote():
                self._end = note


# --- function ------------------------------------------------------------


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
    pool = EnvironmentPool(replace(settings, resumes=resumes), config.workers, log, sites)
    keeps = resumes in KEPT

    def make(prompt: Prompt, seed: int) -> Environment:
        return FunctionEnvironment(
            prompt, seed, pool=pool, encoder=encoder, config=config, system=system, alone=alone, keeps=keeps
        )

    return EnvironmentKind(make, config.limits, resumes, close=pool.close)


def function_settings(config: EnvironmentConfig, sandbox: SandboxSettings) -> FunctionSettings:
    """The settings of processes that play `environment.function` or a library."""
    return FunctionSettings(
        spec=config.function or LIBRARIES[config.kind].opens,
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
        pool: EnvironmentPool,
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
        if self._prompt.images:
            prompt = with_files(as_messages(prompt), self._prompt.images)
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
            reply = await talk.say(asked.messages, asked.tools, state=asked.begins_in)
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
