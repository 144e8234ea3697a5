"""A turn of the model as formats read it, whole or while it is sampled."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from headrace.core.chat.token_text import text_of_bytes

TokenBytes = Callable[[int], bytes]
"""The bytes that a token stands for."""


class TurnPiece(NamedTuple):
    text: str
    """Text outside the tool calls. All pieces together are the text of the turn."""
    tokens: Sequence[int]
    logprobs: Sequence[float]
    reasoning: str = ""
    """The model's thinking. Its pieces come before those of the text."""


class TurnCall(NamedTuple):
    """A tool call."""

    id: str
    name: str
    arguments: str
    """A JSON object as text."""


@dataclass(frozen=True, kw_only=True)
class WholeTurn:
    text: str
    """The text outside the tool calls."""
    reasoning: str = ""
    """The model's thinking, where it was told apart."""
    calls: Sequence[TurnCall] = ()
    cut: bool
    """Whether it ended at a limit, and not where the model or a stop string ended it."""
    stop: str = ""
    """The stop string that ended it, where that is known."""
    prompt_tokens: int
    count: int
    """Tokens that were sampled."""
    thought: int = 0
    """Tokens that are thinking, where it was told apart."""
    tokens: Sequence[int]
    logprobs: Sequence[float]


class FollowedTurn(Protocol):
    def pieces(self) -> AsyncGenerator[TurnPiece, None]:
        """Yields the turn while it is sampled. Raises Refused, before the first piece if nothing was sampled."""
        ...

    @property
    def turn(self) -> WholeTurn:
        """The turn, once there are no more pieces."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the turn, once there is a piece."""
        ...


def said_token(token: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    """A token with its log-prob, in the format of chats and responses."""
    text = token_bytes(token)
    return {"token": text_of_bytes(text), "logprob": logprob, "bytes": list(text)}


def said_tokens(tokens: Sequence[int], logprobs: Sequence[float], token_bytes: TokenBytes) -> list[dict[str, Any]]:
    """Returns each token with its log-prob, and without others beside it."""
    pairs = zip(tokens, logprobs, strict=True)
    return [{**said_token(token, logprob, token_bytes), "top_logprobs": []} for token, logprob in pairs]
