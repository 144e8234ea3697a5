"""The agent as the user's function sees it: `chat`, `call`, `reward`. Runs in the processes of environments."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.chat.message_images import with_places
from headrace.core.errors import ConfigError, encodable
from headrace.episodes.environments.workers.episode_frames import PROBLEM, ChatAsked, ChatReply, Rewarded, ToolAnswered
from headrace.episodes.environments.workers.tools import Toolbox

Message = dict[str, Any]


class RolloutEnded(Exception):
    """Raised into the user's function when its rollout is over: it was cancelled, or the engine refused a turn."""


@dataclass(frozen=True)
class CalledTool:
    """A tool call that the model wrote."""

    name: str
    """Empty for a malformed call."""
    arguments: Mapping[str, Any]
    id: str
    problem: str = ""
    """The reason why it is malformed; empty if it is not."""


@dataclass(frozen=True)
class AgentReply:
    """One turn of the model."""

    text: str
    """Its text outside the tool calls."""
    tool_calls: tuple[CalledTool, ...]
    """Its tool calls, the malformed ones too: `AsyncAgent.call` answers them with an error message."""
    stop: str
    """`stop`, `length` (cut off at rollout.max_tokens), or `limit`: the rollout is at its limit, nothing was sampled, and no more turns
    can be had."""
    tokens: int
    role: str = ""
    """The agent that replies; empty for the one that the function was called with."""

    def __str__(self) -> str:
        return self.text


class AsyncAgent:
    """The agent of an async function."""

    def __init__(
        self,
        id: int,
        seed: int,
        *,
        ask: Callable[[ChatAsked], Awaitable[ChatReply]],
        tell: Callable[[Rewarded | ToolAnswered], None],
        box: Toolbox,
        name: str = "",
        keeps_calls: bool = False,
    ) -> None:
        """`keeps_calls`: whether the result of each tool call outlasts this process."""
        self.seed = seed
        """A number for everything random, the same when the rollout is played again."""
        self.name = name
        """Its role; empty for the agent that the function is called with."""
        self._id, self._ask, self._tell, self._box = id, ask, tell, box
        self._roles: dict[str, AsyncAgent] = {}
        self._keeps_calls = keeps_calls
        self._begins_in = ""
        """The name of the state in which its next turn begins."""
        self._results: Mapping[str, Message] = {}
        """The results of tool calls that an earlier process has made, by the ids of the calls."""

    def role(self, name: str) -> AsyncAgent:
        """Returns another agent of this rollout, which is the same policy with a conversation, tools and rewards of its own: another player
        of a game, a critic. The same name gives the same agent. One of them is asked at a time.

        Raises ValueError for a name that is empty or no text, or for the role of a role."""
        if self.name or not name or not isinstance(name, str):
            raise ValueError(
                f"role was given {name!r}; name a role, and ask the agent that the function was called with for it"
            )
        if name not in self._roles:
            self._roles[name] = AsyncAgent(
                self._id,
                self.seed,
                ask=self._ask,
                tell=self._tell,
                box=self._box.another(),
                name=name,
                keeps_calls=self._keeps_calls,
            )
        return self._roles[name]

    async def chat(
        self,
        messages: str | Mapping[str, Any] | Sequence[Mapping[str, Any]],
        tools: Sequence[Callable[..., Any]] | None = None,
    ) -> AgentReply:
        """Adds messages to the conversation (a text is one of the user), and samples the model's answer. `tools`: functions that the
        model may call from now on; None: those of the turn before.

        Raises ValueError for messages that are none, and for what the chat template refuses."""
        return await self.ask(messages, tools)

    async def ask(
        self,
        messages: str | Mapping[str, Any] | Sequence[Mapping[str, Any]],
        tools: Sequence[Callable[..., Any]] | None,
        state: bytes = b"",
    ) -> AgentReply:
        """Does what `chat` does. `state`: that of the environment, which is kept with the turn."""
        schemas = None if tools is None else await self._box.offer(tools)
        begins_in, self._begins_in = self._begins_in, ""
        return await self._reply(
            ChatAsked(self._id, messages_of(messages), schemas, self.name, state, begins_in=begins_in)
        )

    async def equip(self, tools: Sequence[Callable[..., Any]]) -> None:
        """Takes the tools that the model was offered in an earlier process."""
        await self._box.offer(tools)

    async def resumed(self, results: Sequence[Message]) -> AgentReply:
        """Returns the reply of the turn in which the rollout goes on. `results`: those of its tool calls that were finished."""
        self._results = {result["tool_call_id"]: result for result in results}
        return await self._reply(ChatAsked(self._id, [], None, self.name, resumes=True))

    async def _reply(self, asked: ChatAsked) -> AgentReply:
        reply = await self._ask(asked)
        if reply.refused:
            raise ValueError(reply.refused)
        calls = tuple(
            CalledTool(call.name, {} if call.problem else json.loads(call.arguments), call.id, call.problem)
            for call in reply.calls
        )
        return AgentReply(reply.text, calls, "limit" if reply.over else reply.stop, reply.tokens, self.name)

    async def call(self, reply: AgentReply) -> list[Message]:
        """Runs the tools that the reply calls, all at once, and returns their results as messages for `chat`. A call that is malformed,
        names no tool or does not fit it, and a tool that raises or takes too long, gives a message that says so."""
        return list(await asyncio.gather(*(self._answer(tool_call) for tool_call in reply.tool_calls)))

    def reward(self, name: str, value: float) -> None:
        """Gives this agent's last turn a reward of its own. That of a role is recorded as `role.name`."""
        self._tell(Rewarded(self._id, encodable(str(name)), float(value), self.name))

    def state(self, name: str) -> None:
        """Names the state of the environment in which this agent's next turn begins: turns of a group with equal names are compared
        (`algo.credit = "state"`). Where none is named, turns before which the agent was told the same are."""
        self._begins_in = encodable(str(name))

    async def _answer(self, call: CalledTool) -> Message:
        if call.id in self._results:
            return self._results[call.id]
        message = await self._made(call)
        if self._keeps_calls:
            self._tell(ToolAnswered(self._id, message, self.name))
        return message

    async def _made(self, call: CalledTool) -> Message:
        if call.problem:
            said: Message = {"content": f"error: the tool call cannot be read: {call.problem}", PROBLEM: "malformed"}
        else:
            said = await self._box.use(call.name, call.arguments)
        return {"role": "tool", "tool_call_id": call.id, "name": call.name or "unknown", **said}


