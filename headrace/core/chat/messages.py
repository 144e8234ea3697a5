"""Messages and tools in OpenAI's format (https://platform.openai.com/docs/api-reference/chat), and their form for chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.core.errors import ConfigError, nearest
from headrace.core.rewards import named_twice

# --- A chat template is given more than messages
# Arguments, the tools of a row, and a rule for special tokens in a text.


ARGUMENTS, TOOLS = "chat_template_kwargs", "tools"
"""The columns of a row that its chat template is given, as TRL calls them."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """The use that a run makes of chat templates.

    >>> Rendering(arguments={"enable_thinking": False}).arguments
    {'enable_thinking': False}
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Values of the template's variables, such as enable_thinking. Those of a row or of a request come before them."""
    allows_specials: bool = False
    """Whether the text of a special token becomes that token where it stands in a message."""


@dataclass(frozen=True, kw_only=True)
class TemplateUse:
    """The wishes of a request for the template, beside its messages and tools."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    continues: bool | None = None
    """Whether the answer continues the last message; None: if the assistant says it."""


def with_effort(arguments: Mapping[str, Any], effort: str | None, variables: frozenset[str]) -> dict[str, Any] | None:
    """Returns the arguments with the effort that OpenAI's requests name; None if the template knows none. Those that are given go before
    it."""
    if effort is None:
        return dict(arguments)
    if "reasoning_effort" in variables:
        return {"reasoning_effort": effort, **arguments}
    if effort == "none" and "enable_thinking" in variables:
        return {"enable_thinking": False, **arguments}
    return None


def arguments_of(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the template's arguments of a row. Arrow writes null for a key that other rows have: it is no argument.

    Raises ConfigError for a value that is no mapping."""
    given = _decoded(columns.get(ARGUMENTS))
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"the column {ARGUMENTS} is of type {type(given).__name__}; it has arguments of the chat template, such as "
            f'{{"enable_thinking": false}}. Rename it if it is for the reward alone'
        )
    return {str(name): value for name, value in given.items() if value is not None}


def tools_of(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the tools of a row as they are, a list or JSON text, without the nulls that Arrow writes for missing keys.

    Raises ConfigError for a value that describes no tools."""
    given = _decoded(columns.get(TOOLS))
    if given is None:
        return []
    if not isinstance(given, Sequence) or isinstance(given, str) or not all(map(_is_tool, given)):
        raise ConfigError(
            f"the column {TOOLS} has no list of tools; a tool is "
            '{"type": "function", "function": {"name": ..., "parameters": {...}}}. Rename the column if it is for the reward alone'
        )
    return [without_nulls(tool) for tool in given]


def _decoded(value: Any) -> Any:
    """Data sets keep what differs from row to row as JSON text, because a column has one type."""
    if not isinstance(value, str):
        return value
    if twice := named_twice(value):
        raise ConfigError(
            f"a column for the chat template is JSON that has {twice} twice in an object; leave one of them out"
        )
    try:
        return json.loads(value) if value.strip() else None
    except ValueError:
        return value


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") or tool if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def without_nulls(value: Any) -> Any:
    """Returns the value without the nulls that Arrow writes for keys which other objects have."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


# --- messages ------------------------------------------------------------


LONGEST_NAME = 128
Name = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]


DEEPEST = 100
"""Levels of the arguments of a call. They are kept in the journal, and whoever reads that may have most of Python's stack in use."""


def too_deep(value: Any, levels: int = DEEPEST) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not levels or any(too_deep(element, levels - 1) for element in inner)


class Named(msgspec.Struct, kw_only=True):
    """The function of a tool call."""

    name: Name
    arguments: str
    """A JSON object as text."""


class MadeCall(msgspec.Struct, kw_only=True):
    """A tool call in a message."""

    id: Annotated[str, Meta(min_length=1)]
    function: Named
    type: Literal["function"] = "function"


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    """Text, or parts of the type `text`."""
    name: str | None = None
    tool_calls: list[MadeCall] | None = None
    tool_call_id: str | None = None
    """The call that a message of the role `tool` answers."""
    reasoning_content: str | None = None
    """The thinking before an answer of the assistant, which some templates show to the model."""
    reasoning: str | None = None
    """`reasoning_content`, as some clients call it."""
    function_call: Any = None
    """This field and those below would change what the model reads, and no template shows them: refused unless they are empty."""
    audio: Any = None
    refusal: str | None = None
    prefix: Any = None
    partial: Any = None


