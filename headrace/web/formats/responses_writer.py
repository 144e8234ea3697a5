"""A turn as a response of OpenAI's, whole or as a stream of events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from headrace.core.chat.messages import Message
from headrace.web.formats.followed_turn import FollowedTurn, TokenBytes, WholeTurn, said_tokens
from headrace.web.formats.responses_bodies import (
    Item,
    Responses,
    call_items,
    message_of_turn,
    settings_of,
    text_item,
    text_part,
    thought_item,
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
