"""Tokens become text: their bytes, of which one token may hold a part of a character, and text that grows while they come."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate

# --- The bytes of a token. Tokenizers spell bytes that are no text in two ways
# Byte-level ones write a character for each byte (GPT-2), those with byte fallback a token such as `<0xE2>` (SentencePiece).


_NO_TEXT = "\ufffd"
"""The character that decoders write for bytes that are no text."""
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BLANK = "\u2581"
"""SentencePiece's blank. A decoder takes it off the beginning of a text, although the token has it."""


def bytes_of_piece(piece: str, decoded: str) -> bytes:
    """Returns the bytes of a token. `piece`: it in the vocabulary; `decoded`: the text of it alone."""
    if _NO_TEXT not in decoded:
        bare = piece.startswith(_BLANK) and _BLANK not in decoded and not decoded.startswith(" ")
        return (piece.replace(_BLANK, " ") if bare else decoded).encode()
    if found := _FALLBACK.fullmatch(piece):
        return bytes([int(found[1], 16)])
    if all(one in _BYTE_OF for one in piece):
        return bytes(_BYTE_OF[one] for one in piece)
    return decoded.encode()


def _byte_level() -> dict[str, int]:
    """Character -> byte in byte-level vocabularies: what can be printed stands for itself, any other byte for a character from 256 on
    (`bytes_to_unicode` of https://github.com/openai/gpt-2)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_level()


def text_of_bytes(said: bytes, prefix: str = "") -> str:
    """Returns the text of a token in an answer: its characters, or its bytes as OpenAI writes them where they are none (`\\xe2\\x80`).
    `prefix`: goes before bytes; `/v1/completions` has `bytes:`."""
    try:
        return said.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in said)


def offsets_of(said: Sequence[bytes], begin: int) -> list[int]:
    """Returns the character at which each token begins, and the one behind the last. `begin`: that of the first. A token within a character
    begins at this character; one that a text does not show is given without bytes."""
    ends = list(accumulate((sum(byte & 0xC0 != 0x80 for byte in one) for one in said), initial=begin))
    inside = [bool(one) and one[0] & 0xC0 == 0x80 for one in said]
    return [max(end - within, begin) for end, within in zip(ends, [*inside, False], strict=True)]


# --- Tokens become text while they come
# No half of a character, nothing of a stop string, no special token.


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
