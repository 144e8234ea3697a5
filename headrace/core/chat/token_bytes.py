"""The bytes of a token. Tokenizers spell bytes that are no text in two ways: byte-level ones write a character for each byte (GPT-2), those
with byte fallback a token such as `<0xE2>` (SentencePiece)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

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
