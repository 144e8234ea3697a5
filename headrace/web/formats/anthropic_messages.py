"""Anthropic's messages (https://docs.anthropic.com/en/api/messages) as those of OpenAI, and a reply as Anthropic's clients read it."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.core.chat.messages import Function, MadeCall, Message, Name, Named, Tool, unserved_part
from headrace.web.bodies import MOST_STOPS, OpenBody, TopK
from headrace.web.errors import Refused
from headrace.web.formats.followed_turn import FollowedTurn, WholeTurn

Blocks = str | list[dict[str, Any]]


class SentMessage(msgspec.Struct, kw_only=True):
    """A message of a request."""

    role: str
    content: Blocks


class OfferedTool(msgspec.Struct, kw_only=True):
    name: Name
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: str = "custom"


class CountTokens(OpenBody, kw_only=True):
    """`/v1/messages/count_tokens`"""

    model: str
    messages: Annotated[list[SentMessage], Meta(min_length=1)]
    system: Blocks | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: dict[str, Any] | None = None
    """`auto`; `none`: the model is shown no tools; `any`, or `tool` with its name: the reply is a call."""
    output_config: dict[str, Any] | None = None
    """`format`: a JSON schema to which the reply is held."""
    thinking: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None
    """A conversation that the server holds, of which a request sends only what is new."""


class Messages(CountTokens, kw_only=True):
    """`/v1/messages`"""

    max_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)]
    stop_sequences: Annotated[list[str], Meta(max_length=MOST_STOPS)] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: TopK | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


def refuse_unserved_messages(body: CountTokens) -> None:
    """Raises Refused for fields that would change the reply."""
    if (
        body.thread is not None
    ):  # by these details the tool runner of Anthropic's client knows that it has to send all messages
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        raise Refused(400, "thread is not served; send all messages with each request", details=details)
    if (body.thinking or {}).get("type", "disabled") != "disabled":
        raise Refused(400, "thinking is not served; leave it out: the model thinks as it was trained to")


def choice_of(body: CountTokens) -> Any:
    """Returns `tool_choice` as chats have it. Raises Refused."""
    given = body.tool_choice or {}
    match given.get("type", "auto"):
        case "auto" | "none" as kind:
            return kind
        case "any":
            return "required"
        case "tool" if isinstance(given.get("name"), str):
            return {"type": "function", "function": {"name": given["name"]}}
    raise Refused(400, f"tool_choice = {given!r:.100} is none; choose auto, none, any, or a tool by its name")


def format_of(body: CountTokens) -> dict[str, Any] | None:
    """Returns the form of the reply as `response_format` has it. Raises Refused for other things that are asked of it."""
    asked = {name: value for name, value in (body.output_config or {}).items() if value is not None}
    if other := sorted(set(asked) - {"format"}):
        raise Refused(400, f"output_config.{other[0]:.60} is not served; leave it out")
    if asked and not isinstance(asked["format"], dict):
        raise Refused(400, "output_config.format is an object with a type and a schema")
    return asked.get("format")


def parallel_of(body: CountTokens) -> bool | None:
    """Whether several calls are allowed; None where the body does not say."""
    return False if (body.tool_choice or {}).get("disable_parallel_tool_use") else None


def tools_of(body: CountTokens) -> list[Tool]:
    """Returns the tools that the model is shown. Raises Refused for those that run at Anthropic."""
    if (body.tool_choice or {}).get("type") == "none":
        return []
    for tool in body.tools or ():
        if tool.type != "custom":
            raise Refused(400, f"the tool {tool.name} of type {tool.type} is not served; give tools of your own")
    return [
        Tool(
            function=Function(
                name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
            )
        )
        for tool in body.tools or ()
    ]


def messages_of(body: CountTokens) -> list[Message]:
    """Raises Refused for a block that is neither text nor a tool's, and for a call of a tool in the last message."""
    messages = [Message(role="system", content=_text(body.system))] if body.system else []
    for message in body.messages:
        blocks = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
        messages += _of_blocks(message.role, blocks)
    if messages and messages[-1].tool_calls:
        raise Refused(400, "the last message calls a tool; end with its result")
    return messages


