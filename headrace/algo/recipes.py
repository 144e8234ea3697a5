"""An algorithm is a value: one literal table of recipes. Imports no torch.

A recipe is an advantage function, a loss, an aggregation and a handful of constants; `AlgoConfig` may replace each of them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

MAX_LOG_RATIO = 20.0
"""A ratio beyond exp(±20) only says that something is broken; the clamp keeps it finite."""
MIN_REST = 1e-6
"""A log-prob nearer to 0 leaves "any other token" no probability that a binary divergence could divide by."""

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum"]
Denominator = Literal["all", "kept"]
Old = Literal["sampler", "trainer", "loglinear"]
Level = Literal["token", "sequence", "geometric"]
Mode = Literal["none", "truncate", "mask"]
Estimator = Literal["k1", "k2", "k3"]


class Correction(NamedTuple):
    """Weights against the gap between sampler and trainer (`algo/loss/corrections.py`)."""

    mode: Mode = "none"
    level: Level = "token"
    low: float = 0.0
    high: float = 2.0
    veto: float = 0.0
    kpop: float = 0.0
    opsm: float = 0.0


class LagWeight(NamedTuple):
    """What a token's lag makes of its loss (`algo/loss/corrections.py`)."""

    kind: Literal["constant", "exponential", "trim"] = "constant"
    decay: float = 0.9
    maximum: float = 1.0


class Select(NamedTuple):
    """Tokens chosen by looking at the whole optimizer step (`algo/loss/selection.py`)."""

    kind: Literal["none", "m2po", "clip_cov", "kl_cov"] = "none"
    tau: float = 0.04
    fraction: float = 2e-4


class KL(NamedTuple):
    """Divergence from a reference model (`algo/loss/kl.py`)."""

    coef: float = 0.0
    estimator: Estimator = "k3"
    place: Literal["loss", "reward"] = "loss"
    unbiased: bool = False


class Distill(NamedTuple):
    """What a teacher adds (`algo/loss/distill.py`)."""

    kind: Literal["none", "sampled", "forward", "reverse", "jsd"] = "none"
    coef: float = 1.0
    k: int = 32
    beta: float = 0.5


class Recipe(NamedTuple):
    """An algorithm. The constants are read by the losses that `READS` names."""

    advantage: str
    loss: str
    aggregation: Aggregation
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    tau: float = 1.0
    tau_negative: float = 1.05
    delta: float = 0.2
    cap: float = 2.0
    penalty: float = 1e-3
    old: Old = "sampler"
    correction: Correction = Correction()
    lag: LagWeight = LagWeight()
    select: Select = Select()
    kl: KL = KL()
    distill: Distill = Distill()


READS: dict[str, tuple[str, ...]] = {
    "ppo_clip": ("clip_low", "clip_high", "dual_clip"),
    "importance": (),
    "reinforce": ("cap",),
    "gspo": ("clip_low", "clip_high"),
    "gspo_token": ("clip_low", "clip_high"),
    "cispo": ("clip_low", "clip_high"),
    "sapo": ("tau", "tau_negative"),
    "dppo_tv": ("delta", "cap"),
    "dppo_kl": ("delta", "cap"),
    "dppo_tv_quadratic": ("delta", "penalty"),
    "ipo": ("delta", "penalty"),
    "kimi": ("tau",),
    "topr": (),
    "topr_token": (),
    "gmpo": ("clip_low", "clip_high"),
    "kl_cov": ("penalty",),
    "ce": (),
}
"""Loss -> the constants of the recipe that it is called with; one that it does not read is refused when it is given."""

CUTS = ("ppo_clip", "gspo", "gspo_token", "gmpo", "dppo_tv", "dppo_kl", "dppo_tv_quadratic", "ipo")
"""Losses whose bound takes a token's gradient away; that of the others, where they have one, holds a weight."""

RULES = ("mask", "veto", "kpop", "opsm", "lag", "m2po", "clip_cov", "mine")
"""What may take a token's policy loss out; `mine` is a user's own loss."""

CONSTANTS = ("clip_low", "clip_high", "dual_clip", "tau", "tau_negative", "delta", "cap", "penalty")

COMPARING = ("group_norm", "centred", "leave_one_out", "maxrl", "opo", "gdpo", "pass@k", "group_baseline")
"""Advantages that compare the rollouts of a group: one without contrast gives zeros."""
ADVANTAGE_NAMES = (*COMPARING, "raw", "return_to_go", "zero")
WHITENED = ("return_to_go", "group_baseline", "gdpo")
"""Advantages that are whitened over the valid tokens of the whole batch."""

