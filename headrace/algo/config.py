"""Which algorithm, as values: one table of recipes and the few knobs that change them. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

Advantage = Literal["group_norm", "centred", "leave_one_out", "raw"]
Loss = Literal["ppo_clip", "reinforce"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum"]


class Recipe(NamedTuple):
    """An algorithm: a key of `advantages.ADVANTAGES`, of `losses.LOSSES`, of `aggregate.AGGREGATIONS`, and the clip range."""

    advantage: Advantage
    loss: Loss
    aggregation: Aggregation
    clip_low: float = 0.2
    clip_high: float = 0.2


# The clip is around the *sampler's* log-probs, so that its ratio holds staleness and engine/trainer mismatch together:
# a second importance weight would count them twice.
# grpo: token_mean is DAPO's denominator (arXiv 2503.14476); the paper's own seq_mean_token_mean favours long wrong answers.
# rloo, reinforce: the sum over a sequence's tokens is the unbiased policy gradient (arXiv 2402.14740).
RECIPES: dict[str, Recipe] = {
    "grpo": Recipe("group_norm", "ppo_clip", "token_mean"),
    "dr_grpo": Recipe("centred", "ppo_clip", "token_sum"),
    "rloo": Recipe("leave_one_out", "ppo_clip", "seq_mean_token_sum"),
    "reinforce": Recipe("raw", "ppo_clip", "seq_mean_token_sum"),
}


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class AlgoConfig:
    name: Literal["grpo", "dr_grpo", "rloo", "reinforce"] = "grpo"
    """A row of RECIPES; the settings below that are not given are the recipe's."""
    clip_low: float | None = Field(default=None, gt=0, le=1)
    """PPO clip: a ratio below 1 - clip_low no longer pushes a bad token down."""
    clip_high: float | None = Field(default=None, gt=0)
    """PPO clip: a ratio above 1 + clip_high no longer pushes a good token up (DAPO: 0.28)."""
    loss: Loss | None = None
    """`reinforce` replaces the clip by a truncated importance weight."""
    aggregation: Aggregation | None = None
    """How per-token losses become one number, over the whole optimizer step."""
    length_constant: int = Field(default=0, ge=0)
    """What `token_sum` divides by, in tokens; 0 is the longest completion there can be (rollout.max_tokens)."""
    overlong: Literal["train", "mask"] = "train"
    """Completions cut off at max_tokens: train on them, or take them out of the loss and its denominator."""

    @model_validator(mode="after")
    def _clip_needs_ppo(self) -> AlgoConfig:
        if self.recipe.loss != "ppo_clip" and (self.clip_low or self.clip_high):
            raise ValueError("algo.clip_low and algo.clip_high have no meaning with algo.loss = reinforce; remove them")
        return self

    @property
    def recipe(self) -> Recipe:
        """The table's row with the settings given here."""
        given = {name: getattr(self, name) for name in ("clip_low", "clip_high", "loss", "aggregation")}
        return RECIPES[self.name]._replace(**{name: value for name, value in given.items() if value is not None})

    def with_length(self, max_tokens: int) -> AlgoConfig:
        """The same with `length_constant` filled in, where rollout and algorithm are joined."""
        return self if self.length_constant else replace(self, length_constant=max_tokens)
