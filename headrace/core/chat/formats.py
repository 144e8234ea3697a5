"""How the families of models write tool calls. A format finds the calls of one *section*, the text between its markers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from headrace.core.chat.gemma_calls import read_call
from headrace.core.chat.messages import DEEPEST, LONGEST_NAME, too_deep
from headrace.core.chat.qwen_calls import ARGUMENT, ARGUMENT_ENDS, read_functions, typed

T = TypeVar("T")


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str
    """A JSON object: as the model wrote it, if it writes JSON."""


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    name: str
    opening: str
    """The marker before a section."""
    closing: str = ""
    """The marker after it. Empty: the section ends with the text, or before the next opening."""
    bare: bool = False
    """Whether a text that begins with a brace is a section without a marker."""
    quotes: tuple[str, str] = ('"', '"')
    """The marks before and after a text, within which no marker counts. Between double quotes a backslash escapes."""
    markers: tuple[str, ...]
    """Texts of tokens that must stay in the decoded text, even where the tokenizer calls them special."""
    read: Callable[[str], tuple[ToolCall, ...]]
    """Returns the calls of a section without its markers. Raises ValueError for a malformed one."""
    plain: bool = False
    """Whether the arguments are texts, whatever the types in the tool's schema."""

    def calls(self, section: str, tools: Sequence[Mapping[str, Any]]) -> tuple[ToolCall, ...]:
        """Returns the calls of a section, with arguments of the types that their tools want. `tools`: in OpenAI's form. Raises ValueError for a
        malformed one."""
        try:
            found = self.read(section)
            return tuple(_checked(_as_wanted(call, tools) if self.plain else call) for call in found)
        except RecursionError:
            raise ValueError("the call is nested too deeply") from None


def _as_wanted(call: ToolCall, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    schemas = (one["function"].get("parameters") for one in tools if one["function"]["name"] == call.name)
    schema = next(schemas, None) or {}
    return ToolCall(call.name, json.dumps(typed(json.loads(call.arguments), schema), ensure_ascii=False))


def _checked(call: ToolCall) -> ToolCall:
    """Returns the call. An agent sends it back with its next request, where it must be what requests may hold. Raises ValueError."""
    if not 1 <= len(call.name) <= LONGEST_NAME:
        raise ValueError(f"the name of a tool has 1 to {LONGEST_NAME} characters, and this one {len(call.name)}")
    return ToolCall(call.name, _object(call.arguments))


class _Written(msgspec.Struct):
    """A call as JSON. Llama's models write `parameters`, the others `arguments`."""

    name: str
    arguments: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def _call(written: _Written) -> ToolCall:
    given = [one for one in (written.arguments, written.parameters) if one is not msgspec.UNSET]
    if len(given) != 1:
        raise ValueError("a call has `name` and `arguments`")
    return ToolCall(written.name, bytes(given[0]).decode())


def _object(text: str) -> str:
    """Returns the text of a JSON object as it is. Raises ValueError for another one."""
    if too_deep(_decoded(text, dict[str, object])):
        raise ValueError(f"the call is nested too deeply: its arguments have more than {DEEPEST} levels")
    return text.strip()


def _decoded(text: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise ValueError("the call is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None


def _read_one(section: str) -> tuple[ToolCall, ...]:
    return (_call(_decoded(section, _Written)),)


def _read_several(section: str) -> tuple[ToolCall, ...]:
    """Objects one after another, with semicolons or white space between them."""
    calls = tuple(_call(_decoded(part, _Written)) for part in _objects(section))
    if not calls:
        raise ValueError("the call is empty")
    return calls


def _objects(section: str) -> Iterator[str]:
    decoder, at, rest = json.JSONDecoder(), 0, section.strip()
    while at < len(rest):
        try:
            _, end = decoder.raw_decode(rest, at)
        except RecursionError:
            raise ValueError("the call is nested too deeply") from None
        yield rest[at:end]
        at = end + len(rest[end:]) - len(rest[end:].lstrip("; \t\r\n"))


_NAMED = re.compile(r"([^\s\[\]{}]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*\})", re.DOTALL)


def _read_list_or_named(section: str) -> tuple[ToolCall, ...]:
    """Mistral's tokenizers up to v7 write a list of calls; those from v11 on write `name[ARGS]{...}`, some with `[CALL_ID]id`."""
    text = section.strip()
    if text.startswith("["):
        calls = tuple(_call(one) for one in _decoded(text, list[_Written]))
        if not calls:
            raise ValueError("the list of calls is empty")
        return calls
    if not (found := _NAMED.fullmatch(text)):
        raise ValueError("a call is a JSON list, or a name and a JSON object")
    return (ToolCall(found[1], found[2]),)


HERMES = CallFormat(
    name="hermes",
    opening="<tool_call>",
    closing="</tool_call>",
    markers=("<tool_call>", "</tool_call>"),
    read=_read_one,
)
"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one call in each: Hermes, Qwen 2.5, Qwen 3
(https://github.com/NousResearch/Hermes-Function-Calling)."""


def _read_functions(section: str) -> tuple[ToolCall, ...]:
    found = read_functions(section)
    return tuple(ToolCall(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in found)


QWEN_CODER = CallFormat(
    name="qwen3_coder",
    opening="<tool_call>",
    closing="</tool_call>",
    quotes=(ARGUMENT, ARGUMENT_ENDS),
    markers=("<tool_call>", "</tool_call>"),
    read=_read_functions,
    plain=True,
)
"""`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen 3.5 (`qwen_calls.py`)."""

MISTRAL = CallFormat(
    name="mistral",
    opening="[TOOL_CALLS]",
    markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    read=_read_list_or_named,
)
"""`[TOOL_CALLS]` and a list of `{"name": ..., "arguments": {...}}`, or a name and its arguments
(https://docs.mistral.ai, the tokenizers v3 to v13)."""

LLAMA = CallFormat(
    name="llama3",
    opening="<|python_tag|>",
    bare=True,
    markers=("<|python_tag|>",),
    read=_read_several,
)
"""`{"name": ..., "parameters": {...}}` as the whole completion, after `<|python_tag|>` or nothing: Llama 3.1 to 3.3
(https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1, "JSON based tool calling")."""


def _gemma(name: str, opening: str, closing: str, quote: str) -> CallFormat:
    def read(section: str) -> tuple[ToolCall, ...]:
        tool, arguments = read_call(section, quote)
        return (ToolCall(tool, json.dumps(arguments, ensure_ascii=False)),)

    marks = (opening, closing, quote)
    return CallFormat(name=name, opening=opening, closing=closing, quotes=(quote, quote), markers=marks, read=read)


FUNCTION_GEMMA = _gemma("function_gemma", "<start_function_call>", "<end_function_call>", "<escape>")
"""`<start_function_call>call:NAME{key:<escape>text<escape>}<end_function_call>`, one call in each (`gemma_calls.py`)."""
GEMMA = _gemma("gemma", "<|tool_call>", "<tool_call|>", '<|"|>')
"""`<|tool_call>call:NAME{key:<|"|>text<|"|>}<tool_call|>`, one call in each: Gemma 4. (Gemma 3 was trained with no format of its own.)"""

FORMATS = (HERMES, QWEN_CODER, MISTRAL, LLAMA, FUNCTION_GEMMA, GEMMA)
