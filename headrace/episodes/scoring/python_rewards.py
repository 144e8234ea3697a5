"""Reward functions that are passed from Python: one, several, or several with names and weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.core.errors import ConfigError
from headrace.episodes.scoring.config import HANDED, RewardSpec
from headrace.episodes.scoring.job import signature_problem
from headrace.episodes.scoring.workers.threads import name_of

RewardFunction = Callable[..., Any]
Rewards = (
    RewardFunction
    | Sequence[RewardFunction | tuple[RewardFunction, float]]
    | Mapping[str, RewardFunction | tuple[RewardFunction, float]]
)
"""The values of `headrace.train(reward=)`. A pair is a function and its weight in the sum."""


def rewards_of(reward: Rewards) -> list[tuple[RewardSpec, RewardFunction]]:
    """Returns each function with its settings. Raises ConfigError for a value that cannot be called or has no finite weight."""
    if callable(reward):
        return [_one("", reward)]
    if isinstance(reward, Mapping):
        found = [_one(str(name), given) for name, given in reward.items()]
    elif isinstance(reward, Sequence) and not isinstance(reward, str):
        found = [_one("", given) for given in reward]
    else:
        raise ConfigError(
            f"reward= takes a function, a list of functions or a dict of name -> function, not {_shown(reward)}; a function in a "
            'file is named in the settings: reward.function = "path/to/file.py:name"'
        )
    if not found:
        raise ConfigError("reward= is empty: pass at least one function")
    return found


def _one(name: str, given: Any) -> tuple[RewardSpec, RewardFunction]:
    function, weight = given if isinstance(given, tuple) and len(given) == 2 else (given, 1.0)
    if problem := signature_problem(function):
        raise ConfigError(f"the reward function {name or _shown(function)} {problem}")
    name = name or name_of(function)
    if ":" in name:
        raise ConfigError(f"the reward {name} has a colon in its name, which settings use for files; name it without")
    if not isinstance(weight, (int, float)) or not math.isfinite(weight):
        raise ConfigError(f"the reward {name} has the weight {weight!r}; pass a pair of a function and a finite number")
    return RewardSpec(f"{HANDED}{name}", float(weight)), function


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
