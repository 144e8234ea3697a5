"""The routes of one rollout, by format: OpenAI's chats, completions and responses, and Anthropic's messages."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.core.chat.messages import TemplateUse, Tool
from headrace.core.chat.token_text import TokenPlaces, text_of_bytes
from headrace.episodes.environments.gateway.history_trees import GatewayRollout, TreeReply, reply_as_sent
from headrace.episodes.environments.gateway.turn_request import (
    MODEL,
    AnswerEncoder,
    GatewayRules,
    TurnRequest,
    asked_of,
    check_drawing,
    check_sampling,
    constraint_of,
    is_cut,
    most_tokens,
    speaker_of,
    turn_of,
)
from headrace.web.bodies import Chat, Completions, Generate
from headrace.web.errors import Refused
from headrace.web.formats.anthropic_messages import (
    Messages,
    choice_of,
    events_of,
    format_of,
    message_of,
    messages_of,
    parallel_of,
    refuse_unserved_messages,
    tools_of,
    unshown,
)
from headrace.web.formats.followed_turn import TokenBytes, said_tokens
from headrace.web.formats.responses import (
    Responses,
    ResponseWriter,
    asked_of_template,
    format_of_response,
    history_of,
    offered_functions,
    refuse_unserved_responses,
    system_of,
)
from headrace.web.request_fields import note_ignored, offered_tools
from headrace.web.sending import GONE, Events, json_response, read_body

# --- A reply as OpenAI's clients of chats read it
# A reply as OpenAI's clients of chats read it, whole or as a stream (https://platform.openai.com/docs/api-reference/chat).


@dataclass(frozen=True, kw_only=True)
class ChatAnswer:
    model: str
    """The name that the client asked for."""
    logprobs: bool
    token_bytes: TokenBytes

    def whole(self, answer: TreeReply) -> dict[str, Any]:
        message = reply_as_sent(answer.reply)
        if "tool_calls" in message:
            message["content"] = message["content"] or None
        done = answer.completion
        choice = {
            "index": 0,
            "message": message | {"refusal": None},
            "finish_reason": _reason(answer),
            "logprobs": self._logprobs(done.tokens, done.logprobs) if done else None,
        }
        return self._head("chat.completion") | {"choices": [choice], "usage": usage_of(answer)}

    async def events(self, turn: TurnRequest, usage: bool) -> AsyncIterator[dict[str, Any]]:
        """Yields the chunks of a stream. Text comes as it is sampled; tool calls come whole, at the end. `usage`: whether the last chunk
        has the counts of tokens."""
        head, first = self._head("chat.completion.chunk"), True
        async with aclosing(turn.pieces()) as pieces:
            async for piece in pieces:
                if first or piece.text or (self.logprobs and piece.tokens):
                    delta = {**({"role": "assistant"} if first else {}), "content": piece.text}
                    yield head | {"choices": [_chunk(delta, None, self._logprobs(piece.tokens, piece.logprobs))]}
                    first = False
        if first:
            yield head | {"choices": [_chunk({"role": "assistant", "content": ""}, None, None)]}
        message = reply_as_sent(turn.answer.reply)
        if calls := [{"index": place, **call} for place, call in enumerate(message.get("tool_calls", ()))]:
            yield head | {"choices": [_chunk({"tool_calls": calls}, None, None)]}
        yield head | {"choices": [_chunk({}, _reason(turn.answer), None)]}
        if usage:
            yield head | {"choices": [], "usage": usage_of(turn.answer)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
        }

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        return {"content": said_tokens(tokens, logprobs, self.token_bytes), "refusal": None} if self.logprobs else None


def usage_of(answer: TreeReply) -> dict[str, int]:
    prompt, sampled = answer.prompt_tokens, answer.reply.tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _reason(answer: TreeReply) -> str:
    if is_cut(answer):
        return "length"
    return "tool_calls" if any(not call.problem for call in answer.reply.calls) else "stop"


def _chunk(delta: dict[str, Any], reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}


# --- `/v1/chat/completions` and `/v1/models` of one rollout.


STARTED = int(time.time())


async def models(request: HttpRequest, rollout: GatewayRollout, rules: GatewayRules) -> Response:
    return json_response(models_body())


async def model(request: HttpRequest, rollout: GatewayRollout, rules: GatewayRules) -> Response:
    """The model under the name that the client gives it."""
    name = request.scope["path"].partition("/models/")[2]
    return json_response(_model(name or MODEL))


def models_body() -> dict[str, Any]:
    return {"object": "list", "data": [_model(MODEL)]}


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": STARTED, "owned_by": "headrace"}


async def chat(request: HttpRequest, rollout: GatewayRollout, rules: GatewayRules) -> Response:
    body = await read_body(request, Chat, rules.limits)
    check_drawing(body, rules)
    speaker = speaker_of(request, rollout, rules, body.model)
    most = most_tokens(
        "max_tokens", body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    )
    tools = offered_tools(body)
    constraint = await constraint_of(
        rules,
        tools,
        response_format=body.response_format,
        outputs=body.structured_outputs,
        tool_choice=body.tool_choice,
        several=body.parallel_tool_calls,
    )
    shown = [schema(tool) for tool in tools]
    asked = asked_of(body, rules)
    turn = TurnRequest(
        speaker,
        lambda stream: speaker.chats.ask(body.messages, shown, most, stream, asked=asked, constraint=constraint),
    )
    made = ChatAnswer(model=body.model or MODEL, logprobs=bool(body.logprobs), token_bytes=rules.encoder.token_bytes)
    if body.stream:
        return Events(made.events(turn, body.stream_options is not None and body.stream_options.include_usage))
    answer = await turn.whole(request)
    return GONE if answer is None else json_response(made.whole(answer))


def schema(tool: Tool) -> dict[str, Any]:
    """The tool as a chat template is given it, without the fields that are not set."""
    function = tool.function
    rest = {"description": function.description, "parameters": function.parameters}
    return {
        "type": "function",
        "function": {"name": function.name, **{name: value for name, value in rest.items() if value is not None}},
    }


# --- Completions of one rollout that are asked for without messages.
#
# `/v1/completions`: a text or tokens in, text out (https://platform.openai.com/docs/api-reference/completions). `/inference/v1/generate`:
# tokens in, tokens out, as vLLM 0.32 speaks it, for clients that apply the chat template by themselves.


DEFAULT = 16
"""Tokens of a completion whose request names no number, as OpenAI's reference has it."""


