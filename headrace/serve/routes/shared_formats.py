"""`/v1/responses` and `/v1/messages`, which the gateway of agents answers with the same code (`web/formats/`). A request becomes one for a
chat, and its completion a turn. `/v1/messages/count_tokens` counts the prompt of such a request."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.core.types import Request
from headrace.models.chat import off_loop
from headrace.serve.following import Piece, check_end, follow
from headrace.serve.routes.completion_text import CompletionText
from headrace.serve.sampling import begins_thinking, holds_strict_tools, of_chat, work_of
from headrace.serve.serving import Serving
from headrace.web.bodies import Chat
from headrace.web.formats import anthropic_messages as anthropic
from headrace.web.formats import responses as openai_responses
from headrace.web.formats.followed_turn import TurnCall, TurnPiece, WholeTurn
from headrace.web.formats.responses import ResponseWriter
from headrace.web.request_fields import note_ignored, stops
from headrace.web.sending import GONE, Events, body_bytes, json_response, read_body, while_there


async def responses(request: HttpRequest) -> Response:
    serving: Serving = request.app.state.serving
    body = await read_body(request, openai_responses.Responses, serving.limits)
    openai_responses.refuse_unserved_responses(body)
    history = openai_responses.history_of(body, request.app.state.responses)
    asked = openai_responses.asked_of_template(body, serving.encoder.variables)
    chat = Chat(
        model=body.model,
        messages=[*openai_responses.system_of(body), *history],
        tools=openai_responses.offered_functions(body) or None,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=openai_responses.format_of_response(body),
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        chat_template_kwargs=dict(asked.arguments) or None,
    )
    turn = await _begun(request, serving, chat, f"resp-{uuid.uuid4().hex}")
    made = ResponseWriter(
        body,
        model=turn.model,
        sampling={"temperature": turn.request.sampling.temperature, "top_p": turn.request.sampling.top_p},
        history=history,
        stored=request.app.state.responses,
        token_bytes=serving.encoder.token_bytes,
    )
    if body.stream:
        return Events(made.events(turn), named=True)
    whole = await while_there(request, turn.whole())
    return GONE if whole is None else json_response(made.whole(whole))


async def messages(request: HttpRequest) -> Response:
    serving: Serving = request.app.state.serving
    body = await read_body(request, anthropic.Messages, serving.limits)
    anthropic.refuse_unserved_messages(body)
    chat = Chat(
        model=body.model,
        messages=anthropic.messages_of(body),
        tools=anthropic.tools_of(body) or None,
        tool_choice=anthropic.choice_of(body),
        response_format=anthropic.format_of(body),
        parallel_tool_calls=anthropic.parallel_of(body),
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        continue_final_message=body.messages[-1].role == "assistant",
    )
    for name in anthropic.unshown(body):
        note_ignored(request.scope, name)
    turn = await _begun(request, serving, chat, f"msg-{uuid.uuid4().hex}")
    if body.stream:
        return Events(anthropic.events_of(turn, turn.model), named=True)
    whole = await while_there(request, turn.whole())
    return GONE if whole is None else json_response(anthropic.message_of(whole, turn.model))


async def count_tokens(request: HttpRequest) -> Response:
    serving: Serving = request.app.state.serving
    body = await read_body(request, anthropic.CountTokens, serving.limits)
    anthropic.refuse_unserved_messages(body)
    chat = Chat(
        model=body.model,
        messages=anthropic.messages_of(body),
        tools=anthropic.tools_of(body) or None,
        continue_final_message=body.messages[-1].role == "assistant",
    )
    (counted,) = await off_loop(work_of(chat, body_bytes(request)), partial(of_chat, serving, chat, "counted"))
    return json_response({"input_tokens": len(counted.prompt)})


async def _begun(request: HttpRequest, serving: Serving, chat: Chat, name: str) -> ServedTurn:
    """Returns the turn that is to be sampled. Raises Refused."""
    (asked,) = await off_loop(work_of(chat, body_bytes(request)), partial(of_chat, serving, chat, name))
    serving.room_for(1)
    if not holds_strict_tools(chat, asked):
        note_ignored(request.scope, "tools.function.strict")
    encoder = serving.encoder
    format = encoder.call_format if chat.tools else None
    thinking = begins_thinking(encoder, asked.prompt, chat)
    return ServedTurn(serving, asked, CompletionText(encoder, stops(chat), format, thinking, chat.tools or ()))


class ServedTurn:
    """Protocol `FollowedTurn`: one completion of the engine."""

    def __init__(self, serving: Serving, request: Request, read: CompletionText) -> None:
        self._serving, self.request, self._read = serving, request, read
        self._reasoning = self._text = ""
        self._calls: list[TurnCall] = []
        self._end: Piece | None = None

    @property
    def model(self) -> str:
        return self.request.adapter or self._serving.name

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt)

    async def pieces(self) -> AsyncGenerator[TurnPiece, None]:
        async with aclosing(follow(self._serving, [self.request])) as pieces:
            async for piece in pieces:
                part = slice(piece.start, piece.stop)
                tokens, logprobs = piece.stream.tokens[part], piece.stream.logprobs[part]
                reasoning, text, calls = self._read.push(tokens, last=piece.ended)
                self._reasoning += reasoning
                self._text += text
                self._calls += [
                    TurnCall(one["id"], one["function"]["name"], one["function"]["arguments"]) for one in calls
                ]
                yield TurnPiece(text, tokens, logprobs, reasoning)
                self._end = piece if piece.ended else None
                check_end(piece)

    async def whole(self) -> WholeTurn:
        async with aclosing(self.pieces()) as pieces:
            async for _ in pieces:
                pass
        return self.turn

    @property
    def turn(self) -> WholeTurn:
        assert self._end is not None, "the turn has not ended"
        stream = self._end.stream
        return WholeTurn(
            text=self._text,
            reasoning=self._reasoning,
            calls=self._calls,
            cut=stream.end is None or stream.end.stop != "stop",
            stop=self._read.stop,
            prompt_tokens=self.prompt_tokens,
            count=len(stream.tokens),
            thought=self._read.thought_tokens(stream.tokens) or 0,
            tokens=stream.tokens,
            logprobs=stream.logprobs,
        )
