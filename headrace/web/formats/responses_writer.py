"""A turn as a response of OpenAI's, whole or as a stream of events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from headrace.chat.messages import Message
from headrace.web.formats.followed_turn import FollowedTurn, TokenBytes, WholeTurn, said_tokens
from headrace.web.formats.responses_bodies import (
    Item,
    Responses,
    call_items,
    message_of_turn,
    settings_of,
    text_item,
    text_part,
    usage_of_response,
)
from headrace.web.formats.stored_responses import StoredResponses


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
        self._created, self._number = int(time.time()), 0

    def whole(self, turn: WholeTurn) -> Item:
        text, calls = turn.text, call_items(turn)
        logprobs = said_tokens(turn.tokens, turn.logprobs, self._bytes) if self._body.logprobs else []
        said = [text_item(self._text_id, text, logprobs)]
        return self._over([*(said if text or not calls else []), *calls], turn)

    async def events(self, turn: FollowedTurn) -> AsyncIterator[Item]:
        """Yields the events of a stream. Text comes as it is sampled; function calls come whole, at the end."""
        text, logprobs, shown = "", list[Item](), False
        async with aclosing(turn.pieces()) as pieces:
            async for piece in pieces:
                for event in () if self._number else self._begin():
                    yield event
                new = said_tokens(piece.tokens, piece.logprobs, self._bytes) if self._body.logprobs else []
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
        for event in self._rest(turn.turn, text, logprobs, shown):
            yield event

    def _begin(self) -> Iterator[Item]:
        begun = self._response("in_progress", [])
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def _text_begins(self) -> Iterator[Item]:
        item = text_item(self._text_id, "", (), "in_progress")
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._of_text("response.content_part.added", part=text_part("", ()))

    def _rest(self, turn: WholeTurn, text: str, logprobs: Sequence[Item], shown: bool) -> Iterator[Item]:
        """Yields what follows the text. `shown`: whether its item has begun."""
        calls, output = call_items(turn), list[Item]()
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
        over = self._over([*output, *calls], turn)
        yield self._event(f"response.{over['status']}", response=over)

    def _event(self, type: str, **fields: Any) -> Item:
        event = {"type": type, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _of_text(self, type: str, **fields: Any) -> Item:
        return self._event(type, item_id=self._text_id, output_index=0, content_index=0, **fields)

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
