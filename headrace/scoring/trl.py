"""Reward functions written for TRL, called as TRL's trainers call them.

In what it differs from our own convention: where the row's prompt is a conversation, prompts and completions are conversations too;
tokens go by the name `completion_ids`; and a reward of None means that this function has nothing to say of this row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

ONLY_THERE = ("trainer_state", "log_extra", "log_metric", "environments")
"""What TRL passes and we have not."""


class TrlReward:
    """The mark: a function in it is called by TRL's convention. It can be called, and is named, like the function itself."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.function(*given, **named)


def trl_reward(function: Callable[..., Any]) -> TrlReward:
    """Marks a reward function as one written for TRL: `reward=headrace.trl_reward(fn)`, or a decorator in a file of rewards."""
    return TrlReward(function)


def conversation(text: str) -> list[dict[str, str]]:
    """A completion, as TRL hands it to functions where the prompt is a conversation."""
    return [{"role": "assistant", "content": text}]
