"""An algorithm is a value: one literal table of recipes, which is also the list of all losses. Imports no torch.

A recipe is an advantage function, a loss, an aggregation and a handful of constants; `AlgoConfig` may replace each of them.
docs/algorithms.md prints the table. First come the parts of a recipe, each with the table within `[algo]` that replaces its values (None: keeps them).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as settings_dataclass

from headrace.algo.policy.clipped import ASPO, BAPO, CEGPPO, DCPO, GMPO, GSPO, M2PO, GSPOToken, PPOClip
from headrace.algo.policy.loss import Loss
from headrace.algo.policy.pairs import CPO, DPO, KTO, ORPO, IdentityPreference, SimPO
from headrace.algo.policy.region import DPPOKL, DPPOTV, IPO, SAPO, DPPOTVQuadratic, Kimi, KLCov
from headrace.algo.policy.weighted import CISPO, TOPR, VESPO, CrossEntropy, Importance, Reinforce, TOPRToken
from headrace.algo.rules import OPSM, RULES, KPop, Rule, Veto, with_thresholds
from headrace.settings.strict import STRICT

# --- The parts of a recipe


Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum", "pair_mean"]
Denominator = Literal["all", "kept"]
Old = Literal["sampler", "trainer", "loglinear"]
Level = Literal["token", "sequence", "geometric"]
Mode = Literal["none", "truncate", "mask"]
Estimator = Literal["k1", "k2", "k3"]
SelectKind = Literal["none", "second_moment", "clip_cov", "kl_cov", "entropy"]
SubsetKind = Literal["none", "max_variance", "shortest", "efficient", "cleanest"]
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
    """second_moment takes out the tokens with the largest squared log ratio; clip_cov those whose log-prob and advantage have
    the largest covariance; kl_cov keeps these, with a penalty; entropy keeps the tokens where the policy's entropy is largest."""
    tau: float | None = Field(default=None, gt=0)
    """second_moment: the mean squared log ratio of the tokens that stay is below this."""
    fraction: float | None = Field(default=None, gt=0, lt=1)
    """clip_cov, kl_cov: the share of tokens that are selected; 2e-4 if not given. entropy: the share that is kept; 0.2 if not given."""


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
    """The rollouts of each group that are compared and trained. The others are in no loss and in no denominator, and are not forwarded."""

    kind: SubsetKind | None = None
    """none: all. max_variance: those whose rewards differ most (PODS, arXiv 2504.13818). shortest: those with the fewest sampled tokens;
    efficient: those with the most reward for a token (GFPO, arXiv 2508.09726). cleanest: wrong and right ones (of a reward above 0) in the shares that they have
    in the group, and of the right ones the cleanest (GRPO-RoC, arXiv 2508.20722)."""
    keep: int | None = Field(default=None, ge=1)
    """Number of rollouts of a group that are trained; half of them, rounded up, if not given."""
    by: str | None = None
    """cleanest: the name of the reward by which right rollouts are clean, the most being the cleanest; a function's weight may be 0. If not given, those
    with the fewest sampled tokens are."""


@dataclasses.dataclass(frozen=True)
class KL:
    """Divergence from a reference model (`algo/objective.py`)."""

    coef: float = 0.0
    estimator: Estimator = "k3"
    place: Literal["loss", "reward"] = "loss"
    unbiased: bool = False


@settings_dataclass(frozen=True, config=STRICT)
class KLConfig:
    """Divergence from the reference model: the weights that the run started with."""

    coef: float | None = Field(default=None, ge=0)
    """The factor of the divergence; 0 is off."""
    estimator: Estimator | None = None
    """k1 = lp - ref, k2 = its square / 2, k3 = exp(ref - lp) - (ref - lp) - 1 (Schulman 2020). k2 or k3 in the loss, k1 in the reward."""
    place: Literal["loss", "reward"] | None = None
    """loss: the trainer holds the reference as well. reward: an engine serves the reference, and the divergence is
    subtracted from the reward."""
    unbiased: bool | None = None
    """loss: multiplies by the ratio to the sampler, which makes the estimate exact for tokens that older weights sampled."""


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
    """The loss of a token is less by this times its entropy in nats; 0 is off. With a target, it is the factor of the first step."""
    target: float | None = Field(default=None, gt=0)
    """The mean entropy that is aimed at, in nats (Skywork-OR1, arXiv 2505.22312): the factor grows by `change` after a step whose mean was
    below it, and shrinks by it after one whose mean was above, between 0 and 1, and there is no bonus while the last mean was above it."""
    change: float | None = Field(default=None, gt=0)
    """target: the change of the factor per step; 0.005 if not given."""


