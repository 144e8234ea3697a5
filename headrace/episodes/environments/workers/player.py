"""Plays rollouts with the user's function: async ones in one event loop, plain ones in a thread each. Runs in the processes of environments."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import inspect
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from headrace.core.batches import Failure
from headrace.core.errors import ConfigError, encodable
from headrace.core.protocols import Resumes
from headrace.core.rewards import Unusable, number_of
from headrace.core.types import Struct
from headrace.episodes.environments.workers.episode_frames import (
    Cancel,
    ChatAsked,
    ChatReply,
    FromController,
    FromProcess,
    Play,
    Rewards,
    RolloutDone,
)
from headrace.episodes.environments.workers.step_driver import StepDriver, check_columns, is_stepped
from headrace.episodes.environments.workers.talk import AsyncAgent, BlockingAgent, RolloutEnded
from headrace.episodes.environments.workers.tools import Toolbox, in_thread, is_async
from headrace.processes.health.user_prints import LOG, bounded_prints
from headrace.settings.user_code import load_function, one_line, traceback_of

_owner: ContextVar[int] = ContextVar("headrace_rollout", default=-1)
"""The rollout that a task works for."""


@dataclass(frozen=True)
class ToolLimits:
    seconds: float
    characters: int


class Player:
    """The rollouts of one process. Its methods are called in the loop's thread."""

    def __init__(
        self,
        function: Callable[..., Any],
        send: Callable[[FromProcess], None],
        limits: ToolLimits,
        resumes: Resumes = "replayed",
    ) -> None:
        """`function`: what plays a rollout; a class is stepped (`step_driver.py`). `resumes`: how its rollouts go on after a kill."""
        self._function, self._send, self._limits, self._resumes = function, send, limits, resumes
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._waiting: dict[int, asyncio.Future[ChatReply]] = {}
        self._owners: weakref.WeakKeyDictionary[asyncio.Task[Any], int] = weakref.WeakKeyDictionary()
        factory: Any = self._owned
        self._loop.set_task_factory(factory)

    def obey(self, order: FromController) -> None:
        match order:
            case Play():
                self._tasks[order.id] = self._loop.create_task(self._play(order))
            case ChatReply():
                waiting = self._waiting.get(order.id)
                if waiting and not waiting.done():
                    waiting.set_result(order)
            case Cancel():
                if task := self._tasks.get(order.id):
                    task.cancel()

    def running(self) -> int:
        """The rollout whose task runs now; -1 if none does. May be called from another thread."""
        task = asyncio.current_task(self._loop)
        return self._owners.get(task, -1) if task else -1

    def _owned(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **rest: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **rest)
        self._owners[task] = _owner.get()
        return task

    async def _play(self, order: Play) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._owners[task] = order.id
        _owner.set(order.id)
        box = Toolbox(self._limits.seconds, self._limits.characters)
        agent = AsyncAgent(
            order.id,
            order.seed,
            ask=self._ask,
            tell=self._send,
            box=box,
            keeps_calls=self._resumes == "stateless",
        )
        rewards: Rewards | None = None
        failure: Failure | None = None
        name = self._function.__name__
        try:
            with bounded_prints(f"the environment {name}", LOG):
                rewards = read_rewards(name, await self._called(agent, order))
        except MemoryError as error:
            failure = Failure("environment_memory", one_line(error), traceback_of(error))
        except _NoReward as error:
            failure = Failure("environment_reward", str(error))
        except BaseException as error:
            failure = Failure("environment_raised", one_line(error), traceback_of(error))
            if isinstance(error, asyncio.CancelledError) and task.cancelling():
                failure = Failure("environment_cancelled")  # nobody reads it: who cancels knows why
        del self._tasks[order.id]
        self._send(RolloutDone(id=order.id, rewards=rewards, failure=failure, leaves=box.left))

    async def _called(self, agent: AsyncAgent, order: Play) -> Any:
        offered = {**order.columns, "prompt": order.prompt}
        if isinstance(self._function, type):
            check_columns(self._function, order.columns)
            given = arguments(self._function, {"seed": order.seed, **offered}, agent=False)
            keeps = self._resumes == "exported"
            driver = StepDriver(self._function, agent, partial(self._in_thread, agent), keeps=keeps)
            return await driver.play(given, order.resumed)
        given = arguments(self._function, offered)
        if is_async(self._function):
            return await self._function(agent, **given)
        return await self._in_thread(agent, lambda blocking: self._function(blocking, **given))

    async def _in_thread(self, agent: AsyncAgent, work: Callable[[BlockingAgent], Any]) -> Any:
        waits = _Waits(self._loop)
        answer = in_thread(lambda: work(BlockingAgent(agent, waits.wait)), f"rollout {_owner.get()}")
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            waits.end()
            await asyncio.wait({answer})  # until its `finally` blocks are done; who cancels has a deadline
            answer.exception()
            raise

    async def _ask(self, chat: ChatAsked) -> ChatReply:
        if chat.id in self._waiting:
            raise RuntimeError("a rollout asks for one turn at a time: await the one before")
        answer = self._waiting[chat.id] = self._loop.create_future()
        try:
            self._send(chat)
            return await answer
        finally:
            del self._waiting[chat.id]


