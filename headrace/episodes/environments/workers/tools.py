"""Tools: Python functions that the model may call. Runs in the processes of environments."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import importlib
import importlib.util
import inspect
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.core.chat.message_images import IMAGES, PLACES, is_image_part, with_places
from headrace.core.errors import ConfigError, encodable
from headrace.episodes.environments.workers.episode_frames import PROBLEM
from headrace.settings.user_code import said_by

Schema = dict[str, Any]
Answer = dict[str, Any]
"""The content of a message for the model, the images in it (`core.chat.message_images`), and the problem (`episode_frames.PROBLEM`), if there is one."""


class Toolbox:
    """The tools of one rollout."""

    def __init__(self, seconds: float, characters: int) -> None:
        """`seconds`: of one call, after which the model reads that it took too long. `characters`: of a result; more are cut off."""
        self._seconds, self._characters = seconds, characters
        self._tools: dict[str, Callable[..., Any]] = {}
        self._left = 0
        self._others: list[Toolbox] = []

    def another(self) -> Toolbox:
        """Returns a box for another agent of the rollout, without tools yet."""
        self._others.append(Toolbox(self._seconds, self._characters))
        return self._others[-1]

    @property
    def left(self) -> int:
        """Threads that were given up, in all boxes of the rollout."""
        return self._left + sum(other.left for other in self._others)

    async def offer(self, tools: Sequence[Callable[..., Any]]) -> list[Schema]:
        """Replaces the tools. Returns their schemas. Raises ValueError for a function that has no schema."""
        self._tools = {name_of(tool): tool for tool in tools}
        if len(self._tools) < len(tools):
            raise ValueError(f"two tools have one name; there are: {', '.join(map(name_of, tools))}")
        schemas: list[Schema] = await in_thread(lambda: [schema_of(tool) for tool in tools], "schemas")
        return schemas

    async def use(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        tool = self._tools.get(name)
        if tool is None:
            return _failed(
                f"error: there is no tool {name}; there are: {', '.join(self._tools) or 'none'}", "unknown_tool"
            )
        try:
            inspect.signature(tool).bind(**arguments)
        except TypeError as error:
            return _failed(f"error: {name} cannot be called so: {error}", "wrong_arguments")
        try:
            async with asyncio.timeout(self._seconds or None) as clock:
                result = await (tool(**arguments) if is_async(tool) else self._in_thread(tool, arguments))
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if isinstance(error, TimeoutError) and clock.expired():
                return _failed(f"error: {name} took more than {self._seconds:g} s", "timeout")
            if isinstance(error, MemoryError):  # it may be another rollout that has taken the memory
                raise
            return self._raised(name, error)
        return self._shown(name, result)

    def _shown(self, name: str, result: Any) -> Answer:
        """A result that is an image, or parts with an image among them, shows these; any other is text."""
        parts = [result] if isinstance(result, Mapping) else result
        if not isinstance(parts, (list, tuple)) or not any(map(is_image_part, parts)):
            return {"content": self._clipped(result if isinstance(result, str) else repr(result))}
        texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        try:
            said = with_places({"role": "tool", "content": texts})
        except (ConfigError, AttributeError) as error:  # a part that is no mapping has no type
            return self._raised(name, error)
        whole = said["content"]
        return {
            "content": self._clipped(whole),
            PLACES: [min(place, self._characters, len(whole)) for place in said[PLACES]],
            IMAGES: said[IMAGES],
        }

    def _raised(self, name: str, error: BaseException) -> Answer:
        return _failed(self._clipped(f"error: {name} failed: {type(error).__name__}: {said_by(error)}"), "raised")

    def _clipped(self, text: str) -> str:
        text = encodable(text)
        more = len(text) - self._characters
        return text if more <= 0 else f"{text[: self._characters]} ... ({more:,} characters more)"

    async def _in_thread(self, tool: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        answer = in_thread(lambda: tool(**arguments), f"tool {name_of(tool)}")
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if not answer.done():
                self._left += 1
                answer.add_done_callback(self._came_back)
            raise

    def _came_back(self, answer: asyncio.Future[Any]) -> None:
        self._left -= 1
        answer.exception()


def _failed(text: str, problem: str) -> Answer:
    return {"content": text, PROBLEM: problem}


def in_thread(work: Callable[[], Any], name: str) -> asyncio.Future[Any]:
    """Runs `work` in a thread of its own. Not in a pool: those that hang would fill it."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    context = contextvars.copy_context()

    def run() -> None:
        try:
            result, error = context.run(work), None
        except BaseException as raised:
            result, error = None, raised
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(settle, result, error)

    def settle(result: Any, error: BaseException | None) -> None:
        if answer.done():
            return
        if isinstance(error, StopIteration):  # a future does not take it
            error = RuntimeError("StopIteration")
        answer.set_result(result) if error is None else answer.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


def name_of(tool: Callable[..., Any]) -> str:
    return getattr(tool, "__name__", type(tool).__name__)


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


@functools.lru_cache(maxsize=256)
def schema_of(tool: Callable[..., Any]) -> Schema:
    """Returns the schema that type hints and docstring give, in OpenAI's form. Raises ValueError if they do not.

    The first call imports modules: it is not made in the event loop."""
    if not callable(tool):
        raise ValueError(f"a tool is a function, not {tool!r:.60}")
    read = _reader()
    try:
        schema = read(tool)
    except Exception as error:  # its own kinds of exceptions, and those of the inspection
        raise ValueError(
            f"the tool {name_of(tool)} has no schema: {error} Give it type hints, and a docstring that says what it does, with a line "
            "for each argument beneath `Args:`"
        ) from None
    return schema


_ALONE = "headrace_json_schemas"
"""The name under which modules of transformers are loaded without the package."""


@functools.cache
def _reader() -> Callable[[Callable[..., Any]], Schema]:
    """Returns `get_json_schema` of transformers.

    Its package imports much else, and the function imports torch to know the type of a tensor: 2.3 s of CPU time and 300 MB in each
    process of an environment. So its module is loaded under a name of its own, without the package. Where that fails, the package is."""
    try:
        module = _loaded_alone()
    except Exception:  # a version of transformers whose module needs more of the package
        from transformers.utils import get_json_schema

        return get_json_schema
    # no type hint is a tensor where nobody has imported torch
    module.is_torch_available = lambda: "torch" in sys.modules  # type: ignore[attr-defined]
    return module.get_json_schema


def _loaded_alone() -> types.ModuleType:
    found = importlib.util.find_spec("transformers")
    assert found is not None and found.submodule_search_locations
    for name, below in ((_ALONE, ""), (f"{_ALONE}.utils", "utils")):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(folder) / below) for folder in found.submodule_search_locations]
        sys.modules[name] = package
    return importlib.import_module(f"{_ALONE}.utils.chat_template_utils")
