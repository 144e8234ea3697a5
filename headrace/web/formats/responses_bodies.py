"""OpenAI's responses (https://platform.openai.com/docs/api-reference/responses) as chats: the items of a request become messages, and a
reply becomes items."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.core.chat.messages import Function, MadeCall, Message, Name, Named, TemplateUse, Tool, with_effort
from headrace.web.bodies import Count, OpenBody
from headrace.web.errors import Refused
from headrace.web.formats.followed_turn import WholeTurn
from headrace.web.formats.stored_responses import StoredResponses

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
    for one in body.include or ():
        if one not in (_LOGPROBS, "reasoning.encrypted_content"):  # nothing here makes reasoning items
            raise _unserved(f"include = {one}", "leave it out")


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
            function=Function(name=one.name, description=one.description, parameters=one.parameters, strict=one.strict)
        )
        for one in body.tools or ()
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
    for item in given:
        match item:
            case {"type": "reasoning"} if not (item.get("encrypted_content") and not item.get("content")):
                thought = _text(item.get("content") or item.get("summary") or "")
            case {"type": "function_call", "call_id": str(id), "name": str(name), "arguments": str(arguments)}:
                call = MadeCall(id=id, function=Named(name=name, arguments=arguments))
                if messages and messages[-1].role == "assistant":
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
                own = thought if role == "assistant" else ""
                role = "system" if role == "developer" else role
                messages.append(Message(role=role, content=_text(content), reasoning_content=own or None))
                thought = ""
            case _:
                said = f"an item of type {item.get('type', 'message')} is not served as it is written"
                raise Refused(400, f"{said}; only messages with text and function calls with their outputs are")
    return messages


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(400, f"content is {type(content).__name__}, not text or a list of parts")
    for part in content:
        shown = isinstance(part, dict) and part.get("type") in _TEXTS
        if not shown or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise Refused(400, f"a part of a message is of type {kind}; only text is served")
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
            "call_id": one.id,
            "name": one.name,
            "arguments": one.arguments,
            "status": "completed",
        }
        for one in turn.calls
    ]


def message_of_turn(turn: WholeTurn) -> Message:
    """The turn as a message of a chat."""
    calls = [MadeCall(id=one.id, function=Named(name=one.name, arguments=one.arguments)) for one in turn.calls]
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
        "tools": [msgspec.to_builtins(one) for one in body.tools or ()],
        "top_p": sampling.get("top_p"),
        "truncation": "disabled",
        "user": body.user,
    }
