"""One completion as its client reads it: thinking, text, and the tool calls in it."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.core.chat.messages import Tool, described
from headrace.core.chat.reading import MARKS, CallReader, ThoughtReader, end_of_thought
from headrace.core.chat.token_text import StreamedText
from headrace.core.chat.tool_calls import CallFormat, ToolCall
from headrace.models.chat import ChatEncoder

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