class Function(msgspec.Struct, kw_only=True):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of the arguments."""
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    function: Function
    type: Literal["function"] = "function"


_UNSHOWN = {
    "function_call": "give the call as tool_calls",
    "audio": "give its text as content",
    "refusal": "give it as content",
    "prefix": "set continue_final_message of the request, which continues its last message",
    "partial": "set continue_final_message of the request, which continues its last message",
}
"""Fields of messages that no template shows, and what to do instead."""


def unserved_part(kind: str, served: str = "only text is") -> str:
    """Says what becomes of a part of a message that is of this kind, and by what a model is shown images."""
    shown = "; a run shows images of its rows, by task.images, and environment.function shows them in any turn"
    return f"a part of a message is of type {kind}; {served} served{shown if 'image' in kind else ''}"


def text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Raises ConfigError for a part that is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ConfigError(unserved_part(str(part.get("type"))))
    return "".join(part["text"] for part in content)


def role_problem(messages: Sequence[Mapping[str, Any]]) -> str:
    """Says which message has a role that is none; empty if each has one. Templates write any role, and the model has never seen it."""
    for place, message in enumerate(messages, 1):
        if (role := message.get("role")) not in ROLES:
            return f"message {place} has the role {role}{nearest(str(role), ROLES)}; there are {', '.join(ROLES)}"
    return ""


def begins_answer(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is the begin of an answer, which a completion continues."""
    return bool(messages) and messages[-1].get("role") == "assistant" and not messages[-1].get("tool_calls")


def uses_tools(messages: Sequence[Message]) -> bool:
    """Whether a message makes a tool call or answers one."""
    return any(message.tool_calls or message.role == "tool" for message in messages)


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns messages as chat templates expect them: arguments of calls as objects, an answer with the name of its tool, and no field
    that is not set, because templates ask whether a field is there. Raises ConfigError for calls and answers that do not fit together.
    """
    return list(_for_template(messages))


def _for_template(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    names: dict[str, str] = {}
    for place, message in enumerate(messages):
        rendered: dict[str, Any] = {"role": message.role, "content": text_of(message.content)}
        if unshown := next((name for name in _UNSHOWN if getattr(message, name)), ""):
            raise ConfigError(f"messages[{place}].{unshown} is not served; {_UNSHOWN[unshown]}")
        if message.name is not None:
            rendered["name"] = message.name
        if message.role == "assistant" and (thought := message.reasoning_content or message.reasoning):
            rendered["reasoning_content"] = thought
        if message.tool_calls and message.role != "assistant":
            raise ConfigError(
                f"messages[{place}] has the role {message.role} and tool_calls; only an assistant makes calls"
            )
        if message.tool_calls:
            rendered["tool_calls"] = [_made(place, call) for call in message.tool_calls]
            names |= {call.id: call.function.name for call in message.tool_calls}
        if message.role == "tool":
            if message.tool_call_id not in names:
                raise ConfigError(
                    f"messages[{place}] answers the tool call {message.tool_call_id}, which no message before it makes; set tool_call_id "
                    "to the id of a call"
                )
            rendered |= {"tool_call_id": message.tool_call_id, "name": names[message.tool_call_id]}
        yield rendered


def _made(place: int, call: MadeCall) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"messages[{place}] calls {call.function.name} with arguments that are not a JSON object: {error}"
        ) from None
    if too_deep(arguments):
        message = (
            f"messages[{place}] calls {call.function.name} with arguments of more than {DEEPEST} levels; nest them less"
        )
        raise ConfigError(message)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def described(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Returns tools as chat templates expect them: with a description and a schema, which some read without asking."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.function.name,
                "description": tool.function.description or "",
                "parameters": {"type": "object", "properties": {}, **(tool.function.parameters or {})},
            },
        }
        for tool in tools
    ]
