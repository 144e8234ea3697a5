"""`/v1/responses` of one rollout, whole or as a stream of events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.chat.messages import Message
from headrace.environments.gateway.chat_answers import said_tokens
from headrace.environments.gateway.chat_routes import schema
from headrace.environments.gateway.chat_tree import TreeReply, reply_as_sent
from headrace.environments.gateway.gateway_rollout import GatewayRollout
from headrace.environments.gateway.responses_bodies import (
    Item,
    Responses,
    asked_of_template,
    call_items,
    logprobs_of,
    messages_of_input,
    offered_functions,
    refuse_unserved_responses,
    settings_of,
    text_item,
    text_part,
    usage_of_response,
)
from headrace.environments.gateway.turn_request import (
    MODEL,
    GatewayRules,
    TurnRequest,
    check_sampling,
    is_cut,
    most_tokens,
    note_strict,
    speaker_of,
)
from headrace.web.errors import Refused
from headrace.web.sending import GONE, Events, json_response, read_body


async def responses(request: HttpRequest, rollout: GatewayRollout, rules: GatewayRules) -> Response:
    body = await read_body(request, Responses, rules.limits)
    refuse_unserved_responses(body)
    speaker = speaker_of(request, rollout, rules, body.model)
    check_sampling(rules, (), {"temperature": body.temperature, "top_p": body.top_p})
    most = most_tokens("max_output_tokens", body.max_output_tokens)
    tools = offered_functions(body)
    note_strict(rules, tools)
    shown = [schema(one) for one in tools]
    history = [*_before(rollout, body.previous_response_id), *messages_of_input(body.input)]
    if not history:
        raise Refused(400, "input has no messages; send one at least")
    system = [Message(role="system", content=body.instructions)] if body.instructions else []
    asked = asked_of_template(body, rules)
    given = [*system, *history]
    turn = TurnRequest(speaker, lambda stream: speaker.chats.ask(given, shown, most, stream, asked=asked))
    made = ResponseWriter(body, rollout, rules, history)
    if body.stream:
        return Events(made.events(turn), named=True)
    answer = await turn.whole(request)
    return GONE if answer is None else json_response(made.whole(answer))


def _before(rollout: GatewayRollout, id: str | None) -> Sequence[Message]:
    """The messages up to an earlier response. Raises Refused for one that is not stored."""
    if id is None:
        return ()
    if id not in rollout.responses:
        said = f"previous_response_id = {id} names no stored response of this rollout; send all messages as input"
        raise Refused(400, said, "previous_response_not_found")
    return rollout.responses[id]


class ResponseWriter:
    """Writes one response, and stores its messages."""

    def __init__(
        self, body: Responses, rollout: GatewayRollout, rules: GatewayRules, history: Sequence[Message]
    ) -> None:
        """`history`: the messages before the reply, without the instructions."""
        self._body, self._rollout, self._rules, self._history = body, rollout, rules, history
        self._id, self._text_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._created, self._number = int(time.time()), 0

    def whole(self, answer: TreeReply) -> Item:
        text = answer.reply.text
        calls = call_items(answer)
        said = [text_item(self._text_id, text, logprobs_of(self._body, answer, self._rules.encoder.token_bytes))]
        return self._over([*(said if text or not calls else []), *calls], answer)

    async def events(self, turn: TurnRequest) -> AsyncIterator[Item]:
        """Yields the events of a stream. Text comes as it is sampled; function calls come whole, at the end."""
        text, logprobs, shown = "", list[Item](), False
        async with aclosing(turn.pieces()) as pieces:
            async for piece in pieces:
                for event in () if self._number else self._begin():
                    yield event
                new = (
                    said_tokens(piece.tokens, piece.logprobs, self._rules.encoder.token_bytes)
                    if self._body.logprobs
                    else []
                )
                logprobs += new
                if piece.text and not shown:
                    shown = True
                    for event in self._text_begins():
                        yield event
                if piece.text:
                    text += piece.text
                    yield self._of_text("response.output_text.delta", delta=piece.text, logprobs=new)
        for event in () if self._number else self._begin():
            yield event
        for event in self._rest(turn.answer, text, logprobs, shown):
            yield event

    def _begin(self) -> Iterator[Item]:
        begun = self._response("in_progress", [])
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def _text_begins(self) -> Iterator[Item]:
        item = text_item(self._text_id, "", (), "in_progress")
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._of_text("response.content_part.added", part=text_part("", ()))

    def _rest(self, answer: TreeReply, text: str, logprobs: Sequence[Item], shown: bool) -> Iterator[Item]:
        """Yields what follows the text. `shown`: whether its item has begun."""
        calls, output = call_items(answer), list[Item]()
        if not shown and not calls:
            yield from self._text_begins()
        if shown or not calls:
            output.append(text_item(self._text_id, text, logprobs))
            yield self._of_text("response.output_text.done", text=text, logprobs=logprobs)
            yield self._of_text("response.content_part.done", part=text_part(text, logprobs))
            yield self._event("response.output_item.done", output_index=0, item=output[0])
        for place, call in enumerate(calls, len(output)):
            at = {"output_index": place, "item_id": call["id"]}
            begun = call | {"arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=place, item=begun)
            yield self._event("response.function_call_arguments.delta", delta=call["arguments"], **at)
            yield self._event("response.function_call_arguments.done", arguments=call["arguments"], **at)
            yield self._event("response.output_item.done", output_index=place, item=call)
        over = self._over([*output, *calls], answer)
        yield self._event(f"response.{over['status']}", response=over)

    def _event(self, type: str, **fields: Any) -> Item:
        event = {"type": type, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _of_text(self, type: str, **fields: Any) -> Item:
        return self._event(type, item_id=self._text_id, output_index=0, content_index=0, **fields)

    def _over(self, output: list[Item], answer: TreeReply) -> Item:
        """The whole response. Its messages are stored if its client may continue it."""
        if self._body.store is not False and answer.completion is not None:
            self._rollout.responses[self._id] = [*self._history, msgspec.convert(reply_as_sent(answer.reply), Message)]
        cut = is_cut(answer)
        whole = self._response("incomplete" if cut else "completed", output)
        details = {"reason": "max_output_tokens"} if cut else None
        return whole | {"incomplete_details": details, "usage": usage_of_response(answer)}

    def _response(self, status: str, output: list[Item]) -> Item:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._body.model or MODEL,
            "output": output,
            "usage": None,
            **settings_of(self._body, self._rules.sampling),
        }