# The default clip is around the *sampler's* log-probs, so that its ratio holds staleness and engine/trainer mismatch
# together: a second importance weight would count them twice. Recipes with a correction anchor at the trainer's.
# gspo, mis_geometric, opsm: 0.05 is five times what rounding makes of the mean of a sequence (docs/algorithms.md); the papers' bounds
# are inside it, because theirs is a ratio to the trainer's own log-probs.
# grpo: token_mean is DAPO's denominator (arXiv 2503.14476); the paper's own seq_mean_token_mean favours long wrong answers.
# decoupled_ppo: what is above its cap of 5 is taken out, as AReaL does it, rather than clamped.
# rloo, reinforce: the sum over a sequence's tokens is the unbiased policy gradient (arXiv 2402.14740).
RECIPES: dict[str, Recipe] = {
    "grpo": Recipe("group_norm", "ppo_clip", "token_mean"),
    "dapo": Recipe("group_norm", "ppo_clip", "token_mean", clip_high=0.28),
    "dr_grpo": Recipe("centred", "ppo_clip", "token_sum"),
    "gspo": Recipe("group_norm", "gspo", "seq_mean_token_mean", clip_low=0.05, clip_high=0.05),
    "gspo_token": Recipe("group_norm", "gspo_token", "seq_mean_token_mean", clip_low=0.05, clip_high=0.05),
    "cispo": Recipe("group_norm", "cispo", "token_mean", clip_low=1.0, clip_high=4.0),
    "sapo": Recipe("group_norm", "sapo", "seq_mean_token_mean", tau=1.0, tau_negative=1.05),
    "rloo": Recipe("leave_one_out", "ppo_clip", "seq_mean_token_sum"),
    "reinforce": Recipe("raw", "reinforce", "seq_mean_token_sum"),
    "reinforce++": Recipe("return_to_go", "ppo_clip", "token_mean"),
    "reinforce++_baseline": Recipe("group_baseline", "ppo_clip", "token_mean"),
    "maxrl": Recipe("maxrl", "ppo_clip", "seq_mean_token_sum"),
    "topr": Recipe("centred", "topr", "seq_mean_token_sum"),
    "topr_token": Recipe("centred", "topr_token", "seq_mean_token_sum"),
    "kimi": Recipe("centred", "kimi", "seq_mean_token_sum", tau=0.1),
    "gmpo": Recipe("group_norm", "gmpo", "seq_mean_token_mean", clip_low=0.4, clip_high=0.4),
    "m2po": Recipe("group_norm", "importance", "token_mean", select=Select("m2po")),
    "decoupled_ppo": Recipe(
        "group_norm", "ppo_clip", "token_mean", old="loglinear", correction=Correction("mask", high=5.0)
    ),
    "tis": Recipe("group_norm", "ppo_clip", "token_mean", old="trainer", correction=Correction("truncate")),
    "icepop": Recipe(
        "group_norm", "ppo_clip", "token_mean", old="trainer", correction=Correction("mask", low=0.5, high=5.0)
    ),
    "mis": Recipe(
        "group_norm", "ppo_clip", "token_mean", old="trainer", correction=Correction("mask", "sequence", 0.5, 2.0)
    ),
    "mis_geometric": Recipe(
        "group_norm",
        "ppo_clip",
        "token_mean",
        old="trainer",
        correction=Correction("mask", "geometric", 0.95, 1.05, veto=1e-4),
    ),
    "kpop": Recipe("group_norm", "ppo_clip", "token_mean", correction=Correction(kpop=2.0)),
    "opsm": Recipe("group_norm", "ppo_clip", "token_mean", correction=Correction(opsm=0.05)),
    "dppo_tv": Recipe("group_norm", "dppo_tv", "token_mean", cap=20.0),
    "dppo_kl": Recipe("group_norm", "dppo_kl", "token_mean", delta=0.05, cap=20.0),
    "dppo_tv_quadratic": Recipe("centred", "dppo_tv_quadratic", "token_mean"),
    "ipo": Recipe("centred", "ipo", "token_mean", delta=0.3, penalty=0.0),
    "clip_cov": Recipe("group_norm", "ppo_clip", "token_mean", select=Select("clip_cov")),
    "kl_cov": Recipe("group_norm", "kl_cov", "token_mean", penalty=1.0, select=Select("kl_cov")),
    "gdpo": Recipe("gdpo", "ppo_clip", "token_mean"),
    "opo": Recipe("opo", "ppo_clip", "seq_mean_token_sum"),
    "pass@k": Recipe("pass@k", "ppo_clip", "token_mean"),
    "ce": Recipe("raw", "ce", "token_mean"),
    "opd": Recipe("zero", "reinforce", "token_mean", distill=Distill("sampled")),
    "opd_topk": Recipe("zero", "reinforce", "token_mean", distill=Distill("reverse")),
}