async def completions(request: HttpRequest, rollout: GatewayRollout, rules: GatewayRules) -> Response:
    body = await read_body(request, Completions, rules.limits)
    check_drawing(body, rules)
    speaker = speaker_of(request, rollout, rules, body.model)
    if body.logprobs:
        message = f"logprobs = {body.logprobs} is not served; 0 asks for the log-probs of the sampled tokens"
        raise Refused(400, message, "unsupported_parameter")
    prompt, most = prompt_of(body), most_tokens("max_tokens", body.max_tokens) or DEFAULT
    constraint = await constraint_of(rules, response_format=body.response_format, outputs=body.structured_outputs)
    turn = TurnRequest(speaker, lambda stream: speaker.texts.ask(prompt, most, stream, constraint))
    made = TextAnswer(model=body.model or MODEL, logprobs=body.logprobs is not None, encoder=rules.encoder)
    if body.stream:
        return Events(made.events(turn, body.stream_options is not None and body.stream_options.include_usage))
    answer = await turn.whole(request)
    return GONE if answer is None else json_response(made.whole(answer))


async def generate(request: HttpRequest, rollout: GatewayRollout, rules: GatewayRules) -> Response:
    body = await read_body(request, Generate, rules.limits)
    _check_generate(body, rules)
    speaker = speaker_of(request, rollout, rules, body.model)
    prompt, most = tuple(body.token_ids), most_tokens("max_tokens", body.sampling_params.max_tokens)
    drawing = body.sampling_params
    constraint = await constraint_of(rules, response_format=drawing.response_format, outputs=drawing.structured_outputs)
    turn = TurnRequest(speaker, lambda stream: speaker.texts.ask(prompt, most, stream, constraint))
    answer = await turn.whole(request)
    if answer is None:
        return GONE
    done = answer.completion
    sampled = list(zip(done.tokens, done.logprobs, strict=True)) if done else []
    content = [  # verifiers' client looks for this form of `token`
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "top_logprobs": []}
        for token, logprob in sampled
    ]
    choice = {
        "index": 0,
        "token_ids": [token for token, _ in sampled],
        "logprobs": {"content": content},
        "finish_reason": _finish_reason(answer),
    }
    name = body.request_id or uuid.uuid4().hex
    return json_response({"request_id": name, "choices": [choice], "usage": usage_of(answer)})


def _check_generate(body: Generate, rules: GatewayRules) -> None:
    """Raises Refused for what the run does not have. Tokens that end a completion anyway may be named, and special ones may be shown."""
    drawing = body.sampling_params
    if other := sorted(set(drawing.stop_token_ids or ()) - rules.encoder.end_tokens()):
        message = f"the token {other[0]} does not end a completion of this model, so that stop_token_ids would change what is sampled"
        raise Refused(400, f"{message}; use a renderer of this model, or set rollout.stop", "unsupported_parameter")
    drawing.stop_token_ids = drawing.skip_special_tokens = None
    check_drawing(drawing, rules)
    asked = {
        "logprobs": (drawing.logprobs or 0) > 1,
        "prompt_logprobs": drawing.prompt_logprobs is not None,
        "stream": body.stream,
        "constraint": body.constraint is not None,
        "prefix_token_ids": bool(body.prefix_token_ids),
        "return_sampling_mask": bool(body.return_sampling_mask),
        "return_routed_experts": bool(body.return_routed_experts),
    }
    if found := [name for name, there in asked.items() if there]:
        message = f"{found[0]} is not served here; leave it out: an answer has the sampled tokens and their log-probs"
        raise Refused(400, message, "unsupported_parameter")


