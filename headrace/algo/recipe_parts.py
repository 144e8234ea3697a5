"""The parts of a recipe, each with the table within `[algo]` that replaces its values; None keeps the recipe's value.
Imports no torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from headrace.algo.rules.rule import Rule
from headrace.algo.rules.table import with_thresholds
from headrace.settings.strict import STRICT

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum", "pair_mean"]
Denominator = Literal["all", "kept"]
Old = Literal["sampler", "trainer", "loglinear"]
Level = Literal["token", "sequence", "geometric"]
Mode = Literal["none", "truncate", "mask"]
Estimator = Literal["k1", "k2", "k3"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correction:
    """Weights that correct for the gap between sampler and trainer (`algo/loss/corrections.py`)."""

    mode: Mode = "none"
    level: Level = "token"
    low: float = 0.0
    high: float = 2.0
    rules: tuple[Rule, ...] = ()
    """The rules, in the order of `rules.table.RULES`."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
@with_thresholds
class CorrectionConfig:
    """Weights on the policy loss that correct for the gap between sampler and trainer."""

    mode: Mode | None = None
    """`truncate` clamps the weight to [low, high]; `mask` takes tokens with a weight outside it out of the loss."""
    level: Level | None = None
    """The weight of a token: its own ratio, the product over its sequence, or the geometric mean over it."""
    low: float | None = Field(default=None, ge=0)
    """The smallest weight; 0 is no lower bound."""
    high: float | None = Field(default=None, gt=0)
    """The largest weight."""


@dataclasses.dataclass(frozen=True)
class LagWeight:
    """The weight of a token's loss by its lag (`algo/loss/corrections.py`)."""

    kind: Literal["constant", "exponential", "trim"] = "constant"
    decay: float = 0.9
    maximum: float = 1.0


@dataclass(frozen=True, config=STRICT)
class LagWeightConfig:
    """The weight of a token's policy loss by its lag."""

    kind: Literal["constant", "exponential", "trim"] | None = None
    """`exponential` multiplies by decay ** lag; `trim` takes out tokens of a lag above `maximum`."""
    decay: float | None = Field(default=None, gt=0, lt=1)
    """exponential: the factor per optimizer step of lag; 0.9 if not given."""
    maximum: float | None = Field(default=None, ge=0)
    """trim: the largest lag that is trained, in optimizer steps. Must be given."""


@dataclasses.dataclass(frozen=True)
class Select:
    """Tokens selected over the whole optimizer step (`algo/loss/selection.py`)."""

    kind: Literal["none", "m2po", "clip_cov", "kl_cov"] = "none"
    tau: float = 0.04
    fraction: float = 2e-4


@dataclass(frozen=True, config=STRICT)
class SelectConfig:
    """Tokens selected over the whole optimizer step, which costs another forward pass, without gradient."""

    kind: Literal["none", "m2po", "clip_cov", "kl_cov"] | None = None
    """m2po takes out the tokens with the largest squared log ratio; clip_cov those whose log-prob and advantage have
    the largest covariance; kl_cov keeps these, with a penalty."""
    tau: float | None = Field(default=None, gt=0)
    """m2po: the mean squared log ratio of the tokens that stay is below this."""
    fraction: float | None = Field(default=None, gt=0, lt=1)
    """clip_cov, kl_cov: the share of tokens that are selected."""


@dataclasses.dataclass(frozen=True)
class KL:
    """Divergence from a reference model (`algo/loss/kl.py`)."""

    coef: float = 0.0
    estimator: Estimator = "k3"
    place: Literal["loss", "reward"] = "loss"
    unbiased: bool = False


@dataclass(frozen=True, config=STRICT)
class KLConfig:
    """Divergence from the reference model: the weights that the run started with."""

    coef: float | None = Field(default=None, ge=0)
    """The factor of the divergence; 0 is off."""
    estimator: Estimator | None = None
    """k1 = lp - ref, k2 = its square / 2, k3 = exp(ref - lp) - (ref - lp) - 1 (Schulman 2020). k2 or k3 in the loss, k1
    in the reward."""
    place: Literal["loss", "reward"] | None = None
    """loss: the trainer holds the reference as well. reward: an engine serves the reference, and the divergence is
    subtracted from the reward."""
    unbiased: bool | None = None
    """loss: multiplies by the ratio to the sampler, which makes the estimate exact for tokens that older weights
    sampled."""


@dataclasses.dataclass(frozen=True)
class Distill:
    """The part of the loss that a teacher adds (`algo/loss/distill.py`)."""

    kind: Literal["none", "sampled", "forward", "reverse", "jsd"] = "none"
    coef: float = 1.0
    k: int = 32
    beta: float = 0.5


@dataclass(frozen=True, config=STRICT)
class DistillConfig:
    """The part of the loss that a teacher adds."""

    kind: Literal["none", "sampled", "forward", "reverse", "jsd"] | None = None
    """`sampled`: reverse KL on the sampled token, as an advantage. The others compare the teacher's k most probable tokens."""
    coef: float | None = Field(default=None, gt=0)
    """Weight of the teacher's part."""
    k: int | None = Field(default=None, ge=1)
    """Number of the teacher's most probable tokens that are compared; 32 if not given."""
    beta: float | None = Field(default=None, gt=0, lt=1)
    """jsd: the teacher's share of the mixture."""
