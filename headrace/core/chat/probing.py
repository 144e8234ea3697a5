"""The format of tool calls that a chat template uses. A template is a program: it is shown a tool and a call, and what it writes is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.core.chat.formats import FORMATS, CallFormat, ToolCall
from headrace.core.chat.reading import read_calls
from headrace.core.errors import ConfigError

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], str]
"""(messages, tools) -> what the template writes. It may raise anything."""

_QUESTION, _TOOL, _ARGUMENT = "headrace asks", "headrace_probe", "headrace_value"
_PARAMETERS = {"type": "object", "properties": {"x": {"type": "string", "description": "a text"}}, "required": ["x"]}
_TOOLS = [
    {"type": "function", "function": {"name": _TOOL, "description": "a probe", "parameters": _PARAMETERS}},
]
_ASKING: dict[str, Any] = {"role": "user", "content": _QUESTION}
_CALLING: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    # Mistral's templates want an id of nine letters and digits
    "tool_calls": [{"id": "headrace0", "type": "function", "function": {"name": _TOOL, "arguments": {"x": _ARGUMENT}}}],
}


def tools_problem(render: Render, whose: str) -> str:
    """Says why the template shows no tools; empty if it does. `whose`: it, in the sentence."""
    try:
        offered = render([_ASKING], _TOOLS)
    except Exception as error:  # a template is a program of the model's author
        return f"the chat template of {whose} refuses tools: {error}"
    if _TOOL in offered:
        return ""
    return (
        f"the chat template of {whose} does not show tools to the model; use a model whose template does, or write them into a "
        "system message and read the calls from the text"
    )


def format_of(render: Render, whose: str) -> CallFormat:
    """Raises ConfigError where the template shows no tools, or writes calls as no format here does. `whose`: it, in the sentence."""
    if problem := tools_problem(render, whose):
        raise ConfigError(problem)
    try:
        written = render([_ASKING, _CALLING], _TOOLS)
    except Exception as error:
        raise ConfigError(f"the chat template of {whose} shows tools and refuses a call of one: {error}") from None
    for format in FORMATS:
        if _reads(format, written.rpartition(_QUESTION)[2]):
            return format
    known = ", ".join(format.name for format in FORMATS)
    raise ConfigError(
        f"the chat template of {whose} writes tool calls in a format that is not read here (those of {known} are); leave tools out, and "
        "read the calls from the text"
    )


def _reads(format: CallFormat, answer: str) -> bool:
    """Whether the format reads the call from the template's rendering of an answer, which has an end of turn behind the call."""
    if not format.closing:
        answer = answer[: max(answer.rfind("]"), answer.rfind("}")) + 1]
    if format.bare and format.opening not in answer:
        answer = answer[max(answer.find("{"), 0) :]
    said = read_calls(answer, format)
    return [(call.name, _plain(call)) for call in said.calls] == [(_TOOL, f'{{"x":"{_ARGUMENT}"}}')]


def _plain(call: ToolCall) -> str:
    return "".join(call.arguments.split())
