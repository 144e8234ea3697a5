"""Tokens become text in pieces, and have places in it: the same text and the same places, however the tokens are cut into pieces."""

from __future__ import annotations

import codecs
from functools import cache
from itertools import accumulate, cycle, takewhile
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.core.chat.token_text import StreamedText
from headrace.models.chat import ChatEncoder
from support.spelled_tokens import KINDS, spelled

TEXTS = ["a", " ", " a", "é", "日", "😀", "\ufffd"]
WRONG = [b"\x80", b"\xff", b"\xe6", b"\xed\xa0", b"\xf0\x9f", b"\xe0\x80"]
HIDDEN = b""
"""Stands for a special token, which the text does not show."""


@cache
def encoder_of(kind: str) -> ChatEncoder:
    return ChatEncoder(spelled(Path(mkdtemp()), kind)).with_special_tokens("hide")


@cache
def token_of(kind: str) -> dict[bytes, int]:
    """Those of whole texts before those of the bytes that they are made of."""
    encoder = encoder_of(kind)
    found = {encoder.token_bytes(token): token for token in sorted(encoder.vocabulary().values())}
    return found | {HIDDEN: hidden_of(encoder)}


def hidden_of(encoder: ChatEncoder) -> int:
    return next(token for token, text in encoder.special.items() if text == "</s>")


def tokens_of(kind: str, said: list[bytes]) -> list[int]:
    known = token_of(kind)
    parts = [[part] if part in known else [bytes([byte]) for byte in part] for part in said]
    return [known[one] for part in parts for one in part]


def pieces(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    ends = [*takewhile(lambda end: end < len(tokens), accumulate(cycle(cuts))), len(tokens)]
    return [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]


SAID = st.lists(st.sampled_from([*(text.encode() for text in TEXTS), *WRONG, HIDDEN]), min_size=1, max_size=16)
CUTS = st.lists(st.integers(1, 4), min_size=1, max_size=4)
ONE_BY_ONE = [1]


@pytest.mark.parametrize("kind", KINDS)
@given(SAID, CUTS)
@example([text.encode() for text in "😀😀😀a"], ONE_BY_ONE)
@example([b"a", *[HIDDEN] * 9, b" a"], ONE_BY_ONE)
@example(["😀".encode(), b"\xf0\x9f"], ONE_BY_ONE)
@example(["日".encode(), b"\xff", "日".encode()], ONE_BY_ONE)
def test_a_stream_is_the_text_of_all_tokens(kind: str, said: list[bytes], cuts: list[int]) -> None:
    encoder = encoder_of(kind)
    tokens = tokens_of(kind, said)
    stream, parts = StreamedText(encoder.decode, ()), pieces(tokens, cuts)
    streamed = "".join(stream.push(part, place == len(parts) - 1) for place, part in enumerate(parts))
    assert streamed == encoder.decode(tokens)


@pytest.mark.parametrize("kind", KINDS)
@given(SAID)
@example(["😀".encode(), "日".encode(), b"\xf0\x9f"])
def test_wrong_bytes_change_nothing_of_the_text_beside_them(kind: str, said: list[bytes]) -> None:
    """Whatever the tokenizer: of a run of bytes that `max_tokens` has cut within a character the other characters stay."""
    encoder = encoder_of(kind)
    whole = b"".join(said).decode(errors="replace")
    shown = encoder.decode(tokens_of(kind, said))
    assert shown == (whole.removeprefix(" ") if kind == "byte-fallback" else whole)


@pytest.mark.parametrize("kind", KINDS)
@given(SAID, CUTS, st.integers(0, 9))
@example(["😀".encode(), b"a"], ONE_BY_ONE, 5)
@example([b" a", "日".encode()], ONE_BY_ONE, 0)
def test_tokens_have_the_same_places_in_pieces_as_at_once(
    kind: str, said: list[bytes], cuts: list[int], begin: int
) -> None:
    encoder = encoder_of(kind)
    tokens = tokens_of(kind, said)
    places = encoder.places(begin)
    found = [place for part in pieces(tokens, cuts) for place in places.push(part)]
    assert found == encoder.places(begin).push(tokens)
    shown = [place for place, token in zip(found, tokens, strict=True) if token != hidden_of(encoder)]
    assert shown == [begin + place for place in places_by_bytes(encoder, tokens)]


def places_by_bytes(encoder: ChatEncoder, tokens: list[int]) -> list[int]:
    """From the bytes of the whole text: for each token that it shows, the character to which the token's first byte belongs."""
    parts = [encoder.token_bytes(token) for token in tokens if token != hidden_of(encoder)]
    whole, wrong = b"".join(parts), list[range]()

    def note(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        wrong.append(range(error.start, error.end))
        return "\ufffd", error.end

    codecs.register_error("note", note)
    gone = len(whole.decode(errors="note")) - len(encoder.decode(tokens))  # a blank at the beginning
    begins = [byte & 0xC0 != 0x80 for byte in whole]
    for part in wrong:
        begins[part.start : part.stop] = [True, *[False] * (len(part) - 1)]
    places = [count - 1 for count in accumulate(begins)]
    return [max(0, places[before] - gone) for before in accumulate(map(len, parts[:-1]), initial=0)] if parts else []


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_tokens_are_those_of_the_text(kind: str) -> None:
    encoder = encoder_of(kind)
    for text in ("a a", "Grüße an 🦊", "\ufffd", "日本"):
        tokens = encoder.encode_text(text)
        said = [encoder.token_bytes(token) for token in tokens]
        assert b"".join(said).decode() == text
        places = encoder.places(5).push(tokens)
        assert places == sorted(places)
        assert all(text[place - 5] == one.decode()[0] for one, place in zip(said, places, strict=True) if one.isascii())
