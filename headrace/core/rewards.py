"""Rewards as numbers: the one place that decides which of the user's numbers training calculates with.

Every number from a reward function, a service, an environment, an agent or an advantage function of the user passes `number_of`, and every
rollout passes `usable` once all its rewards are known. What is behind them may square, sum and round rewards without a thought.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from headrace.core.batches import Failure
from headrace.core.errors import encodable
from headrace.core.types import Scored

LARGEST = 1e15
"""The largest size of a reward. Sums of its squares over a batch are far below the largest float32, in which the trainer calculates
(3.4e38), and a difference of 1 is not lost to rounding beside it."""


class Unusable(NamedTuple):
    """A value that is not a reward."""

    reason: Literal["none", "wrong_type", "nan", "too_large"]
    said: str
    """The sentence about it, without its subject: `is nan, not a finite number`."""


def number_of(value: object) -> float | Unusable:
    """Returns the number that a value is: a bool, an int, a float, or a NumPy array or torch tensor of one element."""
    if value is None:
        return Unusable("none", "is None")
    given = value
    if hasattr(given, "item") and not isinstance(given, (int, float)):
        try:
            # Of a masked array: below the mask is a number that nobody gave, 0 most often.
            if getattr(given, "mask", False):
                return Unusable("none", "is masked, which is no number")
            given = given.item()
        except Exception:
            return Unusable("wrong_type", f"is {shown(value)}, which is not one number")
    if not isinstance(given, (bool, int, float)):
        return Unusable("wrong_type", f"is {shown(value)}, which is not a number")
    if isinstance(given, float) and not math.isfinite(given):
        return Unusable("nan", f"is {float(given)}, not a finite number")
    if abs(given) > LARGEST:  # before it is made a float: an int may be larger than any
        size = f"{float(given):g}" if isinstance(given, float) else f"an integer of {given.bit_length()} bits"
        return Unusable(
            "too_large", f"is {size}, and at most {LARGEST:g} can be trained with; divide it by a constant, or clip it"
        )
    return float(given)


def usable(rollout: Scored) -> Scored | Failure:
    """Returns the rollout, or the failure that it is if one of its rewards is not a number to calculate with."""
    for name, value in _numbers(rollout):
        if isinstance(number := number_of(value), Unusable):
            return Failure(f"reward_{number.reason}", f"{name} {number.said}")
    return rollout


def _numbers(rollout: Scored) -> Iterator[tuple[str, float]]:
    yield from ((f"the reward {name}", value) for name, value in rollout.rewards.items())
    yield from (
        (f"the reward {name} of a turn", value) for turn in rollout.turn_rewards for name, value in turn.items()
    )
    for turn in rollout.segments:
        yield from (("the return of a segment", value) for _, _, value in turn)
    yield from (("the sum of the rewards of a branch", branch.reward) for branch in rollout.branches)
    yield (
        f"the weighted sum of {', '.join(f'{name} = {value:g}' for name, value in rollout.rewards.items())}",
        rollout.reward,
    )


def named_twice(given: str | bytes) -> str:
    """Returns the first name that an object of this JSON has twice; empty if none does, or if it is no JSON. Readers of JSON differ in which value
    they take (RFC 8259, section 4), so that a reward of two values is none."""

    def once(pairs: list[tuple[str, object]]) -> None:
        names = set[str]()
        for name, _ in pairs:
            if name in names:
                raise _Twice(name)
            names.add(name)

    try:
        json.loads(given, object_pairs_hook=once)
    except _Twice as twice:
        return str(twice)
    except (ValueError, RecursionError):
        pass
    return ""


class _Twice(Exception):
    pass


def shown(value: object, most: int = 60) -> str:
    """Returns a value and its type for a message, however long it is and whatever its `__repr__` does."""
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    text = encodable(text)
    return f"{text if len(text) <= most else text[: most - 3] + '...'} ({type(value).__name__})"
