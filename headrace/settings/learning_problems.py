"""Settings with which a run learns nothing, or something else than what is meant, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def learning_problems(config: Any) -> Iterator[str]:
    """Yields a sentence for each such pair: of lengths, rewards, groups and the learning rate. `config`: a RunConfig."""
    yield from _length_problems(config)
    if config.rollout.temperature == 0:
        yield (
            "rollout.temperature = 0 samples the same completion for every rollout of a group, so there is nothing to "
            "learn from; use 1.0 for training (eval.temperature = 0 measures greedy answers)"
        )
    if config.lora.quantise and config.lora.merged and config.algo.reference_in_reward:
        yield (
            f"algo.kl.place = reward asks an engine for the reference's log-probs, and with lora.publish = {config.lora.publish} that is the "
            f"model before lora.quantise = {config.lora.quantise}, not the one that training began with; use algo.kl.place = loss, or "
            'lora.publish = "adapter"'
        )
    if config.algo.credit == "segment" and not config.reward.segmented:
        yield (
            'algo.credit = "segment" needs scores of steps, and nothing gives any; set segments (the text that ends a step) of one of '
            'reward.functions or reward.services, or algo.credit = "rollout"'
        )
    if config.algo.recipe.loss.pairs and config.staleness.overdue == "trim":
        yield (
            f'staleness.overdue = "trim" takes tokens out of rollouts, and algo.loss = {config.algo.recipe.loss} compares whole ones; use "wait" '
            'or "drop"'
        )
    if config.rollout.group_size < config.algo.min_rollouts:
        yield (
            f"rollout.group_size = {config.rollout.group_size} gives {config.algo.name} nothing to compare a rollout with, "
            "so every advantage would be zero; use at least 2 (8 is usual), or algo.name = reinforce"
        )
    if config.train.warmup_steps >= config.train.steps:
        yield (
            f"train.warmup_steps = {config.train.warmup_steps} leaves none of the train.steps = {config.train.steps} at "
            "the full learning rate; lower train.warmup_steps"
        )
    if config.train.minutes and config.staleness.window > 1:
        yield (
            f"train.minutes = {config.train.minutes:g} may lower staleness.groups_per_step, on which staleness.window = {config.staleness.window} "
            "depends; remove one of the two"
        )


def _length_problems(config: Any) -> Iterator[str]:
    if config.rollout.max_tokens >= config.engine.context_length:
        yield (
            f"rollout.max_tokens = {config.rollout.max_tokens} leaves no room for a prompt in engine.context_length = "
            f"{config.engine.context_length}; lower the first or raise the second"
        )
    cache = config.reward.soft_overlong_punishment.cache
    if cache > config.rollout.max_tokens:
        yield (
            f"reward.soft_overlong_punishment.cache = {cache} begins before the first of rollout.max_tokens = {config.rollout.max_tokens}; "
            "lower it (a fifth of max_tokens is usual), or raise max_tokens"
        )
    if cache and config.algo.recipe.advantage == "zero":
        yield (
            "reward.soft_overlong_punishment changes the reward, which algo.advantage = zero does not look at; remove it, or use another "
            "advantage"
        )
    if config.eval.prompts > config.task.held_out:
        yield (
            f"eval.prompts = {config.eval.prompts} asks for more than task.held_out = {config.task.held_out} prompts; "
            "raise task.held_out or lower eval.prompts"
        )


HIGHEST_RATE = {"all weights": 1e-3, "an adapter": 1e-2}
"""Learning rates above these are remarked on: tiny models of tests learn with more, and hardly any other."""
_USUAL = {"all weights": "1e-6 to 1e-5 is usual", "an adapter": "1e-5 to 1e-4 is usual"}


def rate_remarks(config: Any) -> Iterator[str]:
    """Yields a remark on a learning rate with which models forget how to write. `config`: a RunConfig."""
    what, rate = ("an adapter" if config.lora.rank else "all weights"), config.train.learning_rate
    if rate > HIGHEST_RATE[what]:
        yield (
            f"train.learning_rate = {rate:g} for {what}: above {HIGHEST_RATE[what]:g} a few steps usually make a model write nonsense; "
            f"{_USUAL[what]}"
        )