@dataclasses.dataclass(frozen=True)
class Distill:
    """The part of the loss that a teacher adds (`algo/objective.py`)."""

    kind: Literal["none", "sampled", "forward", "reverse", "jsd"] = "none"
    coef: float = 1.0
    k: int = 32
    beta: float = 0.5


@settings_dataclass(frozen=True, config=STRICT)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Critic:
    """The value function of `advantage = gae`, and how it is trained (`algo/critic.py`)."""

    learning_rate: float = 0.05
    trunk: float = 0.0
    lam: float | None = None
    length_rate: float = 0.0
    alone_steps: int = 0
    imitation: float = 0.0


@settings_dataclass(frozen=True, config=STRICT)
class CriticConfig:
    """The critic of PPO: a linear value head on the model's last hidden states, trained beside the policy."""

    learning_rate: float | None = Field(default=None, gt=0)
    """The constant learning rate of the value head: a value moves by about this much in a step, in units of the reward. It has an AdamW of its own."""
    trunk: float | None = Field(default=None, ge=0)
    """The share of the value loss whose gradient goes on into the model (0.1 is what others call a coefficient of 0.1). 0: the head alone learns
    from it, and the policy's gradient is that of its own loss."""
    lam: float | None = Field(default=None, ge=0, le=1)
    """λ of the returns that the critic learns; `algo.lam` if not given (VAPO: 1, so that it learns without a bias)."""
    length_rate: float | None = Field(default=None, ge=0)
    """Above 0, the policy's λ depends on the length l of each trajectory: 1 - 1/(length_rate · l), at least 0 (VAPO: 0.05)."""
    alone_steps: int | None = Field(default=None, ge=0)
    """Number of the critic's first steps, in which it is trained alone and the policy's weights stay (VAPO: 50)."""
    imitation: float | None = Field(default=None, ge=0)
    """The weight of the mean negative log-likelihood of rollouts whose rewards sum to more than 0, added to the loss (VAPO: 0.1)."""


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


# --- recipes ------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """An algorithm."""

    advantage: str
    """A row of `advantages.ADVANTAGES`, or the user's `file.py:name`."""
    loss: Loss
    aggregation: Aggregation
    _: KW_ONLY
    old: Old = "sampler"
    correction: Correction = Correction()
    lag: LagWeight = LagWeight()
    select: Select = Select()
    subset: Subset = Subset()
    kl: KL = KL()
    distill: Distill = Distill()
    entropy: Entropy = Entropy()
    critic: Critic = Critic()
    """Only `advantage = gae` has one."""
    demonstrations: Demonstrated = Demonstrated()
    credit: Credit = "rollout"
    gamma: float = 1.0
    shown: Literal["", "more", "sibling"] = ""
    """The thing that its teacher is shown beside the policy's prompt (`episodes/scoring/teacher/own_prompt.py`)."""
    about: str = field(default="", compare=False)
    """The special feature of the recipe, for docs/algorithms.md."""
    papers: tuple[str, ...] = field(default=(), compare=False)
    """arXiv numbers, or author and year."""


REASONS = ("mask", *RULES, "lag", "second_moment", "clip_cov", "entropy", "mine")
"""The reasons that may take out a token's policy loss; `mine` stands for a user's own loss."""

