"""The reward of an agent: the last line that it prints, a number or a JSON object of numbers by name.

An object within it has the rewards of the role that it is named after: `{"white": {"won": 1}, "moves": 0.2}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.core.errors import RolloutFailed

GivenRewards = Mapping[str, float | Mapping[str, float]]
"""Rewards by name: those of the rollout, and those of each role by theirs."""
NAME = "agent"
"""The name of a reward that is a number alone."""


def printed_reward(output: str) -> GivenRewards:
    """Raises RolloutFailed if the last line of the output is no reward. NaN is one here, and is refused with all rewards later."""
    line = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    wanted = "it must be a number, or a JSON object of numbers by name, with an object for each role that has rewards of its own"
    if not line:
        raise RolloutFailed("environment_reward", f"printed no reward: the last line of its output is empty; {wanted}")
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        said = None
    rewards = said if isinstance(said, dict) else {NAME: said}
    named = [value for one in rewards.values() for value in (one.values() if isinstance(one, dict) else [one])]
    if not named or not all(isinstance(value, (bool, int, float)) for value in named):
        raise RolloutFailed("environment_reward", f"the last line of its output is no reward: {line!r:.80}; {wanted}")
    try:
        return {name: _floats(one) if isinstance(one, dict) else float(one) for name, one in rewards.items()}
    except OverflowError:
        raise RolloutFailed("environment_reward", f"the reward is too large: {line:.40}...") from None


def _floats(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}
