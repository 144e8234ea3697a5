"""OpenAI's responses (https://platform.openai.com/docs/api-reference/responses): requests as those of chats, and turns as answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from headrace.core.chat.messages import (
    Function,
    MadeCall,
    Message,
    Name,
    Named,
    TemplateUse,
    Tool,
    text_of,
    unserved_part,
    with_effort,
)
from headrace.web.bodies import Count, OpenBody
from headrace.web.errors import Refused
from headrace.web.formats.followed_turn import FollowedTurn, TokenBytes, WholeTurn, said_tokens

# --- The messages up to earlier responses
# The messages up to earlier responses, for requests that name one of them (`previous_response_id`).


MOST_CHARACTERS = 64 << 20
"""Characters that one store keeps. The oldest responses go first."""


class StoredResponses:
    def __init__(self, most: int = MOST_CHARACTERS) -> None:
        self._most, self._held = most, 0
        self._messages: dict[str, tuple[Sequence[Message], int]] = {}
        """Messages of each response, and their characters."""

    def keep(self, id: str, messages: Sequence[Message]) -> None:
        size = sum(map(_characters, messages))
        self._messages[id] = messages, size
        self._held += size
        while self._held > self._most:
            self._held -= self._messages.pop(next(iter(self._messages)))[1]

    def before(self, id: str | None) -> Sequence[Message]:
        """Returns the messages up to a response; none for None. Raises Refused for one that is not stored."""
        if id is None:
            return ()
        if id not in self._messages:
            message = f"previous_response_id = {id} names no stored response; send all messages as input"
            raise Refused(400, message, "previous_response_not_found")
        return self._messages[id][0]


def _characters(message: Message) -> int:
    calls = sum(
        len(tool_call.function.name) + len(tool_call.function.arguments) for tool_call in message.tool_calls or ()
    )
    return 64 + len(text_of(message.content)) + calls


# --- OpenAI's responses (https://platform.openai.com/docs/api-reference/responses) as chats: the items of a request become messages, and a
# reply becomes items.


Item = dict[str, Any]
_LOGPROBS = "message.output_text.logprobs"
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class OfferedFunction(msgspec.Struct, kw_only=True):
    """A tool of a request."""

    name: Name = ""
    type: str = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Responses(OpenBody, kw_only=True):
    """`/v1/responses`"""

    model: str | None = None
    input: str | list[Item]
    instructions: str | None = None
    """The system message. It is not one of the messages that `previous_response_id` names."""
    previous_response_id: str | None = None
    store: bool | None = None
    """Left out: true. Stored are the messages, as long as there is room, for `previous_response_id`."""
    tools: list[OfferedFunction] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Count | None = None
    include: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Count | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = None
    background: bool | None = None
    max_tool_calls: int | None = None
    prompt: dict[str, Any] | None = None
    conversation: Any = None
    context_management: list[Any] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())


_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "top_logprobs": ((None, 0), "leave it out: there are log-probs of the sampled tokens only"),
    "truncation": ((None, "disabled"), "leave it out: no item of the input is dropped"),
    "background": ((None, False), "leave it out"),
    "max_tool_calls": ((None,), "leave it out"),
    "prompt": ((None,), "send its text as instructions and input"),
    "conversation": ((None,), "use previous_response_id"),
    "context_management": ((None, []), "leave it out"),
}
"""Fields that are not served -> the values with which they ask for nothing, and the remedy for others."""


def refuse_unserved_responses(body: Responses) -> None:
    """Raises Refused for fields that would change the reply."""
    for name, (neutral, remedy) in _NEUTRAL.items():
        if getattr(body, name) not in neutral:
            raise _unserved(name, remedy)
    if (body.text or {}).get("verbosity") not in (None, "medium"):
        raise _unserved("text.verbosity", "leave it out")
    if any(value not in (None, "none") for name, value in (body.reasoning or {}).items() if name != "effort"):
        raise _unserved("reasoning", "leave it out: the model thinks as it was trained to")
    for part in body.include or ():
        if part not in (_LOGPROBS, "reasoning.encrypted_content"):  # nothing here makes reasoning items
            raise _unserved(f"include = {part}", "leave it out")


def format_of_response(body: Responses) -> dict[str, Any] | None:
    """Returns the form of the reply as `response_format` has it. Raises Refused."""
    asked = (body.text or {}).get("format")
    if not isinstance(asked, dict | None):
        raise Refused(400, "text.format is an object with a type and a schema")
    return asked


def _unserved(name: str, remedy: str) -> Refused:
    return Refused(400, f"{name} is not served; {remedy}", "unsupported_parameter")


def asked_of_template(body: Responses, variables: frozenset[str]) -> TemplateUse:
    """Returns what a request asks of a template with these variables. Raises Refused for an effort that the template does not know."""
    effort = (body.reasoning or {}).get("effort")
    arguments = with_effort({}, effort, variables)
    if arguments is None and effort != "none":
        raise _unserved("reasoning.effort", "leave it out: the chat template knows none")
    return TemplateUse(arguments=arguments or {}, continues=False)


def offered_functions(body: Responses) -> list[Tool]:
    """Returns the tools that the model is shown. Raises Refused for those that run at OpenAI."""
    for tool in body.tools or ():
        if tool.type != "function":
            raise Refused(
                400, f"a tool of type {tool.type} is not served; give functions of your own", "unsupported_parameter"
            )
        if not tool.name:
            raise Refused(400, "a function of tools has no name; give it one")
    if body.tool_choice == "none":
        return []
    return [
        Tool(
            function=Function(
                name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
            )
        )
        for tool in body.tools or ()
    ]


def system_of(body: Responses) -> list[Message]:
    """The instructions, which are not stored."""
    return [Message(role="system", content=body.instructions)] if body.instructions else []


def history_of(body: Responses, stored: StoredResponses) -> list[Message]:
    """The messages before the reply, without the instructions. Raises Refused for none, and for a response that is not stored."""
    history = [*stored.before(body.previous_response_id), *messages_of_input(body.input)]
    if not history:
        raise Refused(400, "input has no messages; send one at least")
    return history


def messages_of_input(given: str | Sequence[Item]) -> list[Message]:
    """Returns the items of a request as messages. Calls follow the text of the same reply, as they do in an answer, and its thinking goes
    before. Raises Refused for an item that is neither of these."""
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    messages: list[Message] = []
    thought = ""
    for item in [*given, None]:
        if thought and not _takes_thought(item):
            raise Refused(
                400,
                "a reasoning item has no message or call of the assistant behind it, to which it belongs; leave it out",
            )
        if item is None:
            break
        match item:
            case {"type": "reasoning"} if not (item.get("encrypted_content") and not item.get("content")):
                thought += _text(item.get("content") or item.get("summary") or "")
            case {"type": "function_call", "call_id": str(id), "name": str(name), "arguments": str(arguments)}:
                call = MadeCall(id=id, function=Named(name=name, arguments=arguments))
                if messages and messages[-1].role == "assistant" and not thought:
                    last = messages.pop()
                    messages.append(msgspec.structs.replace(last, tool_calls=[*(last.tool_calls or ()), call]))
                else:
                    messages.append(
                        Message(role="assistant", content="", tool_calls=[call], reasoning_content=thought or None)
                    )
                    thought = ""
            case {"type": "function_call_output", "call_id": str(id), "output": output}:
                messages.append(Message(role="tool", content=_text(output), tool_call_id=id))
            case {"role": str(role), "content": content} if item.get("type", "message") == "message":
                role = "system" if role == "developer" else role
                messages.append(Message(role=role, content=_text(content), reasoning_content=thought or None))
                thought = ""
            case _:
                message = f"an item of type {item.get('type', 'message')} is not served as it is written"
                raise Refused(400, f"{message}; only messages with text and function calls with their outputs are")
    return messages


def _takes_thought(item: Item | None) -> bool:
    """Whether the thinking of an item before belongs to this one."""
    return item is not None and (item.get("type") in ("reasoning", "function_call") or item.get("role") == "assistant")


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(400, f"content is {type(content).__name__}, not text or a list of parts")
    for part in content:
        shown = isinstance(part, dict) and part.get("type") in _TEXTS
        if not shown or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise Refused(400, unserved_part(str(kind)))
    return "".join(part["text"] for part in content)


def text_item(id: str, text: str, logprobs: Sequence[Item], status: str = "completed") -> Item:
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [text_part(text, logprobs)] if status == "completed" else [],
    }


def thought_item(id: str, reasoning: str) -> Item:
    content = [{"type": "reasoning_text", "text": reasoning}]
    return {"id": id, "type": "reasoning", "status": "completed", "summary": [], "content": content}


def text_part(text: str, logprobs: Sequence[Item]) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def call_items(turn: WholeTurn) -> list[Item]:
    return [
        {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for call in turn.calls
    ]


def message_of_turn(turn: WholeTurn) -> Message:
    """The turn as a message of a chat."""
    calls = [MadeCall(id=call.id, function=Named(name=call.name, arguments=call.arguments)) for call in turn.calls]
    return Message(
        role="assistant", content=turn.text, tool_calls=calls or None, reasoning_content=turn.reasoning or None
    )


def usage_of_response(turn: WholeTurn) -> Item:
    prompt, sampled = turn.prompt_tokens, turn.count
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": turn.thought},
        "total_tokens": prompt + sampled,
    }


def settings_of(body: Responses, sampling: Mapping[str, object]) -> Item:
    """The fields of a response that repeat its request, with the values that hold."""
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "store": body.store is not False,
        "temperature": sampling.get("temperature"),
        "text": {"format": format_of_response(body) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [msgspec.to_builtins(tool) for tool in body.tools or ()],
        "top_p": sampling.get("top_p"),
        "truncation": "disabled",
        "user": body.user,
    }


# --- A turn as a response of OpenAI's, whole or as a stream of events.


class ResponseWriter:
    """Writes one response, and stores its messages."""

    def __init__(
        self,
        body: Responses,
        *,
        model: str,
        sampling: Mapping[str, object],
        history: Sequence[Message],
        stored: StoredResponses,
        token_bytes: TokenBytes,
    ) -> None:
        """`model`, `sampling`: the name and the settings that the response reports. `history`: the messages before the reply, without the
        instructions."""
        self._body, self._model, self._sampling = body, model, sampling
        self._history, self._stored, self._bytes = history, stored, token_bytes
        self._id, self._text_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._thought_id = f"rs_{uuid.uuid4().hex}"
        self._created, self._number = int(time.time()), 0
        self._thought, self._output = "", list[Item]()
        """The thinking so far, and the items of a stream that are complete."""

    def whole(self, turn: WholeTurn) -> Item:
        logprobs = said_tokens(turn.tokens, turn.logprobs, self._bytes) if self._body.logprobs else []
        calls = call_items(turn)
        output = [thought_item(self._thought_id, turn.reasoning)] if turn.reasoning else []
        output += [text_item(self._text_id, turn.text, logprobs)] if turn.text or not calls else []
        return self._over([*output, *calls], turn)

    async def events(self, turn: FollowedTurn) -> AsyncIterator[Item]:
        """Yields the events of a stream. Thinking and text come as they are sampled; function calls come whole, at the end."""
        text, logprobs = "", list[Item]()
        async with aclosing(turn.pieces()) as pieces:
            async for piece in pieces:
                for event in () if self._number else self._begin():
                    yield event
                new = said_tokens(piece.tokens, piece.logprobs, self._bytes) if self._body.logprobs else []
                logprobs += new
                for event in self._thinks(piece.reasoning) if piece.reasoning else ():
                    yield event
                for event in self._says(piece.text, not text, new) if piece.text else ():
                    yield event
                text += piece.text
        for event in () if self._number else self._begin():
            yield event
        for event in self._rest(turn.turn, text, logprobs):
            yield event

    def _begin(self) -> Iterator[Item]:
        begun = self._response("in_progress", [])
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def _thinks(self, new: str) -> Iterator[Item]:
        if not self._thought:
            item = thought_item(self._thought_id, "") | {"status": "in_progress", "content": []}
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._of_thought("response.content_part.added", part={"type": "reasoning_text", "text": ""})
        self._thought += new
        yield self._of_thought("response.reasoning_text.delta", delta=new)

    def _thought_ends(self) -> Iterator[Item]:
        """Ends the item of the thinking, if there is one that has not ended."""
        if self._thought and not self._output:
            self._output.append(item := thought_item(self._thought_id, self._thought))
            yield self._of_thought("response.reasoning_text.done", text=self._thought)
            yield self._of_thought("response.content_part.done", part=item["content"][0])
            yield self._event("response.output_item.done", output_index=0, item=item)

    def _text_begins(self) -> Iterator[Item]:
        yield from self._thought_ends()
        item = text_item(self._text_id, "", (), "in_progress")
        yield self._event("response.output_item.added", output_index=len(self._output), item=item)
        yield self._of_text("response.content_part.added", part=text_part("", ()))

    def _says(self, new: str, begins: bool, logprobs: Sequence[Item]) -> Iterator[Item]:
        if begins:
            yield from self._text_begins()
        yield self._of_text("response.output_text.delta", delta=new, logprobs=logprobs)

    def _rest(self, turn: WholeTurn, text: str, logprobs: Sequence[Item]) -> Iterator[Item]:
        """Yields what follows the text."""
        calls, output = call_items(turn), self._output
        yield from self._thought_ends()
        if not text and not calls:
            yield from self._text_begins()
        if text or not calls:
            item = text_item(self._text_id, text, logprobs)
            yield self._of_text("response.output_text.done", text=text, logprobs=logprobs)
            yield self._of_text("response.content_part.done", part=text_part(text, logprobs))
            yield self._event("response.output_item.done", output_index=len(output), item=item)
            output.append(item)
        for place, call in enumerate(calls, len(output)):
            at = {"output_index": place, "item_id": call["id"]}
            begun = call | {"arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=place, item=begun)
            yield self._event("response.function_call_arguments.delta", delta=call["arguments"], **at)
            yield self._event("response.function_call_arguments.done", arguments=call["arguments"], **at)
            yield self._event("response.output_item.done", output_index=place, item=call)
        over = self._over([*output, *calls], turn)
        yield self._event(f"response.{over['status']}", response=over)

    def _event(self, type: str, **fields: Any) -> Item:
        event = {"type": type, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _of_text(self, type: str, **fields: Any) -> Item:
        at = {"item_id": self._text_id, "output_index": len(self._output), "content_index": 0}
        return self._event(type, **at, **fields)

    def _of_thought(self, type: str, **fields: Any) -> Item:
        return self._event(type, item_id=self._thought_id, output_index=0, content_index=0, **fields)

    def _over(self, output: list[Item], turn: WholeTurn) -> Item:
        """The whole response. Its messages are stored if its client may continue it."""
        if self._body.store is not False and turn.count:
            self._stored.keep(self._id, [*self._history, message_of_turn(turn)])
        whole = self._response("incomplete" if turn.cut else "completed", output)
        details = {"reason": "max_output_tokens"} if turn.cut else None
        return whole | {"incomplete_details": details, "usage": usage_of_response(turn)}

    def _response(self, status: str, output: list[Item]) -> Item:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": output,
            "usage": None,
            **settings_of(self._body, self._sampling),
        }
