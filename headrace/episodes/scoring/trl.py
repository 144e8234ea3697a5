"""Reward functions written for TRL, called as TRL's trainers call them.

The convention differs from ours in three points: if the row's prompt is a conversation, prompts and completions are conversations too;
tokens are passed as `completion_ids`; and a reward of None means that the function does not apply to the row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

ONLY_THERE = ("trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL passes and headrace cannot."""


class TrlReward:
    """Marks a function that is called by TRL's convention. It can be called like the function, and has its name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.function(*given, **named)


def trl_reward(function: Callable[..., Any]) -> TrlReward:
    """Marks a reward function as one written for TRL: `reward=headrace.trl_reward(fn)`, or a decorator in a file of rewards."""
    return TrlReward(function)


def conversation(text: str) -> list[dict[str, str]]:
    """Returns a completion in the form that TRL passes to functions if the prompt is a conversation."""
    return [{"role": "assistant", "content": text}]
