"""The parts of a recipe, each with the table within `[algo]` that replaces its values (None: keeps them). Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Set
from typing import Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass as settings_dataclass

from headrace.algo.rules import Rule, with_thresholds
from headrace.settings.strict import STRICT

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum", "pair_mean"]
Denominator = Literal["all", "kept"]
Old = Literal["sampler", "trainer", "loglinear"]
Level = Literal["token", "sequence", "geometric"]
Mode = Literal["none", "truncate", "mask"]
Estimator = Literal["k1", "k2", "k3"]
SelectKind = Literal["none", "second_moment", "clip_cov", "kl_cov", "entropy"]
SubsetKind = Literal["none", "max_variance", "shortest", "efficient", "cleanest"]
Over = Literal["teacher_top", "student_top", "vocabulary"]
Credit = Literal["rollout", "turn", "agent", "segment", "state"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correction:
    """Weights that correct for the gap between sampler and trainer (`algo/objective.py`)."""

    mode: Mode = "none"
    level: Level = "token"
    low: float = 0.0
    high: float = 2.0
    rules: tuple[Rule, ...] = ()
    """The rules, in the order of `rules.RULES`."""


@settings_dataclass(frozen=True, kw_only=True, config=STRICT)
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
    """The weight of a token's loss by its lag (`algo/objective.py`)."""

    kind: Literal["constant", "exponential", "trim"] = "constant"
    decay: float = 0.9
    maximum: float = 1.0


@settings_dataclass(frozen=True, config=STRICT)
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
    """Tokens selected over the whole optimizer step (`algo/objective.py`)."""

    kind: SelectKind = "none"
    tau: float = 0.04
    fraction: float | None = None

    @property
    def share(self) -> float:
        """The share of the tokens that is selected."""
        return self.fraction or (0.2 if self.kind == "entropy" else 2e-4)

    @property
    def rejects(self) -> bool:
        """Whether the tokens that it does not keep are taken out. (kl_cov keeps them, with a penalty.)"""
        return self.kind in ("second_moment", "clip_cov", "entropy")


@settings_dataclass(frozen=True, config=STRICT)
class SelectConfig:
    """Tokens selected over the whole optimizer step, which costs another forward pass, without gradient."""

    kind: SelectKind | None = None
    """second_moment takes out the tokens with the largest squared log ratio; clip_cov those whose log-prob and
    advantage have the largest covariance; kl_cov keeps these, with a penalty; entropy keeps the tokens of the largest
    entropy."""
    tau: float | None = Field(default=None, gt=0)
    """second_moment: the bound on the mean squared log ratio of the tokens that stay."""
    fraction: float | None = Field(default=None, gt=0, lt=1)
    """clip_cov, kl_cov: the share of tokens selected, 2e-4 if not given; entropy: the share kept, 0.2 if not given."""


