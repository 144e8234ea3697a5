"""The model and the number of a request whose body is refused: read leniently, because a number that nobody takes holds up all behind it."""

from __future__ import annotations

import json
from typing import NamedTuple

PROTOBUF_MODEL, PROTOBUF_NUMBER = 0x0A, 0x10
"""The tags of the first two fields of `ForwardBackwardRequest`, in wire format."""


class NumberedRequest(NamedTuple):
    model: str
    number: int
    trains: bool = False
    """Whether it would have been a part of the gradient, as far as one knows."""


def of_json(body: bytes) -> NumberedRequest | None:
    """Takes what Python's `json` writes, NaN too; other fields may be anything."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    model, number = (found.get("model_id"), found.get("seq_id")) if isinstance(found, dict) else (None, None)
    return NumberedRequest(model, number) if isinstance(model, str) and type(number) is int else None


def of_protobuf(body: bytes) -> NumberedRequest | None:
    """Takes the begin of a message too: a writer puts the fields in the order of their numbers, and these two are the first."""
    try:
        end = 2 + body[1]
        if body[0] != PROTOBUF_MODEL or body[1] >= 0x80 or body[end] != PROTOBUF_NUMBER:
            return None
        number, shift, place = 0, 0, end + 1
        while True:  # seven bits a byte, the lowest first
            number |= (body[place] & 0x7F) << shift
            if body[place] < 0x80:
                return NumberedRequest(body[2:end].decode(), number, trains=True)
            shift, place = shift + 7, place + 1
    except (IndexError, UnicodeDecodeError):
        return None
