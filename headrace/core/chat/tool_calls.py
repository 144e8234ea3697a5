"""How the families of models write tool calls. A format finds the calls of one *section*, the text between its markers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from headrace.core.chat.messages import DEEPEST, LONGEST_NAME, Tool, too_deep

# --- Calls as Gemma's models write them
# `call:NAME{key:value,...}`, where a text stands between two marks and nothing in it is escaped.
#
# FunctionGemma marks texts with `<escape>` (https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices), Gemma 4 with
# `<|"|>` (https://ai.google.dev/gemma/docs/capabilities/text/function-calling-gemma4).


_CALL = re.compile(r"call:\s*([^\s{}]+)\s*(\{.*\})", re.DOTALL)
_KEY = re.compile(r"\s*([^\s{}\[\],:]+)\s*:")
_PLAIN = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null|None")
_GEMMA_WORDS = {"true": True, "false": False, "null": None, "None": None}


def read_call(section: str, mark: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and the arguments. `mark`: the one around texts. Raises ValueError for what is no call."""
    found = _CALL.fullmatch(section.strip())
    if not found:
        raise ValueError("a call is call:NAME{key:value}")
    values = _Values(found[2], mark)
    try:
        arguments = values.mapping()
    except RecursionError:
        raise ValueError("the call is nested too deeply") from None
    if values.rest:
        raise ValueError(f"there is more behind the arguments: {values.rest[:40]!r}")
    return found[1], arguments