@dataclasses.dataclass(frozen=True)
class Subset:
    """The rollouts of a group that are trained (`GroupRewards.chosen`)."""

    kind: SubsetKind = "none"
    keep: int = 0
    by: str = ""

    def size(self, rollouts: int) -> int:
        """The number of rollouts that are trained of a group of so many."""
        return rollouts if self.kind == "none" else min(rollouts, self.keep or (rollouts + 1) // 2)


@settings_dataclass(frozen=True, config=STRICT)
class SubsetConfig:
    """The rollouts of each group that are compared and trained; the others are in no loss and no denominator."""

    kind: SubsetKind | None = None
    """none: all. max_variance: those whose rewards differ most (PODS, arXiv 2504.13818). shortest: those with the
    fewest sampled tokens; efficient: those with the most reward for a token (GFPO, arXiv 2508.09726). cleanest: wrong
    and right ones (of a reward above 0) in the group's shares, of the right ones the cleanest (GRPO-RoC, arXiv
    2508.20722)."""
    keep: int | None = Field(default=None, ge=1)
    """Rollouts of a group that are trained; half of them, rounded up, if not given."""
    by: str | None = None
    """cleanest: the reward by which right rollouts are clean, the most being the cleanest; its weight may be 0. If not
    given, those with the fewest sampled tokens are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experience:
    """Good rollouts of earlier groups, which are trained again with the next group of their prompt (`loop/buffer.py` keeps them)."""

    rollouts: int = 0
    above: float = 0.0
    prompts: int = 1024


@settings_dataclass(frozen=True, kw_only=True, config=STRICT)
class ExperienceConfig:
    """Good rollouts of earlier groups, which are trained again with the next group of their prompt, whatever their age (docs/experience.md)."""

    rollouts: int | None = Field(default=None, ge=0)
    """The most rollouts of a prompt that are kept, all of which join its next group: those of the highest reward, of equal ones the newest. 0: none."""
    above: float | None = None
    """A rollout is kept if its reward is above this; 0 if not given."""
    prompts: int | None = Field(default=None, ge=1)
    """Number of prompts that have rollouts kept; 1,024 if not given. The one whose last group is longest ago leaves first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KL:
    """Divergence from a reference model (`algo/objective.py`)."""

    coef: float = 0.0
    estimator: Estimator = "k3"
    place: Literal["loss", "reward"] = "loss"
    unbiased: bool = False
    target: float = 0.0
    change: float = 0.1
    every: int = 0

    def problems(self, given: Set[str]) -> Iterator[str]:
        """Yields a sentence for each setting that cannot work. `given`: the names of those that the user gave."""
        if self.place == "loss" and self.estimator == "k1":
            yield (
                "algo.kl.estimator = k1 in the loss has an expected gradient of zero on policy, so it would hold nothing; use "
                "k2 or k3, or algo.kl.place = reward"
            )
        if self.place == "reward" and self.estimator != "k1":
            yield (
                f"algo.kl.estimator = {self.estimator} in the reward would push the policy away from the reference, because a reward passes on "
                "its value and not its gradient; use k1, or algo.kl.place = loss"
            )
        if self.place == "reward" and self.unbiased:
            yield "algo.kl.unbiased is for algo.kl.place = loss: a reward has no gradient to correct; remove it"
        if self.unbiased and self.estimator != "k3":
            yield f"algo.kl.unbiased corrects k3, not algo.kl.estimator = {self.estimator}; use k3, or remove it"
        if self.place == "reward" and self.every:
            yield (
                "algo.kl.every moves the reference that the trainer holds, and algo.kl.place = reward asks an engine, which serves the first weights; set "
                'algo.kl.place = "loss", or remove algo.kl.every'
            )
        if self.place == "reward" and self.target:
            yield (
                "algo.kl.target moves the factor of a divergence in the loss, and rewards are given before the trainer knows it; set algo.kl.place = "
                '"loss", or remove algo.kl.target'
            )
        if "change" in given and not self.target:
            yield "algo.kl.change needs algo.kl.target, in nats; set it, or remove algo.kl.change"
        if not self.coef and given - {"coef"}:
            yield "algo.kl needs algo.kl.coef > 0 (1e-3 is usual); set it, or remove the other settings of algo.kl"


@settings_dataclass(frozen=True, config=STRICT)
class KLConfig:
    """Divergence from the reference model: the weights that the run started with, unless `every` moves it."""

    coef: float | None = Field(default=None, ge=0)
    """The factor of the divergence; 0 is off."""
    estimator: Estimator | None = None
    """k1 = lp - ref, k2 = its square / 2, k3 = exp(ref - lp) - (ref - lp) - 1 (Schulman 2020). k2 or k3 in the loss, k1 in the reward."""
    place: Literal["loss", "reward"] | None = None
    """loss: the trainer holds the reference as well. reward: an engine serves the reference, and the divergence is
    subtracted from the reward."""
    unbiased: bool | None = None
    """loss: multiply by the ratio to the sampler, which is exact for tokens that older weights sampled."""
    target: float | None = Field(default=None, gt=0)
    """loss: the mean divergence of a token aimed at, in nats (arXiv 1909.08593): `coef` is the first step's factor,
    which grows after a step above it and shrinks after one below."""
    change: float | None = Field(default=None, gt=0, lt=5)
    """target: the factor's relative change per step is this times how far off the last mean was, at most 20 % of the
    target; 0.1 if not given."""
    every: int | None = Field(default=None, gt=0)
    """loss: the reference becomes what the policy is after each multiple of so many steps (ProRL, arXiv 2505.24864). Not for
    an adapter, whose reference is its base."""


@dataclasses.dataclass(frozen=True)
class Entropy:
    """A bonus for the entropy of the policy (`algo/objective.py`)."""

    coef: float = 0.0
    target: float = 0.0
    change: float = 0.005

    @property
    def on(self) -> bool:
        return self.coef > 0 or self.target > 0


@settings_dataclass(frozen=True, config=STRICT)
class EntropyConfig:
    """A bonus for the entropy of the policy, over the whole vocabulary, at every token in the loss."""

    coef: float | None = Field(default=None, ge=0)
    """A token's loss is less by this times its entropy in nats; 0 is off. With a target: the first step's factor."""
    target: float | None = Field(default=None, gt=0)
    """The mean entropy aimed at, in nats (Skywork-OR1, arXiv 2505.22312): the factor, between 0 and 1, grows by
    `change` after a step below it and shrinks after one above; no bonus while the last mean was above it."""
    change: float | None = Field(default=None, gt=0)
    """target: the change of the factor per step; 0.005 if not given."""


@dataclasses.dataclass(frozen=True)
class Distill:
    """The part of the loss that a teacher adds (`algo/objective.py`)."""

    kind: Literal["none", "sampled", "forward", "reverse", "jsd"] = "none"
    _: dataclasses.KW_ONLY
    coef: float = 1.0
    over: Over = "teacher_top"
    k: int = 32
    beta: float = 0.5
    temperature: float = 1.0
    model: str = ""

    @property
    def compares(self) -> bool:
        """Whether distributions are compared, and not a token's probabilities alone."""
        return self.kind in ("forward", "reverse", "jsd")

    @property
    def top(self) -> int:
        """The number of tokens that are compared one by one; 0: all of them, or that which was sampled."""
        return self.k if self.compares and self.over != "vocabulary" else 0


@settings_dataclass(frozen=True, config=STRICT)
class DistillConfig:
    """The part of the loss that a teacher adds."""

    kind: Literal["none", "sampled", "forward", "reverse", "jsd"] | None = None
    """`sampled`: reverse KL on the sampled token, as an advantage. The others compare both distributions over the tokens of `over`."""
    coef: float | None = Field(default=None, gt=0)
    """Weight of the teacher's part."""
    over: Over | None = None
    """The tokens that are compared: the teacher's `k` most probable ones, or the student's, and one bucket for all others; or the whole
    vocabulary. The last two need `model`."""
    k: int | None = Field(default=None, ge=1)
    """The most probable tokens that are compared; 32 if not given."""
    beta: float | None = Field(default=None, gt=0, lt=1)
    """jsd: the teacher's share of the mixture."""
    temperature: float | None = Field(default=None, gt=0)
    """The temperature at which both distributions are compared, whichever one tokens are sampled at; 1 if not given. Others need `model`."""
    model: str | None = None
    """The teacher as a model that the trainer holds, found like `model.path`, with the student's tokenizer. Empty: engines serve the
    teachers (`[[teachers]]`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Critic:
    """The value function of `advantage = gae`, and how it is trained (`algo/critic.py`)."""

    learning_rate: float = 0.05
    trunk: float = 0.0
    model: str = ""
    model_learning_rate: float = 1e-5
    lam: float | None = None
    length_rate: float = 0.0
    alone_steps: int = 0
    imitation: float = 0.0


@settings_dataclass(frozen=True, config=STRICT)
class CriticConfig:
    """The critic of PPO: a linear value head on the policy's last hidden states, or on those of a model of its own."""

    learning_rate: float | None = Field(default=None, gt=0)
    """The value head's constant learning rate: a value moves by about this much in a step, in units of the reward. It
    has an AdamW of its own."""
    trunk: float | None = Field(default=None, ge=0)
    """The share of the value loss whose gradient goes on into the model (0.1 is what others call a coefficient of 0.1).
    0: the head alone learns from it."""
    model: str | None = None
    """The model that the critic begins as, apart from the head, found like `model.path`; it has the policy's tokenizer, and
    all of its weights are trained, in float32. Empty: the head reads the policy's hidden states."""
    model_learning_rate: float | None = Field(default=None, gt=0)
    """The constant learning rate of the critic's own model; 1e-5 if not given. `train.max_grad_norm` bounds its gradient
    by itself."""
    lam: float | None = Field(default=None, ge=0, le=1)
    """λ of the returns that the critic learns; `algo.lam` if not given (VAPO: 1, without a bias)."""
    length_rate: float | None = Field(default=None, ge=0)
    """Above 0: the policy's λ for a trajectory of length l is 1 - 1/(length_rate · l), at least 0 (VAPO: 0.05)."""
    alone_steps: int | None = Field(default=None, ge=0)
    """First steps in which the critic is trained alone and the policy's weights stay (VAPO: 50)."""
    imitation: float | None = Field(default=None, ge=0)
    """The weight of the mean negative log-likelihood of rollouts whose rewards sum to more than 0 (VAPO: 0.1)."""

    @model_validator(mode="after")
    def _one_trunk(self) -> CriticConfig:
        if self.model and self.trunk:
            raise ValueError(
                f"algo.critic.trunk = {self.trunk:g} lets a share of the value loss into the policy, and with algo.critic.model the critic reads another "
                "model, which gets all of it; remove one of the two"
            )
        if self.model_learning_rate and not self.model:
            raise ValueError(
                "algo.critic.model_learning_rate is that of a critic's own model, and without algo.critic.model it is a head on the policy; set that, "
                "or remove this one"
            )
        return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedReward:
    """The reward model of `advantage = implicit`, and how it is trained (`algo/implicit.py`)."""

    beta: float = 0.05
    learning_rate: float | None = None


@settings_dataclass(frozen=True, config=STRICT)
class ProcessConfig:
    """The process reward of PRIME: a second adapter of the base, trained in each step before the policy."""

    beta: float | None = Field(default=None, gt=0)
    """β: a token's reward is this times the log-ratio of the second adapter to the base; 0.05 if not given."""
    learning_rate: float | None = Field(default=None, gt=0)
    """The second adapter's constant learning rate, for an AdamW of its own; `train.learning_rate` if not given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demonstrated:
    """The loss of demonstrations, and their share of the step's (`algo/objective.py`)."""

    kind: Literal["none", "sft", "phi", "shaped", "compared"] = "none"
    weight: float = 0.1
    last_weight: float | None = None
    warmup_steps: int = 0
    decay_steps: int = 0
    gamma: float = 0.1
    reward: float = 1.0
    imitation: float = 0.0

    def share_at(self, step: int) -> float:
        """Returns μ of the step that follows `step` finished ones: linear up to `weight`, then along half a cosine to `last_weight` (CHORD-μ, arXiv
        2508.11408; the authors' `mu_schedule_function`)."""
        if step < self.warmup_steps:
            return self.weight * step / self.warmup_steps
        if self.last_weight is None:
            return self.weight
        done = min((step - self.warmup_steps) / self.decay_steps, 1.0)
        return self.last_weight + (self.weight - self.last_weight) * 0.5 * (1 + math.cos(math.pi * done))


@settings_dataclass(frozen=True, kw_only=True, config=STRICT)
class DemonstratedConfig:
    """The loss of the given answers of [demonstrations], which are trained beside the rollouts of each step: (1 - μ) times the loss of these, and μ times theirs."""

    kind: Literal["none", "sft", "phi", "shaped", "compared"] | None = None
    """sft: cross-entropy. phi: cross-entropy times π(1 - π), most where the policy is undecided. shaped: π/(π + `gamma`). compared:
    that times the advantage among the rollouts of its question."""
    weight: float | None = Field(default=None, gt=0, lt=1)
    """μ, the share of the loss that is theirs; 0.1 if not given."""
    last_weight: float | None = Field(default=None, ge=0, lt=1)
    """μ after `decay_steps`, along half a cosine; `weight` if not given."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Number of steps in which μ rises linearly from 0."""
    decay_steps: int | None = Field(default=None, gt=0)
    """Number of steps after these in which μ falls (or rises) to `last_weight`."""
    gamma: float | None = Field(default=None, gt=0)
    """shaped, compared: the probability at which π/(π + γ) is a half; 0.1 if not given."""
    reward: float | None = None
    """compared: the reward of every given answer, beside those of the rollouts; 1 if not given."""
    imitation: float | None = Field(default=None, ge=0)
    """compared: the factor of cross-entropy times exp(-H) beside it, a mean over the tokens of the answers, with H the policy's entropy (SRFT: 0.5)."""
