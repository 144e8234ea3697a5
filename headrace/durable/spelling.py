"""JSON with NaN and infinity, which JSON itself lacks: such a float is written as the string "nan", "inf" or "-inf".

Decoders with `strict=False` read these strings as floats where the type is float. (In `Prompt.columns`, whose types only the task knows,
they remain strings.) `jsonable` is for values of users and models, which may be anything.
"""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.core.types import Struct

_OPTIONAL = tuple(
    b'"%s":' % name
    for name in (
        b"adapter", b"before", b"books", b"mask", b"prompt_logprobs", b"prompt_top", b"routing", b"sampling_mask", b"teacher", b"token_numbers", b"top",
    )
)  # fmt: skip
"""Fields of our types that may be None. A field that is missing here costs only time."""
_LONGEST = max(map(len, _OPTIONAL))


def encode(value: Struct) -> bytes:
    """A value as one JSON line, without the newline."""
    line = msgspec.json.encode(value)
    if _may_hide_a_number(line):
        line = msgspec.json.encode(_spelled(msgspec.to_builtins(value)))
    return line


def _may_hide_a_number(line: bytes) -> bool:
    """Whether a null in the line may stand for a non-finite float, which the encoder writes as null. Searching the value itself would cost
    more than everything else: a group of 16 x 512 tokens takes 8 times as long."""
    at = line.find(b"null")
    while at >= 0 and line[max(0, at - _LONGEST) : at].endswith(_OPTIONAL):
        at = line.find(b"null", at + 4)
    return at >= 0


def _spelled(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _spelled(element) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(element) for element in value]
    return value


def jsonable(value: Any) -> Any:
    """Returns the value in a form that JSON and msgpack can hold: dates as ISO text, tuples and sets as lists, NumPy values as plain ones,
    integers beyond 64 bits as their digits. Raises TypeError for a value that has no such form."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, float):
        return float(value)  # numpy.float64 is a float and numpy.str_ a str, which encoders refuse all the same
    if isinstance(value, str):
        return _whole_text(str(value))
    if isinstance(value, Mapping):
        plain = {str(key): jsonable(inner) for key, inner in value.items()}
        if len(plain) < len(value):
            raise TypeError("a mapping with two keys of the same text, such as 1 and '1', has no place in JSON")
        return plain
    if isinstance(value, (list, tuple)):
        return [jsonable(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted((jsonable(inner) for inner in value), key=repr)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return float(value)
    if hasattr(value, "tolist"):
        return jsonable(_listed(value))
    raise TypeError(f"{type(value).__name__} has no place in JSON")


def _listed(value: Any) -> Any:
    """Returns an array or a scalar of NumPy or torch as Python values. Raises TypeError for one that would lose its meaning in them."""
    plain, kind = value.tolist(), getattr(getattr(value, "dtype", None), "kind", "")
    if kind in ("m", "M") and _has_integer(plain):
        raise TypeError(
            f"{value.dtype}, of which Python would be given an integer without its unit, has no place in JSON"
        )
    if kind == "V" or type(plain) is type(value):  # fields with names, and numpy.longdouble
        raise TypeError(f"{value.dtype} has no place in JSON")
    return plain


def _has_integer(value: Any) -> bool:
    return any(map(_has_integer, value)) if isinstance(value, list) else isinstance(value, int)


def _whole_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TypeError("text with half of a surrogate pair has no place in UTF-8") from None
    return text
