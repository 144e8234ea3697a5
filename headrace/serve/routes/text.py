"""Routes that take and give text: the completions, chats and responses of OpenAI's API, and Anthropic's messages."""

from __future__ import annotations

import secrets
import string
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.core.chat.messages import Tool, described
from headrace.core.chat.reading import MARKS, CallReader, ThoughtReader, end_of_thought
from headrace.core.chat.token_text import StreamedText, TokenPlaces, text_of_bytes
from headrace.core.chat.tool_calls import CallFormat, ToolCall
from headrace.core.steps import PromptScores
from headrace.core.types import Request
from headrace.models.chat import ChatEncoder, off_loop
from headrace.serve.routes.generate import REASONS, choice, finite, size_of_answer, tops, usage_of
from headrace.serve.sampling import begins_thinking, given_prompts, holds_strict_tools, of_chat, of_completions, work_of
from headrace.serve.serving import Piece, Serving, check_end, follow, to_their_ends
from headrace.web.bodies import Chat, Completions, StreamOptions
from headrace.web.formats import anthropic_messages as anthropic
from headrace.web.formats import responses as openai_responses
from headrace.web.formats.followed_turn import TurnCall, TurnPiece, WholeTurn, said_token
from headrace.web.formats.responses import ResponseWriter
from headrace.web.request_fields import note_ignored, offered_tools, stops
from headrace.web.sending import GONE, Events, body_bytes, json_response, read_body, while_there

# --- One completion as its client reads it: thinking, text, and the tool calls in it.


_ID = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""Mistral's templates take ids of nine letters and digits only; the others take any."""


class SaidPiece(NamedTuple):
    reasoning: str
    text: str
    calls: list[dict[str, Any]]
    """Tool calls in OpenAI's format."""