class BlockingAgent:
    """The agent of a plain function, which runs in a thread of its own: the same methods, which return when they are done."""

    def __init__(self, agent: AsyncAgent, wait: Callable[[Awaitable[Any]], Any]) -> None:
        self.seed, self.name = agent.seed, agent.name
        self._agent, self._wait = agent, wait

    def role(self, name: str) -> BlockingAgent:
        return BlockingAgent(self._agent.role(name), self._wait)

    def chat(
        self,
        messages: str | Mapping[str, Any] | Sequence[Mapping[str, Any]],
        tools: Sequence[Callable[..., Any]] | None = None,
    ) -> AgentReply:
        reply: AgentReply = self._wait(self._agent.chat(messages, tools))
        return reply

    def call(self, reply: AgentReply) -> list[Message]:
        messages: list[Message] = self._wait(self._agent.call(reply))
        return messages

    def reward(self, name: str, value: float) -> None:
        self._agent.reward(name, value)

    def state(self, name: str) -> None:
        self._agent.state(name)


def messages_of(given: object) -> list[Message]:
    """Raises ValueError for what are no messages."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages = [given] if isinstance(given, Mapping) else given
    if not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"chat was given {given!r:.80}; give it a text, or messages {{role, content}}")
    return list(map(_message_of, messages))


def _message_of(given: object) -> Message:
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise ValueError(f"chat was given {given!r:.80} for a message; a message has the texts role and content")
    content = given.get("content")
    if isinstance(content, str):
        return dict(given)
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        raise ValueError(f"chat was given {given!r:.80} for a message; a message has the texts role and content")
    try:
        return with_places(given)
    except ConfigError as error:
        raise ValueError(f"chat was given {given!r:.80} for a message: {error}") from None
