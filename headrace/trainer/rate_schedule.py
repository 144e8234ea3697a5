"""The learning rate as a function of the step: computed by the trainer, drawn before a run, and told where a resumed run changes it.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace.facts.texts import sparkline
from headrace.trainer.config import TrainConfig


def learning_rate(step: int, config: TrainConfig, steps: int = 0) -> float:
    """Returns the rate of the optimizer step that follows `step` finished ones, in a run of `steps` (0: of `config.steps`).

    A skipped step leaves it where it is.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    done = (step - config.warmup_steps) / max((steps or config.steps) - config.warmup_steps, 1)
    if config.schedule == "linear":
        return config.learning_rate * (1 - min(done, 1.0))
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def drawn(config: TrainConfig, before: TrainConfig | None = None, done: int = 0) -> str:
    """Returns the curve in a line, with the rates at its corners. `before`: the settings of the first `done` steps, in a resumed run."""
    rates = [learning_rate(step, before or config) for step in range(min(done, config.steps))]
    rates += [learning_rate(step, config) for step in range(len(rates), config.steps)]
    if min(rates) == max(rates):
        return f"{rates[0]:.3g} in every step"
    told = [f"{rates[step - 1]:.3g} at step {step}" for step in _corners(config, done if before else 0)]
    return f"{sparkline(rates, within=(0.0, max(rates)))}\n{', '.join(told)}"


def _corners(config: TrainConfig, done: int) -> Sequence[int]:
    """Returns the steps, counted from 1, at which the curve begins, bends, or goes on after `done` steps of another process."""
    bends = {1, config.warmup_steps + 1, done, done + 1, config.steps}
    return sorted(step for step in bends if 1 <= step <= config.steps)


def change_of_rate(before: TrainConfig, now: TrainConfig, done: int) -> str:
    """Returns a sentence for a run that is resumed after `done` steps, where its schedule goes on otherwise than it would have; else an
    empty string. Constant rates are what the settings say."""
    parts = ("learning_rate", "schedule", "steps", "warmup_steps")
    if all(getattr(before, one) == getattr(now, one) for one in parts) or not 0 < done < now.steps:
        return ""
    if before.schedule == now.schedule == "constant":
        return ""
    last, following = learning_rate(done - 1, before), learning_rate(done, now)
    how = "rises again" if following > 1.01 * last else "falls" if following < 0.99 * last else "goes on"
    then = f", then to {learning_rate(now.steps - 1, now):.3g} at step {now.steps}" if now.steps > done + 1 else ""
    told = f'train.schedule = "{now.schedule}"'
    told += f" now ends at train.steps = {now.steps} instead of {before.steps}" if before.steps != now.steps else ""
    said = (
        f"the learning rate {how}: {last:.3g} at step {done}, {following:.3g} at step {done + 1}{then}, because {told}"
    )
    if how != "rises again":
        return said
    return f'{said}. To keep {last:.3g}, set train.schedule = "constant" and train.learning_rate = {last:.3g}'
