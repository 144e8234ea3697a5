"""The reward of end_to_end.py, the same function for every system: 1 if the last number of a completion is the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.episodes.scoring.extract import last_number


def right_number(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
    """`completions`: texts, or TRL's lists of one assistant message."""
    texts = [
        completion if isinstance(completion, str) else completion[0].get("content") or "" for completion in completions
    ]
    return [float(last_number(text) == str(right)) for text, right in zip(texts, answer, strict=True)]
