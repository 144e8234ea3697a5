"""Fits steps, groups and evaluations into a number of minutes (`train.minutes`): plain arithmetic on measured speeds.

The numbers of the recipe are upper bounds. If they do not fit, evaluations are reduced first (down to a fifth of the time), then groups
per step, then steps: with the demo's model, many small steps gained more reward in the same time than few large ones. Each number has
a lower bound below which a run would not be worth its time; if not even the lower bounds fit, `Fitted.fits` is False.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.core.types import Struct


class Wish(Struct, frozen=True, kw_only=True):
    """The numbers that a recipe asks for."""

    steps: int
    groups: int
    """Groups per step."""
    rollouts: int
    """Rollouts per group; alternatives count as the share of a rollout that they play again."""
    prompts: int
    """Prompts per evaluation."""
    samples: int
    """Completions per prompt of an evaluation."""
    max_tokens: int
    """Tokens of a completion, at most."""
    prompt_tokens: int
    """Tokens of a prompt."""
    evaluate_every: int = 0
    """Steps between evaluations; 0 evaluates only before and after training."""
    beside: int = 0
    """Completions of further evaluation sets, which stay as they are."""
    save_every: int = 0
    """Steps between checkpoints; 0 writes only the last one."""
    warmup: int = 0
    least_groups: int = 1
    """Fewest groups per step that the staleness settings need."""


class Speeds(Struct, frozen=True):
    """Seconds on this machine, with the cores that other processes leave free."""

    sampled: float
    """Seconds per sampled token."""
    trained: float
    """Seconds per token that the trainer forwards, with its backward pass."""
    update: float
    """Seconds per optimizer step, for the update and the publish."""
    start: float
    """Seconds from the command until the first token is sampled."""
    save: float
    """Seconds per checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Numbers that fit into the time, and how long they are expected to take."""

    steps: int
    groups: int
    prompts: int
    warmup: int
    seconds: float
    """Expected seconds of the whole run."""
    step_seconds: float
    evaluation_seconds: float
    fits: bool
    """Whether `seconds` is within the time."""

    def of(self, wish: Wish) -> str:
        """Formats the result: `24 steps of 2 groups, 32 held-out prompts (the recipe asks for 60 steps of 8 groups, 64 held-out prompts)`"""
        asked = f"{wish.steps} steps of {wish.groups} groups, {wish.prompts} held-out prompts"
        fitted = f"{self.steps} steps of {self.groups} groups, {self.prompts} held-out prompts"
        return fitted if fitted == asked else f"{fitted} (the recipe asks for {asked})"


DRAWN = 2.0
"""Groups that are drawn for each one that is trained: the others have no contrast. The number grows as a model learns; the first real
steps replace this estimate (`run_limits.py`)."""
SPARE = 0.1
"""Share of the time that is left free for costs that were not measured."""
EVALUATING = 0.2
"""Share of the time that all evaluations together may take."""
LEAST_PROMPTS, LEAST_GROUPS, LEAST_STEPS = 16, 2, 8
MANY = 40
"""The number of steps below which groups per step are reduced in favour of more steps."""


def step_seconds(wish: Wish, speeds: Speeds, groups: int) -> float:
    """Returns the seconds of one step. Engine and trainer share the cores, so their times add up."""
    sampling = DRAWN * wish.rollouts * wish.max_tokens * speeds.sampled
    training = (wish.prompt_tokens + wish.rollouts * wish.max_tokens) * speeds.trained
    return groups * (sampling + training) + speeds.update


def evaluation_seconds(wish: Wish, speeds: Speeds, prompts: int) -> float:
    """Returns the seconds of one evaluation."""
    return (prompts * wish.samples + wish.beside) * wish.max_tokens * speeds.sampled


def fit(wish: Wish, speeds: Speeds, seconds: float) -> Fitted:
    """Returns the largest part of the recipe that fits into `seconds`."""
    least_prompts, least_steps = min(wish.prompts, LEAST_PROMPTS), min(wish.steps, LEAST_STEPS)
    least_groups = min(wish.groups, max(LEAST_GROUPS, wish.least_groups))
    usable = (1 - SPARE) * seconds

    def taken(steps: int, groups: int, prompts: int) -> Fitted:
        step, look = step_seconds(wish, speeds, groups), evaluation_seconds(wish, speeds, prompts)
        looks = 2 + (max(0, steps - 1) // wish.evaluate_every if wish.evaluate_every else 0)
        saves = 1 + (max(0, steps - 1) // wish.save_every if wish.save_every else 0)
        total = speeds.start + steps * step + looks * look + saves * speeds.save
        warmup = math.ceil(wish.warmup * steps / wish.steps)
        return Fitted(
            steps=steps,
            groups=groups,
            prompts=prompts,
            warmup=min(warmup, steps - 1),
            seconds=total,
            step_seconds=step,
            evaluation_seconds=look,
            fits=total <= usable,
        )

    whole = taken(wish.steps, wish.groups, wish.prompts)
    if whole.fits:
        return whole
    prompts, least_looks = wish.prompts, 2 + (least_steps - 1) // wish.evaluate_every if wish.evaluate_every else 2
    while prompts > least_prompts and least_looks * evaluation_seconds(wish, speeds, prompts) > EVALUATING * usable:
        prompts = max(least_prompts, prompts - max(1, prompts // 8))
    groups = wish.groups
    while groups > least_groups and not taken(min(MANY, wish.steps), groups, prompts).fits:
        groups -= 1
    fitting = [steps for steps in range(wish.steps, least_steps - 1, -1) if taken(steps, groups, prompts).fits]
    if fitting:
        return taken(fitting[0], groups, prompts)
    return taken(least_steps, least_groups, least_prompts)