class _Waits:
    """The waits of a plain function's thread for the event loop, which can be ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._current: concurrent.futures.Future[Any] | None = None
        self._ended = False

    def wait(self, work: Awaitable[Any]) -> Any:
        assert inspect.iscoroutine(work)
        if self._ended:
            work.close()
            raise RolloutEnded("the rollout is over")
        self._current = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return self._current.result()
        except concurrent.futures.CancelledError:
            raise RolloutEnded("the rollout is over") from None

    def end(self) -> None:
        self._ended = True
        if self._current:
            self._current.cancel()


_WANTED = "It returns a number, or a dict of rewards by name"


class _NoReward(Exception):
    """The function returned something else than rewards."""


def read_rewards(name: str, result: object) -> Rewards:
    """Returns rewards by name: a number alone has the name of the function."""
    if isinstance(result, Mapping):
        return {encodable(str(key)): _number(f"the reward {key}", value) for key, value in result.items()}
    if result is None:
        raise _NoReward(f"{name} returned None: is its return statement missing? {_WANTED}")
    return {name: _number("its reward", result)}


def _number(what: str, value: object) -> float:
    if isinstance(number := number_of(value), Unusable):
        raise _NoReward(f"{what} {number.said}. {_WANTED}")
    return number


def arguments(function: Callable[..., Any], offered: Mapping[str, Any], *, agent: bool = True) -> dict[str, Any]:
    """Returns the columns that the function's signature names, or all if it takes `**columns`. `agent`: whether its first parameter is
    the agent. Raises TypeError for one that is missing."""
    parameters = [*inspect.signature(function).parameters.values()]
    first = parameters.pop(0).name if agent else ""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        given = {name: value for name, value in offered.items() if name != first}
    else:
        given = {parameter.name: offered[parameter.name] for parameter in parameters if parameter.name in offered}
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.name not in given
    ]
    if missing := [
        name for name in missing if name in {parameter.name for parameter in parameters if _named(parameter)}
    ]:
        raise TypeError(
            f"it needs {', '.join(missing)}, which is not a column of the task; there are: {', '.join(offered)}"
        )
    return given


def _named(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def signature_problem(function: Any) -> str:
    """Says why the function cannot be called as `fn(agent, prompt=, **columns)`, or the class cannot be stepped; empty if it can."""
    if isinstance(function, type):
        return (
            ""
            if is_stepped(function)
            else "is a class without step(agent, reply), which says what the model reads next"
        )
    if not inspect.isroutine(function):
        return f"is a {type(function).__name__}, not a function"
    first, *others = [*inspect.signature(function).parameters.values(), None]
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        return "takes no agent; it is called as fn(agent, prompt=..., **columns)"
    for parameter in others:
        if (
            parameter is not None
            and parameter.kind is parameter.POSITIONAL_ONLY
            and parameter.default is parameter.empty
        ):
            return f"takes {parameter.name} by position only; it is called as fn(agent, prompt=..., **columns)"
    return ""


class LibrarySettings(Struct, frozen=True):
    """The settings that the environments of a library are opened with."""

    name: str
    """`environment.name`; empty if it is not set."""
    options: dict[str, Any]
    """`environment.options`."""
    max_turns: int
    """The most turns of a rollout."""


def load_player(spec: str, library: Mapping[str, Any] | None) -> Callable[..., Any]:
    """Returns a function that is called as `play(agent, prompt=..., **columns)` for each rollout. `library`: the fields of
    `LibrarySettings`; None for a function of the user. Raises ConfigError if it cannot be loaded."""
    if library is None:
        function = load_function(spec, "environment.function")
        if problem := signature_problem(function):
            raise ConfigError(f"environment.function: {spec.rpartition(':')[2]} {problem}")
        return function
    module, _, name = spec.partition(":")
    opened: Callable[..., Any] = getattr(importlib.import_module(module), name)(
        msgspec.convert(library, LibrarySettings)
    )
    return opened
