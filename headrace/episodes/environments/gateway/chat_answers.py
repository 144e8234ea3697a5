"""A reply as OpenAI's clients of chats read it, whole or as a stream (https://platform.openai.com/docs/api-reference/chat)."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from headrace.episodes.environments.gateway.chat_tree import TreeReply, reply_as_sent
from headrace.episodes.environments.gateway.turn_request import TurnRequest, is_cut
from headrace.web.formats.followed_turn import TokenBytes, said_tokens


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
    return "tool_calls" if any(not one.problem for one in answer.reply.calls) else "stop"


def _chunk(delta: dict[str, Any], reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
