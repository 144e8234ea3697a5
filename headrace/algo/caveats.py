"""Warnings about algorithms that work, but not as one might expect. Imports no torch."""

from __future__ import annotations

from headrace.algo.config import AlgoConfig

LONG = 512
"""Number of tokens above which a product over a sequence deserves a warning (NeMo-RL #2269)."""


def caveats(algo: AlgoConfig, max_tokens: int, max_lag: int = 0) -> list[str]:
    """Returns warnings about an algorithm in a run with completions of `max_tokens` and the lag bound `max_lag`."""
    return [*_of_lag(algo, max_lag), *_of_length(algo, max_tokens)]


def trusts_a_region(algo: AlgoConfig) -> bool:
    """Whether a bound on the ratio to the sampler, or a correction, keeps the policy near the one that sampled. A
    user's own loss is assumed to. (The ratio to the trainer's own log-probs bounds what one step does.)"""
    recipe, correction = algo.recipe, algo.recipe.correction
    if recipe.loss.whole:  # which rollouts are better does not depend on who sampled them
        return True
    bounds = recipe.loss.holds and recipe.old != "trainer"  # where every ratio is 1
    corrects = correction.mode != "none" or bool(correction.rules)
    return bounds or corrects or recipe.select.kind == "second_moment"


def _of_lag(algo: AlgoConfig, max_lag: int) -> list[str]:
    if max_lag == 0 or trusts_a_region(algo):
        return []
    why = ", where every ratio is 1" if algo.recipe.old == "trainer" else ""
    return [
        f"staleness.max_lag = {max_lag} with algo.loss = {algo.recipe.loss}, algo.old = {algo.recipe.old}{why}: neither a clip nor a "
        "correction holds the policy near the older one that sampled. In one published comparison plain policy gradients at age <= 1 "
        "finished 2 of 128 answers, with truncated importance sampling 98; use algo.name = tis (or algo.correction.mode = truncate), "
        "a loss with a clip (algo.name = grpo), or staleness.max_lag = 0"
    ]


def _of_length(algo: AlgoConfig, max_tokens: int) -> list[str]:
    correction = algo.recipe.correction
    if max_tokens <= LONG or correction.mode == "none" or correction.level != "sequence":
        return []
    return [
        f"algo.correction.level = sequence multiplies the ratios of up to {max_tokens} tokens: such a product is nearly "
        f"always outside [{correction.low}, {correction.high}] and most sequences will teach nothing; "
        "algo.correction.level = geometric does not depend on the length"
    ]
