"""Ends of completions by their content: token ids, and strings found while detokenising step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

Decode = Callable[[Sequence[int]], str]

LONGEST_CHARACTER = 8
"""Tokens after which text that still ends in half a character is taken as it is: no character has more than four bytes."""


class Text:
    """The text of a growing list of tokens, decoded in small windows.

    Decoding tokens one by one is wrong (a character may take several tokens, a leading space may vanish), and decoding all
    of them at every step is quadratic. So a window of tokens whose text is settled is decoded with and without what came
    after it; what the second has more than the first is new, unless it ends in the middle of a character.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._window = self._settled = 0

    def push(self, token: int) -> tuple[str, bool]:
        """The text that is not settled yet, and whether this token settled it (the next call starts after it)."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._window : self._settled])
        after = self._decode(self._tokens[self._window :])
        fresh = after[len(before) :]
        if (not fresh or fresh.endswith("\ufffd")) and len(self._tokens) - self._settled < LONGEST_CHARACTER:
            return fresh.rstrip("\ufffd"), False
        self._window, self._settled = self._settled, len(self._tokens)
        return fresh, True


class Stopper:
    """Watches one completion for its own stop tokens and stop strings."""

    def __init__(self, token_ids: Iterable[int], strings: Sequence[str], decode: Decode | None) -> None:
        self._token_ids = frozenset(token_ids)
        self._strings = tuple(strings)
        self._reach = max((len(string) for string in self._strings), default=1) - 1
        self._text = Text(decode) if decode and self._strings else None
        self._tail = ""
        """The end of the settled text, in which a stop string could begin."""

    def push(self, token: int) -> bool:
        """True when the completion ends with this token."""
        return self._says_stop(token) or token in self._token_ids

    def _says_stop(self, token: int) -> bool:
        if self._text is None:
            return False
        fresh, settled = self._text.push(token)
        seen = self._tail + fresh
        if settled:
            self._tail = seen[-self._reach :] if self._reach else ""
        return any(string in seen for string in self._strings)
