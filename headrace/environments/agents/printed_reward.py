"""The reward of an agent: the last line that it prints, a number or a JSON object of numbers by name."""

from __future__ import annotations

import json

from headrace.errors import RolloutFailed

NAME = "agent"
"""The name of a reward that is a number alone."""


def printed_reward(output: str) -> dict[str, float]:
    """Raises RolloutFailed if the last line of the output is no reward. NaN is one here, and is refused with all rewards later."""
    line = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    wanted = "it must be a number, or a JSON object of numbers by name"
    if not line:
        raise RolloutFailed("environment_reward", f"printed no reward: the last line of its output is empty; {wanted}")
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        said = None
    rewards = said if isinstance(said, dict) else {NAME: said}
    if not rewards or not all(isinstance(value, (bool, int, float)) for value in rewards.values()):
        raise RolloutFailed("environment_reward", f"the last line of its output is no reward: {line!r:.80}; {wanted}")
    try:
        return {name: float(value) for name, value in rewards.items()}
    except OverflowError:
        raise RolloutFailed("environment_reward", f"the reward is too large: {line:.40}...") from None