# The default clip is around the *sampler's* log-probs, so that its ratio holds staleness and engine/trainer mismatch
# together: a second importance weight would count them twice. Recipes with a correction anchor at the trainer's.
# gspo, mis_geometric, opsm: 0.05 is five times the noise that rounding adds to the mean of a sequence (docs/algorithms.md). The papers'
# bounds are narrower, because they bound a ratio to the trainer's own log-probs.
# grpo: token_mean is DAPO's denominator (arXiv 2503.14476); the paper's own seq_mean_token_mean favours long wrong answers.
# simpo: pairs of the best and the worst of several samples, as the paper makes its own.
# decoupled_ppo: weights above its cap of 5 are taken out, as in AReaL, rather than clamped.
# rloo, reinforce: the sum over a sequence's tokens is the unbiased policy gradient (arXiv 2402.14740).
RECIPES: dict[str, Recipe] = {
    "grpo": Recipe("group_norm", PPOClip(), "token_mean", papers=("2402.03300",)),
    "dapo": Recipe("group_norm", PPOClip(clip_high=0.28), "token_mean", papers=("2503.14476",)),
    "chord": Recipe(
        "group_norm",
        PPOClip(),
        "token_mean",
        demonstrations=Demonstrated(kind="phi"),
        about="given answers beside the rollouts, which count most where the policy is undecided",
        papers=("2508.11408",),
    ),
    "luffy": Recipe(
        "centred",
        PPOClip(),
        "token_mean",
        demonstrations=Demonstrated(kind="compared"),
        about="given answers belong to the group of their question, and rare tokens of theirs count more",
        papers=("2504.14945",),
    ),
    "dr_grpo": Recipe("centred", PPOClip(), "token_sum", papers=("2503.20783",)),
    "rloo": Recipe("leave_one_out", PPOClip(), "seq_mean_token_sum", papers=("2402.14740",)),
    "reinforce": Recipe(
        "raw",
        Reinforce(),
        "seq_mean_token_sum",
        about="no baseline, so that groups of one can be trained",
        papers=("Williams 1992",),
    ),
    "reinforce++": Recipe(
        "return_to_go",
        PPOClip(),
        "token_mean",
        about="per-token returns, whitened over the batch",
        papers=("2501.03262",),
    ),
    "reinforce++_baseline": Recipe(
        "group_baseline", PPOClip(), "token_mean", about="centred, then whitened over the batch", papers=("2501.03262",)
    ),
    "maxrl": Recipe("maxrl", PPOClip(), "seq_mean_token_sum", papers=("2602.02710",)),
    "opo": Recipe("opo", PPOClip(), "seq_mean_token_sum", papers=("2505.23585",)),
    "gdpo": Recipe(
        "gdpo",
        PPOClip(),
        "token_mean",
        about="several rewards, each z-scored, whitened over the batch",
        papers=("2601.05242",),
    ),
    "pass@k": Recipe(
        "pass@k", PPOClip(), "token_mean", about="only the best rollout is pushed", papers=("2503.19595",)
    ),
    "pass@k_training": Recipe(
        "best_of_k",
        PPOClip(),
        "token_mean",
        about="the best of every k rollouts counts, k = `algo.attempts`, 4 if not given",
        papers=("2508.10751", "2505.15201"),
    ),
    "pods": Recipe("group_norm", PPOClip(), "token_mean", subset=Subset("max_variance"), papers=("2504.13818",)),
    "gfpo": Recipe("group_norm", PPOClip(), "token_mean", subset=Subset("shortest"), papers=("2508.09726",)),
    "grpo_roc": Recipe(
        "group_norm",
        PPOClip(clip_high=0.28),
        "token_mean",
        subset=Subset("cleanest"),
        about="the cleanest right rollouts and any wrong ones",
        papers=("2508.20722",),
    ),
    "gigpo": Recipe(
        "centred",
        PPOClip(),
        "token_mean",
        credit="state",
        gamma=0.95,
        about="turns that began in one state are compared, beside whole rollouts",
        papers=("2505.10978",),
    ),
    "gspo": Recipe("group_norm", GSPO(), "seq_mean_token_mean", about="ratio of the sequence", papers=("2507.18071",)),
    "gspo_token": Recipe(
        "group_norm", GSPOToken(), "seq_mean_token_mean", about="ratio of the sequence", papers=("2507.18071",)
    ),
    "cispo": Recipe("group_norm", CISPO(), "token_mean", papers=("2506.13585",)),
    "sapo": Recipe("group_norm", SAPO(), "seq_mean_token_mean", about="a soft gate", papers=("2511.20347",)),
    "gmpo": Recipe("group_norm", GMPO(), "seq_mean_token_mean", about="geometric mean", papers=("2507.20673",)),
    "kimi": Recipe(
        "centred", Kimi(), "seq_mean_token_sum", about="a penalty instead of a ratio", papers=("2501.12599",)
    ),
    "topr": Recipe(
        "centred", TOPR(), "seq_mean_token_sum", about="ratio of the whole trajectory", papers=("2503.14286",)
    ),
    "topr_token": Recipe(
        "centred", TOPRToken(), "seq_mean_token_sum", about="ratio of the token", papers=("2503.14286",)
    ),
    "dppo_tv": Recipe(
        "group_norm", DPPOTV(), "token_mean", about="trust region on probabilities", papers=("2602.04879",)
    ),
    "dppo_kl": Recipe(
        "group_norm", DPPOKL(), "token_mean", about="trust region on the binary KL", papers=("2602.04879",)
    ),
    "dppo_tv_quadratic": Recipe(
        "centred", DPPOTVQuadratic(), "token_mean", about="an earlier default of prime-rl", papers=("2602.02276",)
    ),
    "ipo": Recipe("centred", IPO(), "token_mean", about="prime-rl"),
    "ce_gppo": Recipe(
        "group_norm",
        CEGPPO(),
        "token_mean",
        about="tokens beyond the bounds keep a part of their gradient",
        papers=("2509.20712",),
    ),
    "vespo": Recipe(
        "group_norm", VESPO(), "token_mean", about="a soft weight of the whole trajectory", papers=("2602.10693",)
    ),
    "m2po": Recipe(
        "group_norm",
        M2PO(),
        "token_mean",
        about="one bound for the step, from the second moment of harmful tokens",
        papers=("2510.01161",),
    ),
    "bapo": Recipe(
        "group_norm",
        BAPO(),
        "token_mean",
        about="bounds of the step move until good tokens have their share",
        papers=("2510.18927",),
    ),
    "aspo": Recipe(
        "group_norm", ASPO(), "token_mean", about="the ratio of good tokens is inverted", papers=("2510.06062",)
    ),
    "dcpo": Recipe(
        "smoothed",
        DCPO(),
        "seq_mean_token_mean",
        about="wider bounds for rarer tokens; rewards standardised over earlier groups of their prompt as well",
        papers=("2509.02333",),
    ),
    "second_moment": Recipe(
        "group_norm",
        Importance(),
        "token_mean",
        select=Select("second_moment"),
        about="masks the largest log ratios of all tokens; with `loss = ppo_clip` AReaL's variant of M2PO",
    ),
    "clip_cov": Recipe("group_norm", PPOClip(), "token_mean", select=Select("clip_cov"), papers=("2505.22617",)),
    "kl_cov": Recipe("group_norm", KLCov(), "token_mean", select=Select("kl_cov"), papers=("2505.22617",)),
    "decoupled_ppo": Recipe(
        "group_norm",
        PPOClip(),
        "token_mean",
        old="loglinear",
        correction=Correction(mode="mask", high=5.0),
        papers=("2110.00641", "2505.24298", "2512.06547"),
    ),
    "tis": Recipe(
        "group_norm",
        PPOClip(),
        "token_mean",
        old="trainer",
        correction=Correction(mode="truncate"),
        papers=("Yao et al. 2025",),
    ),
    "icepop": Recipe(
        "group_norm",
        PPOClip(),
        "token_mean",
        old="trainer",
        correction=Correction(mode="mask", low=0.5, high=5.0),
        papers=("2510.18855",),
    ),
    "mis": Recipe(
        "group_norm",
        PPOClip(),
        "token_mean",
        old="trainer",
        correction=Correction(mode="mask", level="sequence", low=0.5, high=2.0),
        papers=("Liu et al. 2025",),
    ),
    "mis_geometric": Recipe(
        "group_norm",
        PPOClip(),
        "token_mean",
        old="trainer",
        correction=Correction(mode="mask", level="geometric", low=0.95, high=1.05, rules=(Veto(1e-4),)),
        papers=("Liu et al. 2025",),
    ),
    "kpop": Recipe(
        "group_norm",
        PPOClip(),
        "token_mean",
        correction=Correction(rules=(KPop(2.0),)),
        about="drops tokens whose binary KL is above the bound",
    ),
    "opsm": Recipe(
        "group_norm",
        PPOClip(),
        "token_mean",
        correction=Correction(rules=(OPSM(0.05),)),
        about="drops tokens of negative advantage in sequences that have drifted by more than the bound",
        papers=("2512.02556",),
    ),
    "ppo": Recipe(
        "gae",
        PPOClip(),
        "token_mean",
        about="a critic: GAE over tokens, whitened over the batch; groups of one can be trained",
        papers=("1707.06347", "1506.02438"),
    ),
    "vapo": Recipe(
        "gae",
        PPOClip(clip_high=0.28),
        "token_mean",
        critic=Critic(lam=1.0, length_rate=0.05, alone_steps=50, imitation=0.1),
        about="a critic that is trained alone first; λ by length for the policy, 1 for the critic; successes are imitated",
        papers=("2504.05118",),
    ),
    "ce": Recipe("raw", CrossEntropy(), "token_mean", about="cross-entropy with the reward as weight"),
    "dpo": Recipe("every_pair", DPO(), "pair_mean", about="preferences, near a reference", papers=("2305.18290",)),
    "ipo_pairs": Recipe(
        "every_pair",
        IdentityPreference(),
        "pair_mean",
        about="preferences, with a target for the margin; `ipo` is another algorithm",
        papers=("2310.12036",),
    ),
    "simpo": Recipe(
        "best_against_worst", SimPO(), "pair_mean", about="preferences, without a reference", papers=("2405.14734",)
    ),
    "cpo": Recipe(
        "every_pair",
        CPO(),
        "pair_mean",
        about="preferences, near what is preferred, without a reference",
        papers=("2401.08417",),
    ),
    "orpo": Recipe(
        "every_pair",
        ORPO(),
        "pair_mean",
        about="preferences as odds, beside supervised learning of what is preferred",
        papers=("2403.07691",),
    ),
    "kto": Recipe(
        "raw",
        KTO(),
        "seq_mean_token_sum",
        about="right and wrong rollouts, without pairs, near a reference: a reward above 0 is right",
        papers=("2402.01306",),
    ),
    "opd": Recipe(
        "zero",
        Reinforce(),
        "token_mean",
        distill=Distill("sampled"),
        about="a teacher's log-prob of the sampled token",
        papers=("2306.13649",),
    ),
    "opd_topk": Recipe(
        "zero",
        Reinforce(),
        "token_mean",
        distill=Distill("reverse"),
        about="divergence over the teacher's most probable tokens",
        papers=("2306.13649",),
    ),
    "opsd": Recipe(
        "zero",
        Reinforce(),
        "token_mean",
        distill=Distill("jsd"),
        shown="more",
        about="self-distillation: the student is taught by itself, which is shown a solution",
        papers=("2601.18734",),
    ),
    "sdpo": Recipe(
        "zero",
        Reinforce(),
        "token_mean",
        distill=Distill("jsd"),
        shown="sibling",
        about="self-distillation: the student is taught by itself, which is shown another rollout that was right",
        papers=("2601.20802",),
    ),
}

