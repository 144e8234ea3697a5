"""A chat template is given more than messages: arguments, the tools of a row, and a rule for special tokens in a text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.core.errors import ConfigError

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
    return [_without_nulls(tool) for tool in given]


def _decoded(value: Any) -> Any:
    """Data sets keep what differs from row to row as JSON text, because a column has one type."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError:
        return value


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") or tool if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
