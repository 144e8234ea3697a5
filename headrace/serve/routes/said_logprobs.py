"""Log-probs in OpenAI's two formats: those of chats, and those of completions, which may begin with the prompt's (`echo`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.core.chat.token_text import offsets_of, text_of_bytes
from headrace.core.steps import PromptScores
from headrace.models.chat import ChatEncoder
from headrace.serve.following import Piece
from headrace.serve.routes.generate import finite, tops
from headrace.web.formats.followed_turn import said_token


def chat_logprobs(encoder: ChatEncoder, piece: Piece) -> dict[str, Any]:
    content = []
    for place in range(piece.start, piece.stop):
        token, logprob = piece.stream.tokens[place], piece.stream.logprobs[place]
        others = tops(piece.stream.details[place]) if piece.stream.request.top_logprobs else []
        more = [said_token(one["token_id"], one["logprob"], encoder.token_bytes) for one in others]
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
        self._characters = 0
        """Characters before the next token."""

    def of(self, piece: Piece) -> dict[str, Any]:
        request, part = piece.stream.request, slice(piece.start, piece.stop)
        rows, places = list[_Row](), list[int]()
        if self._echoed is not None:
            rows = list(_of_prompt(request.prompt, piece.stream.scores))
            places = [min(place, len(self._echoed)) for place in self._places(rows)]
            self._characters, self._echoed = len(self._echoed), None
        tops_of = [tops(one) for one in piece.stream.details[part]] if request.top_logprobs else []
        others = [[(one["token_id"], one["logprob"]) for one in row] for row in tops_of] or [[]] * (
            piece.stop - piece.start
        )
        new = list(map(_Row, piece.stream.tokens[part], piece.stream.logprobs[part], others))
        places += self._places(new)
        rows += new
        return {
            "tokens": [self._text(row.token) for row in rows],
            "token_logprobs": [row.logprob for row in rows],
            "top_logprobs": [self._most_probable(row) for row in rows] if request.top_logprobs else None,
            "text_offset": places,
        }

    def _places(self, rows: Iterable[_Row]) -> list[int]:
        shown = [b"" if self._encoder.hides(row.token) else self._encoder.token_bytes(row.token) for row in rows]
        *places, self._characters = offsets_of(shown, self._characters)
        return places

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
    logprobs = [finite(one) for one in scores.logprobs] if scores else []
    top = scores.top if scores and scores.top else None
    ids = np.frombuffer(top.tokens, np.int32).reshape(-1, top.k).tolist() if top else []
    values = np.frombuffer(top.logprobs, np.float32).reshape(-1, top.k).tolist() if top else []
    for place, token in enumerate(prompt):
        known = 0 < place <= len(logprobs)
        others = list(zip(ids[place - 1], map(finite, values[place - 1]), strict=True)) if known and top else []
        yield _Row(token, logprobs[place - 1] if known else None, others)