def prompt_of(body: Completions) -> str | list[int]:
    """The prompt of the request, which may be written as a list of one."""
    match body.prompt:
        case str(text) | [str(text)]:
            return text
        case [[*tokens]] | [*tokens] if tokens and all(isinstance(token, int) for token in tokens):
            return [token for token in tokens if isinstance(token, int)]
    raise Refused(
        400, "prompt is not served as a list of several, or as none; send a request for each", "unsupported_parameter"
    )


@dataclass(frozen=True, kw_only=True)
class TextAnswer:
    model: str
    """The name that the client asked for."""
    logprobs: bool
    encoder: AnswerEncoder

    def whole(self, answer: TreeReply) -> dict[str, Any]:
        done = answer.completion
        logprobs = self._logprobs(done.tokens, done.logprobs, self.encoder.places()) if done else None
        return self._head() | {
            "choices": [_choice(answer.reply.text, _finish_reason(answer), logprobs)],
            "usage": usage_of(answer),
        }

    async def events(self, turn: TurnRequest, usage: bool) -> AsyncIterator[dict[str, Any]]:
        head, places = self._head(), self.encoder.places()
        async with aclosing(turn.pieces()) as pieces:
            async for piece in pieces:
                if piece.text or (self.logprobs and piece.tokens):
                    logprobs = self._logprobs(piece.tokens, piece.logprobs, places)
                    yield head | {"choices": [_choice(piece.text, None, logprobs)]}
        yield head | {"choices": [_choice("", _finish_reason(turn.answer), None)]}
        if usage:
            yield head | {"choices": [], "usage": usage_of(turn.answer)}

    def _head(self) -> dict[str, Any]:
        made = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        return made | {"model": self.model}

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[float], places: TokenPlaces) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        return {
            "tokens": [text_of_bytes(self.encoder.token_bytes(token), "bytes:") for token in tokens],
            "token_logprobs": list(logprobs),
            "top_logprobs": None,
            "text_offset": places.push(tokens),
        }


def _finish_reason(answer: TreeReply) -> str:
    return "length" if is_cut(answer) else "stop"


def _choice(text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "finish_reason": reason, "logprobs": logprobs}


# --- `/v1/responses` of one rollout, whole or as a stream of events.


async def responses(request: HttpRequest, rollout: GatewayRollout, rules: GatewayRules) -> Response:
    body = await read_body(request, Responses, rules.limits)
    refuse_unserved_responses(body)
    speaker = speaker_of(request, rollout, rules, body.model)
    check_sampling(rules, (), {"temperature": body.temperature, "top_p": body.top_p})
    most = most_tokens("max_output_tokens", body.max_output_tokens)
    tools = offered_functions(body)
    constraint = await constraint_of(
        rules,
        tools,
        response_format=format_of_response(body),
        tool_choice=body.tool_choice,
        several=body.parallel_tool_calls,
    )
    shown = [schema(tool) for tool in tools]
    history = history_of(body, rollout.responses)
    asked = asked_of_template(body, rules.encoder.variables)
    given = [*system_of(body), *history]
    turn = TurnRequest(
        speaker, lambda stream: speaker.chats.ask(given, shown, most, stream, asked=asked, constraint=constraint)
    )
    made = ResponseWriter(
        body,
        model=body.model or MODEL,
        sampling=rules.sampling,
        history=history,
        stored=rollout.responses,
        token_bytes=rules.encoder.token_bytes,
    )
    if body.stream:
        return Events(made.events(turn), named=True)
    answer = await turn.whole(request)
    return GONE if answer is None else json_response(made.whole(turn_of(answer)))


# --- `/v1/messages` of one rollout.


async def messages(request: HttpRequest, rollout: GatewayRollout, rules: GatewayRules) -> Response:
    body = await read_body(request, Messages, rules.limits)
    refuse_unserved_messages(body)
    check_sampling(
        rules, body.stop_sequences or (), {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
    )
    speaker = speaker_of(request, rollout, rules, body.model)
    talk, offered = messages_of(body), tools_of(body)
    for name in unshown(body):
        note_ignored(request.scope, name)
    constraint = await constraint_of(
        rules, offered, response_format=format_of(body), tool_choice=choice_of(body), several=parallel_of(body)
    )
    tools = [schema(tool) for tool in offered]
    asked = TemplateUse(continues=body.messages[-1].role == "assistant")
    turn = TurnRequest(
        speaker,
        lambda stream: speaker.chats.ask(talk, tools, body.max_tokens, stream, asked=asked, constraint=constraint),
    )
    if body.stream:
        return Events(events_of(turn, body.model), named=True)
    answer = await turn.whole(request)
    return GONE if answer is None else json_response(message_of(turn_of(answer), body.model))
