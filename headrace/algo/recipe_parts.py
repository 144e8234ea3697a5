"""The parts of a recipe, each with the table within `[algo]` that replaces its values: None leaves the recipe's. Imports no torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum"]
Denominator = Literal["all", "kept"]
Old = Literal["sampler", "trainer", "loglinear"]
Level = Literal["token", "sequence", "geometric"]
Mode = Literal["none", "truncate", "mask"]
Estimator = Literal["k1", "k2", "k3"]

_STRICT = ConfigDict(extra="forbid")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correction:
    """Weights against the gap between sampler and trainer (`algo/loss/corrections.py`)."""

    mode: Mode = "none"
    level: Level = "token"
    low: float = 0.0
    high: float = 2.0
    veto: float = 0.0
    kpop: float = 0.0
    opsm: float = 0.0


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class CorrectionConfig:
    """Weights on the policy loss against the gap between sampler and trainer."""

    mode: Mode | None = None
    """`truncate` clamps the weight to [low, high], `mask` takes tokens outside out of the loss."""
    level: Level | None = None
    """The weight of a token: its own ratio, the product over its sequence, or the geometric mean over it."""
    low: float | None = Field(default=None, ge=0)
    """The smallest weight that is let through; 0 is none."""
    high: float | None = Field(default=None, gt=0)
    """The largest weight that is let through."""
    veto: float | None = Field(default=None, ge=0, lt=1)
    """A sequence with a token whose ratio is below this is taken out (1e-4 is usual); 0 is off."""
    kpop: float | None = Field(default=None, ge=0)
    """A token is taken out where the larger of both binary divergences is above this; 0 is off."""
    opsm: float | None = Field(default=None, ge=0)
    """Tokens with a negative advantage are taken out where the sequence's mean of sampler - trainer is above this; 0 is off."""


@dataclasses.dataclass(frozen=True)
class LagWeight:
    """What a token's lag makes of its loss (`algo/loss/corrections.py`)."""

    kind: Literal["constant", "exponential", "trim"] = "constant"
    decay: float = 0.9
    maximum: float = 1.0


@dataclass(frozen=True, config=_STRICT)
class LagWeightConfig:
    """What a token's lag makes of its policy loss."""

    kind: Literal["constant", "exponential", "trim"] | None = None
    """`exponential` multiplies by decay ** lag, `trim` takes out what is older than `maximum`."""
    decay: float | None = Field(default=None, gt=0, lt=1)
    """0.9 where it is not given."""
    maximum: float | None = Field(default=None, ge=0)
    """In optimizer steps; `trim` needs it."""


@dataclasses.dataclass(frozen=True)
class Select:
    """Tokens chosen by looking at the whole optimizer step (`algo/loss/selection.py`)."""

    kind: Literal["none", "m2po", "clip_cov", "kl_cov"] = "none"
    tau: float = 0.04
    fraction: float = 2e-4


@dataclass(frozen=True, config=_STRICT)
class SelectConfig:
    """Tokens chosen over the whole optimizer step; costs a forward pass more, without gradient."""

    kind: Literal["none", "m2po", "clip_cov", "kl_cov"] | None = None
    """m2po takes out tokens of the largest squared log ratio; clip_cov those whose log-prob and advantage vary together most;
    kl_cov keeps these, under a penalty."""
    tau: float | None = Field(default=None, gt=0)
    """m2po: what the mean squared log ratio is brought below."""
    fraction: float | None = Field(default=None, gt=0, lt=1)
    """clip_cov, kl_cov: the share of tokens, those of largest covariance."""


@dataclasses.dataclass(frozen=True)
class KL:
    """Divergence from a reference model (`algo/loss/kl.py`)."""

    coef: float = 0.0
    estimator: Estimator = "k3"
    place: Literal["loss", "reward"] = "loss"
    unbiased: bool = False


@dataclass(frozen=True, config=_STRICT)
class KLConfig:
    """Divergence from the reference model: the weights that the run started with."""

    coef: float | None = Field(default=None, ge=0)
    """0 is off."""
    estimator: Estimator | None = None
    """k1 = lp - ref, k2 = its square / 2, k3 = exp(ref - lp) - (ref - lp) - 1 (Schulman 2020). In the loss k3 or k2, in the reward k1."""
    place: Literal["loss", "reward"] | None = None
    """loss: the trainer holds the reference too. reward: an engine serves it, and the divergence is taken off the reward."""
    unbiased: bool | None = None
    """In the loss: times the ratio to the sampler, which makes it exact for what older weights sampled."""


@dataclasses.dataclass(frozen=True)
class Distill:
    """What a teacher adds (`algo/loss/distill.py`)."""

    kind: Literal["none", "sampled", "forward", "reverse", "jsd"] = "none"
    coef: float = 1.0
    k: int = 32
    beta: float = 0.5


@dataclass(frozen=True, config=_STRICT)
class DistillConfig:
    """What a teacher adds."""

    kind: Literal["none", "sampled", "forward", "reverse", "jsd"] | None = None
    """`sampled`: reverse KL on the sampled token, as an advantage. The others compare the teacher's k most probable tokens."""
    coef: float | None = Field(default=None, gt=0)
    """Weight of the teacher's part."""
    k: int | None = Field(default=None, ge=1)
    """How many of the teacher's most probable tokens are compared; 32 where it is not given."""
    beta: float | None = Field(default=None, gt=0, lt=1)
    """jsd: the teacher's share of the mixture."""
