"""Spans of versions, written as columns."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.types import VersionSpan


def spans_of(
    versions: Sequence[int], kv_versions: Sequence[int], mixed: Sequence[bool] | None = None
) -> tuple[VersionSpan, ...]:
    """Encodes the [T] versions of tokens as runs. Without `mixed` [T] no token is mixed."""
    spans: list[VersionSpan] = []
    flags = [False] * len(versions) if mixed is None else mixed
    for start, facts in enumerate(zip(versions, kv_versions, flags, strict=True)):
        if not spans or (spans[-1].version, spans[-1].kv_version, spans[-1].mixed) != facts:
            spans.append(VersionSpan(start, *facts))
    return tuple(spans)
