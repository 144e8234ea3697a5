"""Steps, groups and evaluations for so many minutes (`train.minutes`): plain arithmetic on measured speeds.

What the recipe says is the most that is done. Where that does not fit, evaluations give way first (down to a fifth of the time),
then groups a step, then steps: many small steps taught the demo's model more in the same time than few large ones. None of them
falls below the least of which one can still learn something; where not even that fits, the fit says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.types import Struct


class Wish(Struct, frozen=True):
    """What a recipe asks for."""

    steps: int
    groups: int
    """A step."""
    rollouts: int
    """A group."""
    prompts: int
    """Of an evaluation."""
    samples: int
    """Of each of them."""
    max_tokens: int
    """Of a completion."""
    prompt_tokens: int
    evaluate_every: int = 0
    """Steps between evaluations; 0 evaluates before and after alone."""
    save_every: int = 0
    """Steps between checkpoints; 0 writes the last one alone."""
    warmup: int = 0
    least_groups: int = 1
    """That the staleness settings need."""


class Speeds(Struct, frozen=True):
    """Seconds of this machine, with what others leave of it."""

    sampled: float
    """For one sampled token."""
    trained: float
    """For one token that the trainer forwards, and its gradient."""
    update: float
    """For what an optimizer step takes besides: the update and the publish."""
    start: float
    """From the command until the first token is sampled."""
    save: float
    """For a checkpoint."""


@dataclass(frozen=True)
class Fitted:
    steps: int
    groups: int
    prompts: int
    warmup: int
    seconds: float
    """That all of it is expected to take."""
    step_seconds: float
    evaluation_seconds: float
    fits: bool
    """Whether that is within the time."""

    def of(self, wish: Wish) -> str:
        """`24 steps of 2 groups, 32 held-out prompts (the recipe asks for 60 steps of 8 groups, 64 held-out prompts)`"""
        asked = f"{wish.steps} steps of {wish.groups} groups, {wish.prompts} held-out prompts"
        fitted = f"{self.steps} steps of {self.groups} groups, {self.prompts} held-out prompts"
        return fitted if fitted == asked else f"{fitted} (the recipe asks for {asked})"


DRAWN = 2.0
"""Groups that are drawn for one that is trained: the others have no contrast. It grows as a model learns; what the first steps
show takes its place (`allowance.py`)."""
SPARE = 0.1
"""Share of the time that is left free for what nobody measured."""
EVALUATING = 0.2
"""Share of the time that all evaluations together may take."""
LEAST_PROMPTS, LEAST_GROUPS, LEAST_STEPS = 16, 2, 8
MANY = 40
"""Steps below which groups are given up for more of them."""


def step_seconds(wish: Wish, speeds: Speeds, groups: int) -> float:
    """Both pools share the cores, so that what one of them computes the other one waits for."""
    sampling = DRAWN * wish.rollouts * wish.max_tokens * speeds.sampled
    training = (wish.prompt_tokens + wish.rollouts * wish.max_tokens) * speeds.trained
    return groups * (sampling + training) + speeds.update


def evaluation_seconds(wish: Wish, speeds: Speeds, prompts: int) -> float:
    return prompts * wish.samples * wish.max_tokens * speeds.sampled


def fit(wish: Wish, speeds: Speeds, seconds: float) -> Fitted:
    """The most of what the recipe asks for that fits into `seconds`."""
    least_prompts, least_steps = min(wish.prompts, LEAST_PROMPTS), min(wish.steps, LEAST_STEPS)
    least_groups = min(wish.groups, max(LEAST_GROUPS, wish.least_groups))
    usable = (1 - SPARE) * seconds

    def taken(steps: int, groups: int, prompts: int) -> Fitted:
        one, look = step_seconds(wish, speeds, groups), evaluation_seconds(wish, speeds, prompts)
        looks = 2 + (max(0, steps - 1) // wish.evaluate_every if wish.evaluate_every else 0)
        saves = 1 + (max(0, steps - 1) // wish.save_every if wish.save_every else 0)
        total = speeds.start + steps * one + looks * look + saves * speeds.save
        warmup = math.ceil(wish.warmup * steps / wish.steps)
        return Fitted(
            steps=steps,
            groups=groups,
            prompts=prompts,
            warmup=min(warmup, steps - 1),
            seconds=total,
            step_seconds=one,
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
