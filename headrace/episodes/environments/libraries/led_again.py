"""The state of an environment that follows from its row, its seed and the replies to it: the replies. It is restored by giving it the same ones
again. A digest of what it said shows whether it went the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import xxhash


class Replies:
    """The replies that one environment was given."""

    def __init__(self) -> None:
        self._given: list[str] = []
        self._said = xxhash.xxh3_64()

    def given(self, reply: str) -> None:
        self._given.append(reply)

    def said(self, *answer: Any) -> None:
        """Counts an answer of the environment: plain values."""
        self._said.update(msgspec.json.encode(answer))

    def state(self) -> dict[str, Any]:
        return {"replies": self._given, "said": self._said.hexdigest()}

    def again(self, state: Mapping[str, Any]) -> Iterator[str]:
        """Yields the replies of an exported state, for an environment that was just made. Raises ValueError at the end if it has not said the
        same to them."""
        yield from state["replies"]
        if self.state() != state:
            raise ValueError(
                "given the same replies, the environment says something else than before: it depends on more than its row, its seed and these; "
                'set environment.resumes = "restarted"'
            )