def unshown(body: CountTokens) -> Iterator[str]:
    """Yields the name of what messages hold and no chat template shows: that the result of a tool is an error, beside its text."""
    blocks = [block for message in body.messages if isinstance(message.content, list) for block in message.content]
    if any(block.get("type") == "tool_result" and block.get("is_error") for block in blocks):
        yield "messages.content.is_error"


def _of_blocks(role: str, blocks: Sequence[Mapping[str, Any]]) -> Iterator[Message]:
    """Yields the results of tools, each a message of its own, and then what the blocks say."""
    parts: list[Mapping[str, Any]] = []
    calls: list[MadeCall] = []
    thought = ""
    for block in blocks:
        match block:
            case {"type": "tool_result", "tool_use_id": str(id)}:
                yield Message(role="tool", content=_text(block.get("content") or ""), tool_call_id=id)
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": dict(given)}:
                calls.append(MadeCall(id=id, function=Named(name=name, arguments=json.dumps(given))))
            case {"type": "thinking", "thinking": str(text)} if role == "assistant":
                thought += text
            case _:
                parts.append(block)
    if parts or calls or thought:
        yield Message(role=role, content=_text(parts), tool_calls=calls or None, reasoning_content=thought or None)


def _text(blocks: Any) -> str:
    """`blocks`: text, or a list of blocks. Raises Refused for anything else: the result of a tool may hold what it likes."""
    if isinstance(blocks, str):
        return blocks
    if not isinstance(blocks, list):
        raise Refused(400, f"the content of a block is {type(blocks).__name__}, not text or a list of blocks")
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        if kind != "text" or not isinstance(block.get("text"), str):
            raise Refused(400, unserved_part(str(kind), "only text and tools are"))
    return "".join(block["text"] for block in blocks)


def message_of(turn: WholeTurn, model: str) -> dict[str, Any]:
    """The turn as a message of Anthropic's."""
    content: list[dict[str, Any]] = []
    if turn.reasoning:
        content.append({"type": "thinking", "thinking": turn.reasoning, "signature": ""})
    if turn.text or not turn.calls:
        content.append({"type": "text", "text": turn.text})
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        for call in turn.calls
    ]
    return _head(model, turn.prompt_tokens) | {
        "content": content,
        "stop_reason": _stop_reason(turn),
        "stop_sequence": turn.stop or None,
        "usage": {"input_tokens": turn.prompt_tokens, "output_tokens": turn.count},
    }


def _stop_reason(turn: WholeTurn) -> str:
    if turn.cut:
        return "max_tokens"
    return "tool_use" if turn.calls else "stop_sequence" if turn.stop else "end_turn"


def _head(model: str, prompt_tokens: int) -> dict[str, Any]:
    """A message that has not begun."""
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
    }


async def events_of(turn: FollowedTurn, model: str) -> AsyncIterator[dict[str, Any]]:
    """Yields the events of a stream. Thinking and text come as they are sampled; calls of tools come whole, at the end."""
    begun, open_, index = False, "", -1
    async with aclosing(turn.pieces()) as pieces:
        async for piece in pieces:
            if not begun:
                yield {"type": "message_start", "message": _head(model, turn.prompt_tokens)}
            begun = True
            for kind, new in (("thinking", piece.reasoning), ("text", piece.text)):
                if new and open_ != kind:
                    if open_:
                        yield _block_ends(index)
                    open_, index = kind, index + 1
                    yield _block_begins(index, _EMPTY[kind])
                if new:
                    yield _delta(index, {"type": f"{kind}_delta", kind: new})
    message = message_of(turn.turn, model)
    if not begun:
        yield {"type": "message_start", "message": _head(model, turn.turn.prompt_tokens)}
    if open_:
        yield _block_ends(index)
    for place, block in enumerate(message["content"][index + 1 :], index + 1):
        yield _block_begins(place, {**block, "input": {}} if block["type"] == "tool_use" else block)
        if block["type"] == "tool_use":
            yield _delta(place, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])})
        yield _block_ends(place)
    rest = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    yield {"type": "message_delta", "delta": rest, "usage": {"output_tokens": message["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}


_EMPTY = {"thinking": {"type": "thinking", "thinking": "", "signature": ""}, "text": {"type": "text", "text": ""}}
"""Blocks that have not begun, by their type."""


def _block_ends(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


def _block_begins(index: int, block: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}
