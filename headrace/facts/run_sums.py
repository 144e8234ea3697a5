"""The base of all numbers of a run. They are plain values, so that a digest (`facts/index_file.py`) is their bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args, get_origin

import msgspec


class RunSums(msgspec.Struct, forbid_unknown_fields=True):
    """Numbers that facts are folded into. Unlike the nouns they change."""


def counter() -> Any:
    """The default of a field that is a `Counter`."""
    return msgspec.field(default_factory=Counter)


def as_counter(kind: Any, value: Any) -> Any:
    """The hook with which msgspec reads a `Counter`, which it does not know. Raises what msgspec raises for values of other types."""
    if get_origin(kind) is not Counter:
        raise NotImplementedError(kind)
    return Counter(msgspec.convert(value, dict[get_args(kind)[0], int]))  # type: ignore[misc]
