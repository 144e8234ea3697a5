"""`/v1/models`, `/v1/completions`, `/v1/chat/completions`: text, as OpenAI's clients speak it.

Beside OpenAI's own fields a choice has `token_ids` and `weight_versions`; requests may have `top_k`, `min_p`, `stop_token_ids`
and `ignore_eos`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.core.chat.messages import Tool
from headrace.core.chat.tool_calls import CallFormat
from headrace.core.types import Request
from headrace.models.chat import off_loop
from headrace.serve.following import Piece, check_end, follow, to_their_ends
from headrace.serve.routes.completion_text import CompletionText, SaidPiece
from headrace.serve.routes.generate import REASONS, choice, size_of_answer, usage_of
from headrace.serve.routes.said_logprobs import TextLogprobs, chat_logprobs
from headrace.serve.sampling import begins_thinking, given_prompts, holds_strict_tools, of_chat, of_completions, work_of
from headrace.serve.serving import Serving
from headrace.web.bodies import Chat, Completions
from headrace.web.request_fields import note_ignored, offered_tools, stops
from headrace.web.sending import GONE, Events, body_bytes, json_response, read_body, while_there

STARTED = int(time.time())


async def models(request: HttpRequest) -> Response:
    serving: Serving = request.app.state.serving
    data = [_model(serving, name) for name in serving.models()]
    return json_response({"object": "list", "data": data})


async def model(request: HttpRequest) -> Response:
    """One of them, whose name may have slashes."""
    serving: Serving = request.app.state.serving
    return json_response(_model(serving, serving.adapter_of(request.path_params["name"]) or serving.name))


def _model(serving: Serving, name: str) -> dict[str, Any]:
    parent = serving.models()[name]
    return {
        "id": name,
        "object": "model",
        "created": STARTED,
        "owned_by": "headrace",
        "root": parent or name,
        "parent": parent or None,
        "max_model_len": serving.engine.capabilities.context_length,
    }


async def completions(request: HttpRequest) -> Response:
    serving: Serving = request.app.state.serving
    body = await read_body(request, Completions, serving.limits)
    name = body.request_id or f"cmpl-{uuid.uuid4().hex}"
    requests = await off_loop(work_of(body, body_bytes(request)), partial(of_completions, serving, body, name))
    top = body.logprobs is not None
    return await _answer(
        request,
        body,
        Answering(
            serving=serving,
            requests=requests,
            name=name,
            chat=False,
            logprobs=top,
            stops=stops(body),
            prompts=[_text_of(serving, one) for one in given_prompts(body)],
            echo=body.echo,
        ),
    )


def _text_of(serving: Serving, prompt: str | Sequence[int]) -> str:
    return prompt if isinstance(prompt, str) else serving.encoder.decode(prompt)


async def chat(request: HttpRequest) -> Response:
    serving: Serving = request.app.state.serving
    body = await read_body(request, Chat, serving.limits)
    name = body.request_id or f"chatcmpl-{uuid.uuid4().hex}"
    requests = await off_loop(work_of(body, body_bytes(request)), partial(of_chat, serving, body, name))
    if not holds_strict_tools(body, requests[0]):
        note_ignored(request.scope, "tools.function.strict")
    answering = Answering(
        serving=serving,
        requests=requests,
        name=name,
        chat=True,
        logprobs=bool(body.logprobs),
        stops=stops(body),
        format=serving.encoder.call_format if offered_tools(body) else None,
        thinking=begins_thinking(serving.encoder, requests[0].prompt, body),
        tools=offered_tools(body),
    )
    return await _answer(request, body, answering)


async def _answer(request: HttpRequest, body: Completions | Chat, answering: Answering) -> Response:
    answering.serving.room_for(len(answering.requests))
    if body.stream:
        return Events(answering.events(body.stream_options is not None and body.stream_options.include_usage))
    return await while_there(request, answering.whole()) or GONE


@dataclass(kw_only=True)
class Answering:
    """One request for text, and the response made from its completions."""

    serving: Serving
    requests: Sequence[Request]
    name: str
    chat: bool
    logprobs: bool
    stops: Sequence[str]
    format: CallFormat | None = None
    """The format of tool calls, where tools were offered."""
    thinking: bool | None = None
    """The `thinking` of `CompletionText`."""
    tools: Sequence[Tool] = ()
    prompts: Sequence[str] = ("",)
    """The texts of the prompts. Each has as many completions as the others."""
    echo: bool = False
    """Whether a completion begins with its prompt."""

    def __post_init__(self) -> None:
        self._several = len(self.requests) // len(self.prompts)
        """Completions of each prompt."""
        self._echoes = [
            self.prompts[place // self._several] if self.echo else "" for place in range(len(self.requests))
        ]
        echoed = self._echoes if self.echo else [None] * len(self.requests)
        self._logprobs = [TextLogprobs(self.serving.encoder, one) for one in echoed]
        self._answers = [
            CompletionText(self.serving.encoder, self.stops, self.format, self.thinking, self.tools)
            for _ in self.requests
        ]
        self._head = {
            "id": self.name,
            "created": int(time.time()),
            "model": self.requests[0].adapter or self.serving.name,
        }

    async def whole(self) -> Response:
        ended = await to_their_ends(self.serving, self.requests)
        return await off_loop(size_of_answer(ended), partial(self._body_of, ended))

    def _body_of(self, ended: Sequence[Piece]) -> Response:
        choices = []
        for piece in ended:
            check_end(piece)
            said = self._answers[piece.index].push(piece.stream.tokens, last=True)
            own = self._choice(piece)
            own |= {"message": _message(said)} if self.chat else {"text": self._echoes[piece.index] + said.text}
            choices.append(own)
        kind = "chat.completion" if self.chat else "text_completion"
        return json_response({**self._head, "object": kind, "choices": choices, "usage": self._usage(ended)})

    async def events(self, usage: bool) -> AsyncIterator[dict[str, Any]]:
        head = {**self._head, "object": "chat.completion.chunk" if self.chat else "text_completion"}
        first, ended = set(range(len(self.requests))), []
        async with aclosing(follow(self.serving, self.requests)) as pieces:
            async for piece in pieces:
                answer, tokens = self._answers[piece.index], piece.stream.tokens[piece.start : piece.stop]
                said = answer.push(tokens, last=piece.ended)
                begins = piece.index in first
                role = {"role": "assistant"} if begins else {}
                echoed = self._echoes[piece.index] if begins else ""
                own = {"delta": role | _delta(said)} if self.chat else {"text": echoed + said.text}
                first.discard(piece.index)
                yield {**head, "choices": [self._choice(piece) | own]}
                check_end(piece)
                ended += [piece] if piece.ended else []
        if usage:
            yield {**head, "choices": [], "usage": self._usage(ended)}

    def _usage(self, ended: Sequence[Piece]) -> dict[str, Any]:
        # A prompt of several completions counts once, and one that is given twice counts twice.
        prompts = self.requests[:: self._several]
        usage: dict[str, Any] = usage_of(sum(len(one.prompt) for one in prompts), sum(piece.stop for piece in ended))
        if self.thinking is not None:
            thought = sum(self._answers[piece.index].thought_tokens(piece.stream.tokens) or 0 for piece in ended)
            usage["completion_tokens_details"] = {"reasoning_tokens": thought}
        return usage

    def _choice(self, piece: Piece) -> dict[str, Any]:
        """A choice without its text."""
        whole = choice(self.serving, piece)
        own: dict[str, Any] = {name: whole[name] for name in ("index", "token_ids", "weight_versions")}
        own["finish_reason"] = self._reason(piece) if piece.ended else None
        own["logprobs"] = self._logprobs_of(piece) if self.logprobs else None
        return own

    def _logprobs_of(self, piece: Piece) -> dict[str, Any]:
        return chat_logprobs(self.serving.encoder, piece) if self.chat else self._logprobs[piece.index].of(piece)

    def _reason(self, piece: Piece) -> str:
        reason = REASONS[piece.stream.end.stop] if piece.stream.end else "abort"
        return "tool_calls" if reason == "stop" and self._answers[piece.index].called else reason


def _message(said: SaidPiece) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.text}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in said.calls]
    if said.reasoning or said.calls:
        message["content"] = said.text or None
    return message


def _delta(said: SaidPiece) -> dict[str, Any]:
    """A call arrives in one piece: while it is incomplete nobody knows whether it will be one."""
    delta: dict[str, Any] = {"reasoning_content": said.reasoning} if said.reasoning else {}
    if said.text or not (said.reasoning or said.calls):
        delta["content"] = said.text
    return delta | ({"tool_calls": said.calls} if said.calls else {})
