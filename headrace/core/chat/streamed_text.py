"""Tokens become text while they come: no half of a character, nothing of a stop string, no special token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_LOOK_BACK = 6
"""The number of earlier tokens that are decoded with the new ones, because the text of a token can depend on those before it."""

UNFINISHED = "\ufffd"
"""The character that decoders write for bytes that are no character yet."""


class StreamedText:
    """The text of one completion in pieces. Together they are the decoded text of all tokens, up to a stop string."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._tokens: list[int] = []
        self._from = self._done = 0
        """Tokens from `_from` on are decoded again; those up to `_done` have been written."""
        self._written = ""
        self._given = 0
        self.stop = ""
        """The stop string at which the text ends; empty if there is none."""
        self._held = max((len(stop) for stop in stops), default=1) - 1
        """Characters at the end that may be the beginning of a stop string."""

    @property
    def whole(self) -> str:
        return self._written

    def push(self, tokens: Sequence[int], last: bool) -> str:
        """Adds tokens and returns the new text that later tokens cannot change. `last`: no more tokens follow."""
        if self.stop:
            return ""
        self._tokens.extend(tokens)
        before, now = self._decode(self._tokens[self._from : self._done]), self._decode(self._tokens[self._from :])
        if last or not now.endswith(UNFINISHED):
            self._write(now[len(before) :])
            self._from, self._done = max(0, len(self._tokens) - _LOOK_BACK), len(self._tokens)
        end = len(self._written) if last or self.stop else max(self._given, len(self._written) - self._held)
        piece, self._given = self._written[self._given : end], end
        return piece

    def _write(self, text: str) -> None:
        start = max(0, len(self._written) - self._held)
        self._written += text
        places = [(place, stop) for stop in self._stops if stop and (place := self._written.find(stop, start)) >= 0]
        if places:
            place, self.stop = min(places)
            self._written = self._written[:place]
