"""A reply as OpenAI's clients read it, whole or as a stream (https://platform.openai.com/docs/api-reference/chat).

A turn is trained as a whole, so it is answered when it has been sampled as a whole: a stream has its text in one piece.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.environments.gateway.chat_tree import TreeReply, reply_as_sent

Written = Callable[[Sequence[int]], str]
"""Tokens to text, special tokens included."""


@dataclass(frozen=True, kw_only=True)
class ChatAnswer:
    answer: TreeReply
    model: str
    """The name that the client asked for."""
    logprobs: bool
    written: Written

    def whole(self) -> dict[str, Any]:
        message = reply_as_sent(self.answer.reply)
        if "tool_calls" in message:
            message["content"] = message["content"] or None
        choice = {
            "index": 0,
            "message": message | {"refusal": None},
            "finish_reason": self.reason,
            "logprobs": self._logprobs(),
        }
        return self._head("chat.completion") | {"choices": [choice], "usage": self.usage}

    async def events(self, usage: bool) -> AsyncIterator[dict[str, Any]]:
        """Yields the chunks of a stream. `usage`: whether the last one has the counts of tokens."""
        head, message = self._head("chat.completion.chunk"), reply_as_sent(self.answer.reply)
        calls = [{"index": place, **call} for place, call in enumerate(message.get("tool_calls", ()))]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": message["content"]}]
        deltas += [{"tool_calls": calls}] if calls else []
        for place, delta in enumerate(deltas):
            logprobs = self._logprobs() if not place else None
            yield head | {"choices": [_chunk(delta, None, logprobs)]}
        yield head | {"choices": [_chunk({}, self.reason, None)]}
        if usage:
            yield head | {"choices": [], "usage": self.usage}

    @property
    def reason(self) -> str:
        reply = self.answer.reply
        if reply.over or reply.stop == "length":
            return "length"
        return "tool_calls" if any(not one.problem for one in reply.calls) else "stop"

    @property
    def usage(self) -> dict[str, int]:
        prompt, sampled = self.answer.prompt_tokens, self.answer.reply.tokens
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
        }

    def _logprobs(self) -> dict[str, Any] | None:
        done = self.answer.completion
        if not self.logprobs or done is None:
            return None
        content = []
        for token, logprob in zip(done.tokens, done.logprobs, strict=True):
            text = self.written([token])
            content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": content, "refusal": None}


def _chunk(delta: dict[str, Any], reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