class CompletionText:
    """Takes the tokens of one completion as they arrive."""

    def __init__(
        self,
        encoder: ChatEncoder,
        stops: Sequence[str],
        format: CallFormat | None = None,
        thinking: bool | None = None,
        tools: Sequence[Tool] = (),
    ) -> None:
        """`format`: that of the calls in it, None where no `tools` were offered. `thinking`: whether its prompt ends within the model's
        thinking; None if there is no thinking to be told apart."""
        marks = (*(format.markers if format else ()), *(MARKS if thinking is not None else ()))
        self._decode, self._spell = encoder.decode_showing(marks), encoder.token_bytes
        self._text = StreamedText(self._decode, stops)
        self._thought = None if thinking is None else ThoughtReader(thinking)
        self._reader = CallReader(format, described(tools)) if format else None
        self._calls = 0

    @property
    def stop(self) -> str:
        """The stop string at which the text ends; empty if there is none."""
        return self._text.stop

    @property
    def called(self) -> bool:
        return self._calls > 0

    def push(self, tokens: Sequence[int], last: bool) -> SaidPiece:
        """Adds tokens and returns what later tokens cannot change. `last`: no more tokens follow."""
        text = self._text.push(tokens, last)
        reasoning, text = self._thought.push(text, last) if self._thought else ("", text)
        if self._reader is None:
            return SaidPiece(reasoning, text, [])
        events = self._reader.push(text, last)
        calls = [self._call(event) for event in events if isinstance(event, ToolCall)]
        return SaidPiece(reasoning, "".join(event for event in events if isinstance(event, str)), calls)

    def thought_tokens(self, tokens: Sequence[int]) -> int | None:
        """The number of these tokens, which are all that were pushed, that are thinking; None if there is no thinking to be told apart."""
        if self._thought is None or not self._thought.ended:
            return None if self._thought is None else len(tokens) * self._thought.began
        return end_of_thought(self._decode, tokens, self._spell)

    def _call(self, call: ToolCall) -> dict[str, Any]:
        """Returns a call in OpenAI's format, with its index among the calls of the completion."""
        made = {
            "index": self._calls,
            "id": "".join(secrets.choice(_ID) for _ in range(_ID_LENGTH)),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        self._calls += 1
        return made


# --- Log-probs in OpenAI's two formats
# Those of chats, and those of completions, which may begin with the prompt's (`echo`).


def chat_logprobs(encoder: ChatEncoder, piece: Piece) -> dict[str, Any]:
    content = []
    for place in range(piece.start, piece.stop):
        token, logprob = piece.stream.tokens[place], piece.stream.logprobs[place]
        others = tops(piece.stream.details[place]) if piece.stream.request.top_logprobs else []
        more = [said_token(entry["token_id"], entry["logprob"], encoder.token_bytes) for entry in others]
        content.append({**said_token(token, logprob, encoder.token_bytes), "top_logprobs": more})
    return {"content": content, "refusal": None}


class _Row(NamedTuple):
    """One token, and the most probable ones at its place."""

    token: int
    logprob: float | None
    """None for the first token of a prompt, which nothing precedes."""
    others: Sequence[tuple[int, float]]


class TextLogprobs:
    """The log-probs of one completion, piece by piece."""

    def __init__(self, encoder: ChatEncoder, echoed: str | None) -> None:
        """`echoed`: the text of the prompt, if the answer begins with it."""
        self._encoder, self._echoed = encoder, echoed
        self._places = encoder.places(len(echoed or ""))

    def of(self, piece: Piece) -> dict[str, Any]:
        request, part = piece.stream.request, slice(piece.start, piece.stop)
        rows, places = list[_Row](), list[int]()
        if self._echoed is not None:
            rows = list(_of_prompt(request.prompt, piece.stream.scores))
            places = self._places_in(self._echoed, request.prompt)
            self._echoed = None
        tops_of = [tops(detail) for detail in piece.stream.details[part]] if request.top_logprobs else []
        others = [[(entry["token_id"], entry["logprob"]) for entry in row] for row in tops_of] or [[]] * (
            piece.stop - piece.start
        )
        new = list(map(_Row, piece.tokens, piece.logprobs, others))
        places += self._places.push(row.token for row in new)
        rows += new
        return {
            "tokens": [self._text(row.token) for row in rows],
            "token_logprobs": [row.logprob for row in rows],
            "top_logprobs": [self._most_probable(row) for row in rows] if request.top_logprobs else None,
            "text_offset": places,
        }

    def _places_in(self, echoed: str, prompt: Sequence[int]) -> list[int]:
        """The places of a prompt's tokens in its text."""
        encoder = self._encoder
        if encoder.decode(prompt) == echoed:
            places = encoder.places().push(prompt)
        else:  # a text of the client, which may write special tokens, and has no start token that the tokenizer has added
            added = prompt[0] == encoder.bos and not echoed.startswith(encoder.written(prompt[:1]))
            places = [0] * added + TokenPlaces(encoder.token_bytes, encoder.written).push(prompt[added:])
        return [min(place, len(echoed)) for place in places]

    def _most_probable(self, row: _Row) -> dict[str, float] | None:
        """Text -> log-prob, the token itself among them. Of tokens that are written alike the most probable is kept."""
        if row.logprob is None:
            return None
        found: dict[str, float] = {}
        for (
            token,
            logprob,
        ) in row.others:  # the most probable first; computed apart, its value may differ in the last bit
            found.setdefault(self._text(token), row.logprob if token == row.token else logprob)
        found.setdefault(self._text(row.token), row.logprob)
        return found

    def _text(self, token: int) -> str:
        return text_of_bytes(self._encoder.token_bytes(token), "bytes:")


def _of_prompt(prompt: Sequence[int], scores: PromptScores | None) -> Iterable[_Row]:
    """The tokens of a prompt. `scores`: None if it ended before it was scored."""
    logprobs = [finite(logprob) for logprob in scores.logprobs] if scores else []
    top = scores.top if scores and scores.top else None
    ids = np.frombuffer(top.tokens, np.int32).reshape(-1, top.k).tolist() if top else []
    values = np.frombuffer(top.logprobs, np.float32).reshape(-1, top.k).tolist() if top else []
    for place, token in enumerate(prompt):
        known = 0 < place <= len(logprobs)
        others = list(zip(ids[place - 1], map(finite, values[place - 1]), strict=True)) if known and top else []
        yield _Row(token, logprobs[place - 1] if known else None, others)


# --- `/v1/models`, `/v1/completions`, `/v1/chat/completions`
# Text, as OpenAI's clients speak it.
#
# Beside OpenAI's own fields a choice has `token_ids` and `weight_versions`; requests may have `top_k`, `min_p`, `stop_token_ids`
# and `ignore_eos`.


STARTED = int(time.time())


async def models(request: HttpRequest) -> Response:
    serving: Serving = request.app.state.serving
    data = [_model(serving, name) for name in serving.models()]
    return json_response({"object": "list", "data": data})


async def model(request: HttpRequest) -> Response:
    """Describes one of the models, whose name may have slashes."""
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
    top, encoder = body.logprobs is not None, _encoder_for(serving, body)
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
            encoder=encoder,
            prompts=[prompt if isinstance(prompt, str) else encoder.decode(prompt) for prompt in given_prompts(body)],
            echo=body.echo,
        ),
    )


def _encoder_for(serving: Serving, body: Completions | Chat) -> ChatEncoder:
    """Returns what decodes an answer: with special tokens where its request asks for them (vLLM's `skip_special_tokens = false`)."""
    return serving.encoder.with_special_tokens("show") if body.skip_special_tokens is False else serving.encoder


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
        encoder=_encoder_for(serving, body),
        format=serving.encoder.call_format if offered_tools(body) else None,
        thinking=begins_thinking(serving.encoder, requests[0].prompt, body),
        tools=offered_tools(body),
    )
    return await _answer(request, body, answering)


