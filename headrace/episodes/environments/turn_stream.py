"""A turn that is read while it is sampled: its tokens come from the engine, and its text leaves in pieces that later tokens cannot change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.core.chat.reading import CallReader
from headrace.core.chat.token_text import StreamedText
from headrace.core.types import Completion
from headrace.web.formats.followed_turn import TurnPiece


class TurnStream:
    def __init__(self) -> None:
        self.changed = asyncio.Event()
        """Set when there is a token that no piece has."""
        self.prompt_tokens = 0
        """Tokens before the turn."""
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._given = 0
        """Number of tokens in earlier pieces."""
        self._text: StreamedText | None = None
        self._calls: CallReader | None = None

    def begin(self, text: StreamedText, calls: CallReader | None, prompt_tokens: int) -> None:
        """Called before the turn is sampled. `calls`: reads the tool calls in its text; None if the model is shown no tools."""
        self._text, self._calls, self.prompt_tokens = text, calls, prompt_tokens

    def heard(self, token: int, logprob: float) -> None:
        """Takes the next token. It is only kept, because it is called within the engine's pass."""
        self._tokens.append(token)
        self._logprobs.append(logprob)
        self.changed.set()

    def new(self) -> TurnPiece:
        """Returns what was heard since the last piece."""
        return self._piece(self._tokens, self._logprobs, last=False)

    def rest(self, done: Completion) -> TurnPiece:
        """Returns the last piece. `done`: the whole turn, of which the engine may have reported nothing so far."""
        assert list(done.tokens[: len(self._tokens)]) == self._tokens, "a stream has other tokens than its turn"
        return self._piece(done.tokens, done.logprobs, last=True)

    def _piece(self, tokens: Sequence[int], logprobs: Sequence[float], last: bool) -> TurnPiece:
        assert self._text is not None, "a turn is sampled before its stream has begun"
        new, of_new = tokens[self._given :], logprobs[self._given :]
        self._given = len(tokens)
        text = self._text.push(new, last)
        if self._calls is not None:
            text = "".join(event for event in self._calls.push(text, last) if isinstance(event, str))
        return TurnPiece(text, new, of_new)
