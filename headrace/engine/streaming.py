"""An update that goes live in parts: the weights that serve between the old ones and the new."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from headrace.core.weights import WeightUpdate

T = TypeVar("T")


def check_parts(update: WeightUpdate, parts: int) -> None:
    """Raises ValueError where an update cannot be streamed like that."""
    if parts < 1:
        raise ValueError(f"an update cannot go live in {parts} parts; choose 1 (at once) or more")
    if parts > 1 and update.adapter is not None:
        raise ValueError(
            f"the adapter {update.adapter.name} cannot go live in {parts} parts: half an adapter is none, and it is small; load "
            "it with parts = 1"
        )


def mixtures(before: Mapping[str, T], after: Mapping[str, T], parts: int) -> Iterator[dict[str, T]]:
    """Mappings from `before` to `after`, both excluded: with one group more of neighbouring parameters replaced in each, in
    the order of `after`. There are `parts` groups of equal number (one less or more), or one for each parameter."""
    names = list(after)
    parts = min(parts, len(names))
    for part in range(1, parts):
        new = set(names[: part * len(names) // parts])
        yield {name: after[name] if name in new else before[name] for name in names}
