"""Grammars of answers with tool calls, in llguidance's variant of Lark's format, for models that write their calls as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.core.chat.formats import HERMES, LLAMA, MISTRAL, CallFormat
from headrace.core.chat.messages import Tool

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
    one = f"({' | '.join(f'call_{number}' for number in range(len(tools)))})"
    opening, closing = (_marker(text, special) for text in (format.opening, format.closing))
    if format is LLAMA:
        calls = one + (f' ("; " {one})*' if several else "")
    elif format is MISTRAL:
        calls = f'{opening} "[" {one}' + (f' (", " {one})*' if several else "") + ' "]"'
    else:
        wrapped = f'{opening} "\\n" {one} "\\n" {closing}'
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
    escaped = "".join(f"\\x{ord(one):02x}" if not one.isalnum() else one for one in opening)
    return f"/(?s:.*)/ & ~/(?s:.*){escaped}(?s:.*)/"
