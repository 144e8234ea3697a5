"""Tokens become text: their bytes, of which one token may hold a part of a character, and text that grows while they come."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

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
    if all(character in _BYTE_OF for character in piece):
        return bytes(_BYTE_OF[character] for character in piece)
    return decoded.encode()


def _byte_level() -> dict[str, int]:
    """Character -> byte in byte-level vocabularies: what can be printed stands for itself, any other byte for a character from 256 on
    (`bytes_to_unicode` of https://github.com/openai/gpt-2)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_level()


def text_of_bytes(text: bytes, prefix: str = "") -> str:
    """Returns the text of a token in an answer: its characters, or its bytes as OpenAI writes them where they are none (`\\xe2\\x80`).
    `prefix`: goes before bytes; `/v1/completions` has `bytes:`."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in text)


class TokenPlaces:
    """The places of a completion's tokens in its text, in characters, while they come: the same in pieces as at once. A token that begins
    within a character is where this character is; bytes that are no text count as decoders write them, one sign for each wrong part."""

    def __init__(self, spell: Callable[[int], bytes], decode: Callable[[Sequence[int]], str], begin: int = 0) -> None:
        """`spell`: the bytes of a token; none of one that the text does not show. `begin`: the place of the first token."""
        self._spell, self._decode = spell, decode
        self._characters = begin
        """Whole characters before the next token."""
        self._open = b""
        """The beginning of a character behind these."""
        self._began = False
        """Whether there was a token that the text shows. The blank before the first one may have gone."""

    def push(self, tokens: Iterable[int]) -> list[int]:
        return [self._place(self._spell(token) if self._began else self._first(token)) for token in tokens]

    def _first(self, token: int) -> bytes:
        text = self._spell(token)
        self._began = bool(text)
        alone = self._decode([token]).encode()
        return alone if text.endswith(alone) else text

    def _place(self, text: bytes) -> int:
        if not self._open and text.isascii():
            place, self._characters = self._characters, self._characters + len(text)
            return place
        self._take(text[:1])
        place = self._characters - (not self._open and bool(text))
        self._take(text[1:])
        return place

    def _take(self, text: bytes) -> None:
        more = self._open + text
        self._open = _begun_character(more)
        self._characters += len(more.removesuffix(self._open).decode(errors="replace"))


def _begun_character(text: bytes) -> bytes:
    """The bytes at the end that more bytes could make a character. (Python's incremental decoder waits for more behind half a surrogate,
    which never becomes a character.)"""
    for size in range(1, min(len(text), 3) + 1):
        end = text[-size:]
        if end[0] >= 0xC0:
            try:
                end.decode()
            except UnicodeDecodeError as error:
                return end if error.reason == "unexpected end of data" else b""
    return b""


# --- Tokens become text while they come
# No half of a character, nothing of a stop string, no special token.


UNFINISHED = "\ufffd"
"""The character that decoders write for bytes that are no character yet."""


class StreamedText:
    """The text of one completion in pieces. Together they are the decoded text of all tokens, up to a stop string."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._tokens: list[int] = []
        self._from = self._done = 0
        """Tokens from `_from` on are decoded again, because the text of a token can depend on those before it; those up to `_done` have been
        written. Both are places at which no character is cut."""
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
            self._settle(now[len(before) :])
        end = len(self._written) if last or self.stop else max(self._given, len(self._written) - self._held)
        piece, self._given = self._written[self._given : end], end
        return piece

    def _settle(self, text: str) -> None:
        """`text`: that of the tokens from `_done` on."""
        if text:
            self._write(text)
            self._from, self._done = self._done, len(self._tokens)
        elif self._decode([*self._tokens[self._from :], *self._tokens[self._done :]]) == self._decode(
            self._tokens[self._from :]
        ):
            # Hidden tokens, unlike a blank that goes at the beginning of a text only. A window of them alone would be such a beginning.
            del self._tokens[self._done :]

    def _write(self, text: str) -> None:
        start = max(0, len(self._written) - self._held)
        self._written += text
        places = [(place, stop) for stop in self._stops if stop and (place := self._written.find(stop, start)) >= 0]
        if places:
            place, self.stop = min(places)
            self._written = self._written[:place]