class _Values:
    """Reads values from the beginning of a text."""

    def __init__(self, text: str, mark: str) -> None:
        self._text, self._mark, self._at = text, mark, 0

    @property
    def rest(self) -> str:
        return self._text[self._at :]

    def mapping(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self._take("{")
        while not self._took("}"):
            if found:
                self._take(",")
            key = self._key()
            found[key] = self._value()
        return found

    def _list(self) -> list[Any]:
        found: list[Any] = []
        self._take("[")
        while not self._took("]"):
            if found:
                self._take(",")
            found.append(self._value())
        return found

    def _key(self) -> str:
        if self._began(self._mark):
            key = self._string()
            self._take(":")
            return key
        if not (found := _KEY.match(self._text, self._at)):
            raise ValueError(f"no key at {self.rest[:40]!r}")
        self._at = found.end()
        return found[1]

    def _value(self) -> Any:
        if self._began(self._mark):
            return self._string()
        if self._began("{"):
            return self.mapping()
        if self._began("["):
            return self._list()
        if not (found := _PLAIN.match(self._text, self._at)):
            raise ValueError(f"no value at {self.rest[:40]!r}; a text stands between two {self._mark}")
        self._at = found.end()
        if found[0] in _GEMMA_WORDS:
            return _GEMMA_WORDS[found[0]]
        return int(found[0]) if found[0].lstrip("-").isdigit() else float(found[0])

    def _string(self) -> str:
        self._take(self._mark)
        end = self._text.find(self._mark, self._at)
        if end < 0:
            raise ValueError(f"a text has no {self._mark} at its end")
        text, self._at = self._text[self._at : end], end + len(self._mark)
        return text

    def _began(self, with_: str) -> bool:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        return self._text.startswith(with_, self._at)

    def _took(self, what: str) -> bool:
        if there := self._began(what):
            self._at += len(what)
        return there

    def _take(self, what: str) -> None:
        if not self._took(what):
            raise ValueError(f"no {what!r} at {self.rest[:40]!r}")


# --- Calls as Qwen3-Coder and the models after it write them
# A tag for the function, and one for each argument, whose value is plain text (https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct,
# its chat template). Nothing in a value is escaped or quoted, so that the tool's schema alone says whether `12` is a number.


ARGUMENT, ARGUMENT_ENDS = "<parameter=", "</parameter>"
"""The marks before and after an argument."""

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>\s*")
_ENDS = re.compile(r"</function>\s*")
_NAME = re.compile(r"<parameter=([^>\n]+)>")
_VALUE_ENDS = re.compile(r"</parameter>\s*(?=<parameter=|</function>)")
"""A value may hold the closing tag: it ends where another argument, or the end of the call, follows."""


def read_functions(section: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields name and arguments of each call. Raises ValueError for what is no call."""
    at = 0
    while at < len(section) or not at:
        if not (found := _FUNCTION.match(section, at)):
            raise ValueError(f"a call is <function=NAME>, and not {section[at:].strip()[:40]!r}")
        arguments, at = _arguments(section, found.end())
        yield found[1], arguments
        if not section[at:].strip():
            return


def _arguments(section: str, at: int) -> tuple[dict[str, str], int]:
    """Returns the arguments that begin there, and the place behind the end of their call."""
    arguments: dict[str, str] = {}
    while not (ended := _ENDS.match(section, at)):
        begun = _NAME.match(section, at)
        ends = _VALUE_ENDS.search(section, begun.end()) if begun else None
        if not begun or not ends:
            raise ValueError(f"an argument is <parameter=NAME>value</parameter>, and not {section[at:][:40]!r}")
        if begun[1] in arguments:
            raise ValueError(f"the argument {begun[1]} is given twice")
        value = section[begun.end() : ends.start()].removeprefix("\n").removesuffix("\n")  # the template's own
        arguments[begun[1]], at = value, ends.end()
    return arguments, ended.end()


def typed(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments with the types of a tool's schema. A text that is no value of its type stays a text: the tool answers it."""
    kinds = schema.get("properties")
    known = kinds if isinstance(kinds, Mapping) else {}
    return {name: _typed(value, _types(known.get(name), schema)) for name, value in arguments.items()}


def _types(schema: Any, root: Mapping[str, Any], depth: int = 8) -> frozenset[str]:
    """The types that a schema allows; none if it does not say. `root`: the place of what it refers to."""
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    if isinstance(path := schema.get("$ref"), str):
        found: Any = root
        for part in path.removeprefix("#/").split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        return _types(found, root, depth - 1)
    kind = schema.get("type")
    named = (
        [kind]
        if isinstance(kind, str)
        else [name for name in kind if isinstance(name, str)]
        if isinstance(kind, list)
        else []
    )
    choices = (
        [*schema["enum"]] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    )
    inner = [other for word in ("anyOf", "oneOf", "allOf") for other in schema.get(word) or ()]
    below = [_types(other, root, depth - 1) for other in inner]
    return frozenset(named or map(_type_of, choices)).union(*below)


_TYPES = {
    "str": "string",
    "bool": "boolean",
    "int": "integer",
    "float": "number",
    "NoneType": "null",
    "dict": "object",
    "list": "array",
}
_QWEN_WORDS = {"true": True, "false": False, "null": None, "none": None}
"""Templates write Python's words too."""


def _type_of(value: Any) -> str:
    return _TYPES.get(type(value).__name__, "string")


def _typed(value: Any, types: frozenset[str]) -> Any:
    if not isinstance(value, str) or not types:
        return value
    text = value.strip()
    read = _QWEN_WORDS[text.lower()] if text.lower() in _QWEN_WORDS else _json_or_text(text)
    found = _type_of(read)
    if found in types - {"string"} or (found == "integer" and "number" in types):
        # a text is allowed too: only what no text would be is no text
        return value if "string" in types and found != "null" else read
    if isinstance(read, float) and "integer" in types and read.is_integer():
        return int(read)
    return value


def _json_or_text(text: str) -> Any:
    """The value of JSON; the text itself for anything else."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return text


def _no_number(word: str) -> Any:
    raise ValueError(word)


# --- formats ------------------------------------------------------------


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
    schemas = (tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == call.name)
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
    given = [value for value in (written.arguments, written.parameters) if value is not msgspec.UNSET]
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
        calls = tuple(_call(call) for call in _decoded(text, list[_Written]))
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
"""`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen 3.5 (`tool_calls.py`)."""

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
"""`<start_function_call>call:NAME{key:<escape>text<escape>}<end_function_call>`, one call in each (`tool_calls.py`)."""
GEMMA = _gemma("gemma", "<|tool_call>", "<tool_call|>", '<|"|>')
"""`<|tool_call>call:NAME{key:<|"|>text<|"|>}<tool_call|>`, one call in each: Gemma 4. (Gemma 3 was trained with no format of its own.)"""

FORMATS = (HERMES, QWEN_CODER, MISTRAL, LLAMA, FUNCTION_GEMMA, GEMMA)


# --- Grammars of answers with tool calls
# Grammars of answers with tool calls, in llguidance's variant of Lark's format, for models that write their calls as JSON.


ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
SPACES = r"[ \n\r\t]{1,32}"
"""White space between two tokens of JSON: a weak model that may write any number of spaces writes them to its limit of tokens."""


def call_grammar(
    format: CallFormat, tools: Sequence[Tool], *, forced: bool, several: bool, special: Mapping[str, int]
) -> str:
    """Returns the grammar of an answer that calls these tools; empty if there is none for the format.

    `forced`: the answer is a call; else text may stand before calls or for them. `several`: there may be several calls. `special`: ids of the
    tokenizer's special tokens by their texts, which no other text can spell. The arguments of tools that are not strict are any object, where
    the answer is not forced.
    """
    if format not in (HERMES, MISTRAL, LLAMA) or (format is LLAMA and not forced):
        return ""
    given = [
        ANY_OBJECT if not (forced or tool.function.strict) else tool.function.parameters or ANY_OBJECT for tool in tools
    ]
    rules = []
    for number, (tool, schema) in enumerate(zip(tools, given, strict=True)):
        inside = "parameters" if format is LLAMA else "arguments"
        begin = f'{{"name": {json.dumps(tool.function.name, ensure_ascii=False)}, "{inside}": '
        rules += [f'call_{number}: {_text(begin)} arguments_{number} "}}"', f"arguments_{number}: {_json(schema)}"]
    call = f"({' | '.join(f'call_{number}' for number in range(len(tools)))})"
    opening, closing = (_marker(text, special) for text in (format.opening, format.closing))
    if format is LLAMA:
        calls = call + (f' ("; " {call})*' if several else "")
    elif format is MISTRAL:
        calls = f'{opening} "[" {call}' + (f' (", " {call})*' if several else "") + ' "]"'
    else:
        wrapped = f'{opening} "\\n" {call} "\\n" {closing}'
        calls = wrapped + (f' ("\\n" {wrapped})*' if several else "")
    start = "start: calls" if forced else f"start: TEXT calls?\nTEXT: {_free(format.opening, special)}"
    return "\n".join([start, f"calls: {calls}", *rules])


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": SPACES}})


def _marker(text: str, special: Mapping[str, int]) -> str:
    return f"<[{special[text]}]>" if text in special else _text(text)


def _free(opening: str, special: Mapping[str, int]) -> str:
    """Text in which no call begins. Special tokens are never a part of it."""
    if opening in special:
        return "/(?s:.*)/"
    escaped = "".join(f"\\x{ord(character):02x}" if not character.isalnum() else character for character in opening)
    return f"/(?s:.*)/ & ~/(?s:.*){escaped}(?s:.*)/"
