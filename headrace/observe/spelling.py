"""JSON has no NaN and no infinity: a float that is one is written as the string "nan", "inf" or "-inf".

Decoders with `strict=False` read it back as the float where the type says float, and leave strings where it says str. (In
`Prompt.columns`, whose types only the task knows, it stays a string.)
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from headrace.types import Struct


def encode(value: Struct) -> bytes:
    """One JSON line without its newline."""
    line = msgspec.json.encode(value)
    if b"null" in line:  # the encoder writes non-finite floats as null; the slow path is rare, so tokens stay cheap
        line = msgspec.json.encode(_spelled(msgspec.to_builtins(value)))
    return line


def _spelled(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _spelled(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(one) for one in value]
    return value
