"""One completion as its client reads it: text, and the tool calls in it."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from typing import Any

from headrace.chat.formats import CallFormat, ToolCall
from headrace.chat.reading import CallReader
from headrace.chat.streamed_text import StreamedText
from headrace.models.chat import ChatEncoder

_ID = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""Mistral's templates take ids of nine letters and digits only; the others take any."""


class CompletionText:
    """Takes the tokens of one completion as they arrive. `format`: that of the calls in it, None where no tools were offered."""

    def __init__(self, encoder: ChatEncoder, stops: Sequence[str], format: CallFormat | None) -> None:
        self._text = StreamedText(encoder.decode_with_calls if format else encoder.decode, stops)
        self._reader = CallReader(format) if format else None
        self._calls = 0

    @property
    def stop(self) -> str:
        """The stop string at which the text ends; empty if there is none."""
        return self._text.stop

    @property
    def called(self) -> bool:
        return self._calls > 0

    def push(self, tokens: Sequence[int], last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Adds tokens and returns the text and the tool calls that later tokens cannot change. `last`: no more tokens follow."""
        text = self._text.push(tokens, last)
        if self._reader is None:
            return text, []
        events = self._reader.push(text, last)
        calls = [self._call(event) for event in events if isinstance(event, ToolCall)]
        return "".join(event for event in events if isinstance(event, str)), calls

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
