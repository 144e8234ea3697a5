"""`/v1/models`, `/v1/completions`, `/v1/chat/completions`: text, as OpenAI's clients speak it.

Beside OpenAI's own fields a choice has `token_ids` and `weight_versions`; requests may have `top_k`, `min_p`, `stop_token_ids`
and `ignore_eos`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.chat.formats import CallFormat
from headrace.models.chat import off_loop
from headrace.serve.following import Piece, follow, to_their_ends
from headrace.serve.routes.completion_text import CompletionText
from headrace.serve.routes.generate import REASONS, choice, size_of_answer, tops, usage_of
from headrace.serve.sampling import of_chat, of_completions
from headrace.serve.serving import Serving
from headrace.types import Request
from headrace.web.bodies import Chat, Completions
from headrace.web.sending import GONE, Events, json_response, read_body, while_there
from headrace.web.unserved import offered_tools, stops

STARTED = int(time.time())


def size_of(body: Completions | Chat) -> int:
    """Returns the bytes of a body."""
    return len(msgspec.json.encode(body))


async def models(request: HttpRequest) -> Response:
    serving: Serving = request.app.state.serving
    longest = serving.engine.capabilities.context_length
    data = [
        {
            "id": name,
            "object": "model",
            "created": STARTED,
            "owned_by": "headrace",
            "root": parent or name,
            "parent": parent or None,
            "max_model_len": longest,
        }
        for name, parent in serving.models().items()
    ]
    return json_response({"object": "list", "data": data})


async def completions(request: HttpRequest) -> Response:
    serving: Serving = request.app.state.serving
    body = await read_body(request, Completions, serving.limits)
    name = body.request_id or f"cmpl-{uuid.uuid4().hex}"
    requests = await off_loop(size_of(body), partial(of_completions, serving, body, name))
    top = body.logprobs is not None
    return await _answer(
        request,
        body,
        Answering(serving=serving, requests=requests, name=name, chat=False, logprobs=top, stops=stops(body)),
    )


async def chat(request: HttpRequest) -> Response:
    serving: Serving = request.app.state.serving
    body = await read_body(request, Chat, serving.limits)
    name = body.request_id or f"chatcmpl-{uuid.uuid4().hex}"
    requests = await off_loop(size_of(body), partial(of_chat, serving, body, name))
    answering = Answering(
        serving=serving,
        requests=requests,
        name=name,
        chat=True,
        logprobs=bool(body.logprobs),
        stops=stops(body),
        format=serving.encoder.call_format if offered_tools(body) else None,
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

    def __post_init__(self) -> None:
        self._answers = [CompletionText(self.serving.encoder, self.stops, self.format) for _ in self.requests]
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
            text, calls = self._answers[piece.index].push(piece.stream.tokens, last=True)
            own = self._choice(piece, 0)
            own |= {"message": _message(text, calls)} if self.chat else {"text": text}
            choices.append(own)
        kind = "chat.completion" if self.chat else "text_completion"
        return json_response({**self._head, "object": kind, "choices": choices, "usage": self._usage(ended)})

    async def events(self, usage: bool) -> AsyncIterator[dict[str, Any]]:
        head = {**self._head, "object": "chat.completion.chunk" if self.chat else "text_completion"}
        first, ended = set(range(len(self.requests))), []
        async with aclosing(follow(self.serving, self.requests)) as pieces:
            async for piece in pieces:
                answer, tokens = self._answers[piece.index], piece.stream.tokens[piece.start : piece.stop]
                before = answer.characters
                text, calls = answer.push(tokens, last=piece.ended)
                role = {"role": "assistant"} if piece.index in first else {}
                own = {"delta": role | _delta(text, calls)} if self.chat else {"text": text}
                first.discard(piece.index)
                yield {**head, "choices": [self._choice(piece, before) | own]}
                ended += [piece] if piece.ended else []
        if usage:
            yield {**head, "choices": [], "usage": self._usage(ended)}

    def _usage(self, ended: Sequence[Piece]) -> dict[str, int]:
        prompts = {request.prompt: 0 for request in self.requests}  # a prompt of several completions counts once
        return usage_of(sum(map(len, prompts)), sum(piece.stop for piece in ended))

    def _choice(self, piece: Piece, offset: int) -> dict[str, Any]:
        """A choice without its text. `offset`: characters of the completion before this piece."""
        whole = choice(self.serving, piece)
        own: dict[str, Any] = {name: whole[name] for name in ("index", "token_ids", "weight_versions")}
        own["finish_reason"] = self._reason(piece) if piece.ended else None
        own["logprobs"] = (
            (self._chat_logprobs if self.chat else self._logprobs(offset))(piece) if self.logprobs else None
        )
        return own

    def _reason(self, piece: Piece) -> str:
        reason = REASONS[piece.stream.end.stop] if piece.stream.end else "abort"
        return "tool_calls" if reason == "stop" and self._answers[piece.index].called else reason

    def _chat_logprobs(self, piece: Piece) -> dict[str, Any]:
        content = []
        for place in range(piece.start, piece.stop):
            token, logprob = piece.stream.tokens[place], piece.stream.logprobs[place]
            others = tops(piece.stream.details[place]) if piece.stream.request.top_logprobs else []
            content.append(
                {
                    **self._said(token, logprob),
                    "top_logprobs": [self._said(one["token_id"], one["logprob"]) for one in others],
                }
            )
        return {"content": content, "refusal": None}

    def _said(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.serving.encoder.written([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _logprobs(self, offset: int) -> Callable[[Piece], dict[str, Any]]:
        def event(piece: Piece) -> dict[str, Any]:
            part, written = slice(piece.start, piece.stop), self.serving.encoder.written
            texts = [written([token]) for token in piece.stream.tokens[part]]
            places = list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else []
            top = piece.stream.request.top_logprobs
            rows = [
                {written([one["token_id"]]): one["logprob"] for one in tops(details)}
                for details in (piece.stream.details[part] if top else [])
            ]
            logprobs = piece.stream.logprobs[part]
            return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": rows or None, "text_offset": places}

        return event


def _message(text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    if not calls:
        return {"role": "assistant", "content": text}
    made = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
    return {"role": "assistant", "content": text or None, "tool_calls": made}


def _delta(text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """A call arrives in one piece: while it is incomplete nobody knows whether it will be one."""
    if not calls:
        return {"content": text}
    return ({"content": text} if text else {}) | {"tool_calls": calls}