async def _answer(request: HttpRequest, body: Completions | Chat, answering: Answering) -> Response:
    answering.serving.room_for(len(answering.requests))
    if not body.stream:
        return await while_there(request, answering.whole()) or GONE
    options = body.stream_options or StreamOptions()
    if options.continuous_usage_stats:
        note_ignored(request.scope, "stream_options.continuous_usage_stats")
    return Events(answering.events(options.include_usage))


@dataclass(kw_only=True)
class Answering:
    """One request for text, and the response made from its completions."""

    serving: Serving
    requests: Sequence[Request]
    name: str
    chat: bool
    logprobs: bool
    stops: Sequence[str]
    encoder: ChatEncoder
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
        self._logprobs = [TextLogprobs(self.encoder, echo) for echo in echoed]
        self._answers = [
            CompletionText(self.encoder, self.stops, self.format, self.thinking, self.tools) for _ in self.requests
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
            text_piece = self._answers[piece.index].push(piece.stream.tokens.tolist(), last=True)
            own = self._choice(piece)
            own |= (
                {"message": _message(text_piece)}
                if self.chat
                else {"text": self._echoes[piece.index] + text_piece.text}
            )
            choices.append(own)
        kind = "chat.completion" if self.chat else "text_completion"
        return json_response({**self._head, "object": kind, "choices": choices, "usage": self._usage(ended)})

    async def events(self, usage: bool) -> AsyncIterator[dict[str, Any]]:
        head = {**self._head, "object": "chat.completion.chunk" if self.chat else "text_completion"}
        first, ended = set(range(len(self.requests))), []
        async with aclosing(follow(self.serving, self.requests)) as pieces:
            async for piece in pieces:
                answer, tokens = self._answers[piece.index], piece.tokens
                text_piece = answer.push(tokens, last=piece.ended)
                begins = piece.index in first
                role = {"role": "assistant"} if begins else {}
                echoed = self._echoes[piece.index] if begins else ""
                own = {"delta": role | _delta(text_piece)} if self.chat else {"text": echoed + text_piece.text}
                first.discard(piece.index)
                yield {**head, "choices": [self._choice(piece) | own]}
                check_end(piece)
                ended += [piece] if piece.ended else []
        if usage:
            yield {**head, "choices": [], "usage": self._usage(ended)}

    def _usage(self, ended: Sequence[Piece]) -> dict[str, Any]:
        # A prompt of several completions counts once, and one that is given twice counts twice.
        prompts = self.requests[:: self._several]
        usage: dict[str, Any] = usage_of(
            sum(len(prompt.prompt) for prompt in prompts), sum(piece.stop for piece in ended)
        )
        if self.thinking is not None:
            thought = sum(
                self._answers[piece.index].thought_tokens(piece.stream.tokens.tolist()) or 0 for piece in ended
            )
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
        return chat_logprobs(self.encoder, piece) if self.chat else self._logprobs[piece.index].of(piece)

    def _reason(self, piece: Piece) -> str:
        reason = REASONS[piece.stream.end.stop] if piece.stream.end else "abort"
        return "tool_calls" if reason == "stop" and self._answers[piece.index].called else reason


def _message(piece: SaidPiece) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": piece.text}
    if piece.reasoning:
        message["reasoning_content"] = piece.reasoning
    if piece.calls:
        message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in piece.calls]
    if piece.reasoning or piece.calls:
        message["content"] = piece.text or None
    return message


def _delta(piece: SaidPiece) -> dict[str, Any]:
    """A call arrives in one piece: while it is incomplete nobody knows whether it will be one."""
    delta: dict[str, Any] = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
    if piece.text or not (piece.reasoning or piece.calls):
        delta["content"] = piece.text
    return delta | ({"tool_calls": piece.calls} if piece.calls else {})


# --- `/v1/responses` and `/v1/messages`
# `/v1/responses` and `/v1/messages`, which the gateway of agents answers with the same code (`web/formats/`). A request becomes one for a
# chat, and its completion a turn. `/v1/messages/count_tokens` counts the prompt of such a request.


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
                tokens, logprobs = piece.tokens, piece.logprobs
                reasoning, text, calls = self._read.push(tokens, last=piece.ended)
                self._reasoning += reasoning
                self._text += text
                self._calls += [
                    TurnCall(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls
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
            thought=self._read.thought_tokens(stream.tokens.tolist()) or 0,
            tokens=stream.tokens.tolist(),
            logprobs=stream.logprobs.tolist(),
        )
