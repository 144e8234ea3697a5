"""Plays a rollout with a class of the user that goes from turn to turn. Runs in the processes of environments.

An instance is made for each rollout, of the columns that its `__init__` names. `step(agent, reply)` gets the reply of the turn before (None
at the start) and returns what the model reads next: a text, messages, or a pair of a role and these. A number, or a dict of rewards by
name, ends the rollout. Between two steps nothing but the instance holds the state. So a class with `export_state()` and
`restore(state)` can go on in another process: each turn is asked for together with the state that its step left.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import msgspec

from headrace.episodes.environments.workers.episode_frames import ResumedTurn
from headrace.episodes.environments.workers.talk import AgentReply, AsyncAgent, BlockingAgent
from headrace.episodes.environments.workers.tools import is_async

LARGEST_STATE = 1 << 20
"""Bytes of an exported state. It is kept with every turn."""

InThread = Callable[[Callable[[BlockingAgent], Any]], Awaitable[Any]]
"""Runs work that may block, with an agent whose methods block."""

Tools = Sequence[Callable[..., Any]]


def is_stepped(player: object) -> bool:
    """Whether the player is a class with `step`."""
    return isinstance(player, type) and callable(getattr(player, "step", None))


def exports(player: object) -> bool:
    """Whether the player is a class whose state can be exported."""
    return is_stepped(player) and all(callable(getattr(player, name, None)) for name in ("export_state", "restore"))


class LibraryRollout:
    """The base of classes that play a rollout with an environment of a library."""

    exports_if_set: ClassVar[bool] = False
    """Whether it exports its state only if `environment.resumes` says so: because it is led again by the same replies, which is right only
    if it follows from them and its seed."""
    needs: ClassVar[Mapping[str, str]] = {}
    """Columns that a row must have, and the remedy where one is missing."""

    @classmethod
    def opened(cls, name: str, **settings: Any) -> type[Self]:
        """Returns the class with the settings of a run."""
        return cast("type[Self]", type(name, (cls,), settings))


def exports_if_set(player: object) -> bool:
    return isinstance(player, type) and issubclass(player, LibraryRollout) and player.exports_if_set


def check_columns(player: type, columns: Mapping[str, Any]) -> None:
    """Raises ValueError if a row lacks a column that the class needs."""
    for name, remedy in player.needs.items() if issubclass(player, LibraryRollout) else ():
        if name not in columns:
            raise ValueError(f"it needs prompts with a column {name}: {remedy}")


class StepDriver:
    """One rollout."""

    def __init__(self, made: Any, agent: AsyncAgent, in_thread: InThread, *, keeps: bool) -> None:
        """`made`: the class; `keeps`: whether its state is kept with each turn."""
        self._made, self._agent, self._in_thread, self._keeps = made, agent, in_thread, keeps
        self._asynchronous = is_async(made.step)
        self._offered: dict[str, Tools] = {}
        """The tools that each role was offered."""

    async def play(self, given: Mapping[str, Any], resumed: ResumedTurn | None) -> Any:
        """Returns the rewards. `given`: the columns for the instance; `resumed`: the turn in which the rollout was when another process
        played it; None: it begins."""
        instance = await self._call(lambda: self._made(**given))
        try:
            reply = await self._again(instance, resumed) if resumed else None
            while not is_end(answer := await self._step(instance, reply)):
                role, messages = answer if isinstance(answer, tuple) else ("", answer)
                reply = await self._ask(instance, role, messages)
            return answer
        finally:
            if callable(close := getattr(instance, "close", None)):
                await (close() if is_async(close) else self._call(close))

    async def _again(self, instance: Any, resumed: ResumedTurn) -> AgentReply:
        if self._keeps:
            state = msgspec.msgpack.decode(resumed.state)
            await self._call(lambda: instance.restore(state))
        speaker = self._speaker(resumed.role)
        if tools := _tools_of(instance, resumed.role):
            self._offered[resumed.role] = tools
            await speaker.equip(tools)
        return await speaker.resumed(resumed.results)

    async def _step(self, instance: Any, reply: AgentReply | None) -> Any:
        if self._asynchronous:
            return await instance.step(self._agent, reply)
        return await self._in_thread(lambda agent: instance.step(agent, reply))

    async def _ask(self, instance: Any, role: str, messages: Any) -> AgentReply:
        tools = _tools_of(instance, role)
        new = tools is not None and tools != self._offered.get(role)
        if tools is not None:
            self._offered[role] = tools
        state = await self._call(lambda: _written(instance.export_state())) if self._keeps else b""
        return await self._speaker(role).ask(messages, tools if new else None, state)

    def _speaker(self, role: str) -> AsyncAgent:
        return self._agent.role(role) if role else self._agent

    async def _call(self, work: Callable[[], Any]) -> Any:
        """Calls a method that is not a coroutine: in this thread if the class is asynchronous, because then it does not block."""
        return work() if self._asynchronous else await self._in_thread(lambda _: work())


def is_end(answer: Any) -> bool:
    """Whether a step returned rewards, or nothing, which is no messages either."""
    if isinstance(answer, str):
        return False
    if isinstance(answer, Mapping):
        return "role" not in answer
    return not isinstance(answer, Sequence)


def _tools_of(instance: Any, role: str) -> Tools | None:
    """Returns the tools of a role; None if the class says nothing about them."""
    tools = getattr(instance, "tools", None)
    found: Tools | None = tools.get(role) if isinstance(tools, Mapping) else None if role else tools
    return found


def _written(state: Any) -> bytes:
    """Raises ValueError for a state that cannot be kept."""
    try:
        data = msgspec.msgpack.encode(state)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"export_state returned what cannot be kept ({error}); it returns plain values: dicts, lists, texts, bytes, numbers"
        ) from None
    if len(data) > LARGEST_STATE:
        raise ValueError(f"export_state returned {len(data):,} bytes; it may return {LARGEST_STATE:,} with each turn")
    return data