LOSSES: dict[str, type[Loss]] = {recipe.loss.name: type(recipe.loss) for recipe in RECIPES.values()}
"""`algo.loss` -> its class. A loss exists only if a recipe names it."""

NOT_HERE: dict[str, str] = {
    "xpo": "pairs a rollout of the policy with one of the reference policy (arXiv 2405.21046), and all rollouts here are the policy's; "
    'use algo.name = "dpo", which is XPO without its bonus for what the reference would not say',
    "nash_md": "compares with rollouts of a geometric mixture of policy and reference (arXiv 2312.00886), and an engine samples each token from one "
    'model; use algo.name = "ipo_pairs", whose pairs are both the policy\'s: the mixture without a share of the reference (arXiv 2403.08635)',
    "prime": "trains a second model beside the policy, whose log-probs are the rewards of tokens (arXiv 2502.01456), and the trainer trains one; use "
    'algo.credit = "segment" with a process reward that stays as it is, or algo.name = "rloo"',
}
"""Names of algorithms that are asked for and are not here -> why not, and the nearest that is. docs/algorithms.md says what they would need."""

_VERL = "verl, `core_algos.compute_"
REFERENCES: dict[str, str] = {
    "grpo": f"paper; {_VERL}grpo_outcome_advantage` and `compute_policy_loss_vanilla`",
    "dapo": f"paper; {_VERL}policy_loss_vanilla`",
    "dr_grpo": "paper",
    "rloo": f"paper; {_VERL}rloo_outcome_advantage`",
    "reinforce": "Williams 1992; the cap as in slime and OAT",
    "reinforce++": f"paper; {_VERL}reinforce_plus_plus_outcome_advantage`",
    "reinforce++_baseline": f"{_VERL}reinforce_plus_plus_baseline_outcome_advantage`; the paper has a KL as well",
    "maxrl": "paper",
    "opo": f"paper; {_VERL}opo_outcome_advantage`",
    "gdpo": "paper",
    "pass@k": f"paper; {_VERL}grpo_passk_outcome_advantage` with `norm_adv_by_std_in_grpo` off",
    "pass@k_training": "papers, by trying every set; RUCAIBox/Passk_Training, `calc_adv`, for rewards of 0 and 1",
    "pods": "paper, by trying every subset",
    "gfpo": "paper",
    "chord": "agentscope-ai/Trinity-RFT, `SFTPhiLossFn` and `mu_schedule_function`",
    "luffy": "paper, without the deviation, with PPO's clip; the shaping is also `off_policy_reshape = p_div_p_0.1` of ElliottYan/LUFFY",
    "grpo_roc": "microsoft/rStar, `resample_of_correct`, with one as the least number of either kind",
    "gigpo": "paper, eq. 3 to 8, without the deviation; langfengQ/verl-agent, `compute_gigpo_outcome_advantage` with `mode = mean_norm`",
    "gspo": "paper, eq. 5",
    "gspo_token": f"paper, eq. 13; {_VERL}policy_loss_gspo`",
    "cispo": f"paper; {_VERL}policy_loss_cispo`",
    "sapo": f"paper; {_VERL}policy_loss_sapo`",
    "gmpo": f"paper; {_VERL}policy_loss_geo_mean`",
    "kimi": "paper, with the square per token as in ROLL and prime-rl",
    "topr": "paper",
    "topr_token": "ROLL's loss of this name",
    "dppo_tv": "paper",
    "dppo_kl": "paper",
    "dppo_tv_quadratic": "prime-rl's default of early 2026",
    "ipo": "prime-rl's loss of this name",
    "ce_gppo": "Kwai-Klear/CE-GPPO, `compute_gppo_loss_general_beta`, without its dual clip",
    "vespo": "paper, by TRL's `get_gamma_weights`",
    "m2po": "Infini-AI-Lab/M2PO, `core_algos.compute_m2po_policy_loss`",
    "bapo": "WooooDyy/BAPO, `compute_policy_loss_bapo`, without its dual clip",
    "aspo": "wizard-III/Archer2.0, `core_algos.compute_policy_loss_archer`, with one pair of bounds",
    "dcpo": "lime-RL/DCPO, `core_algos.compute_policy_loss_dcpo` with `clip_type = dynamic`, `compute_dcpo_outcome_advantage`",
    "second_moment": "AReaL, `get_m2po_loss_mask`",
    "clip_cov": "paper, without its draw",
    "kl_cov": f"paper; {_VERL}policy_loss_kl_cov`",
    "decoupled_ppo": "papers: the proximal policy of A-3PO, the cap of AReaL",
    "tis": "Yao et al. 2025",
    "icepop": "paper",
    "mis": "Liu et al. 2025",
    "mis_geometric": "Liu et al. 2025",
    "kpop": "AReaL's rule of this name",
    "opsm": "paper",
    "ppo": f"papers; {_VERL}gae_advantage_return` and `compute_value_loss`, without its clip of values",
    "vapo": "paper",
    "ce": "the definition of cross-entropy",
    "dpo": "paper, eq. 7; its constants: Mitchell 2023, arXiv 2403.00409 and 2404.19733",
    "ipo_pairs": "paper, eq. 17",
    "simpo": "paper, eq. 6",
    "cpo": "paper, eq. 5, with TRL's mean over tokens",
    "orpo": "paper, eq. 6 and 7",
    "kto": "paper, eq. 8, with the divergence of the rollouts themselves",
    "opd": "paper, with the gradient of the reverse KL on the sampled token",
    "opd_topk": "paper, eq. 1, over the teacher's most probable tokens",
    "opsd": "siyan-zhao/OPSD with `beta = 0.5` and `top_k_loss`, with a bucket for the rest",
    "sdpo": "lasgroup/SDPO with `alpha = 0.5` and a bucket for the rest, without its importance weight; its choice of the rollout that is shown",
}
"""Recipe -> the paper, or repository and function, whose formula the tests compute a second time and compare with, in float64."""
