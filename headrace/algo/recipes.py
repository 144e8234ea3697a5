"""An algorithm is a value: one literal table of recipes, which is also the list of all losses. Imports no torch.

A recipe is an advantage function, a loss, an aggregation and a handful of constants; `AlgoConfig` may replace each of them.
docs/algorithms.md prints the table.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from headrace.algo.policy.clipped import ASPO, BAPO, CEGPPO, DCPO, GMPO, GSPO, M2PO, SRFT, GSPOToken, PPOClip
from headrace.algo.policy.loss import Loss
from headrace.algo.policy.pairs import CPO, DPO, KTO, ORPO, IdentityPreference, SimPO
from headrace.algo.policy.region import DPPOKL, DPPOTV, IPO, SAPO, DPPOTVQuadratic, Kimi, KLCov
from headrace.algo.policy.weighted import CISPO, TOPR, VESPO, CrossEntropy, Importance, Reinforce, TOPRToken
from headrace.algo.recipe_parts import (
    KL,
    Aggregation,
    Correction,
    Credit,
    Critic,
    Demonstrated,
    Distill,
    Entropy,
    Experience,
    LagWeight,
    LearnedReward,
    Old,
    Select,
    Subset,
)
from headrace.algo.rules import OPSM, RULES, KPop, Veto


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
    experience: Experience = Experience()
    kl: KL = KL()
    distill: Distill = Distill()
    entropy: Entropy = Entropy()
    critic: Critic = Critic()
    """Only `advantage = gae` has one."""
    process: LearnedReward = LearnedReward()
    """Only `advantage = implicit` has one."""
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
    "srft": Recipe(
        "group_norm",
        SRFT(),
        "token_mean",
        demonstrations=Demonstrated(kind="compared", imitation=0.5),
        about="given answers are compared, and imitated where the policy is sure; its own good rollouts count more where it is not",
        papers=("2506.19767",),
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
    "prime": Recipe(
        "implicit",
        PPOClip(),
        "token_mean",
        about="rewards of tokens from a second adapter, which learns in each step what is right; beside outcomes, whitened over the batch",
        papers=("2502.01456",),
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
    "opd_student_topk": Recipe(
        "zero",
        Reinforce(),
        "token_mean",
        distill=Distill("reverse", over="student_top"),
        about="divergence over the student's most probable tokens, from a teacher that the trainer holds",
        papers=("2306.13649", "2601.20802"),
    ),
    "gkd": Recipe(
        "zero",
        Reinforce(),
        "token_mean",
        distill=Distill("jsd", over="vocabulary"),
        about="divergence over the whole vocabulary, from a teacher that the trainer holds",
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
    "rlep": "replays rollouts that an earlier run has collected (arXiv 2507.07451), and all rollouts here are the run's own; use algo.experience, which trains the good "
    'ones of this run again, with algo.name = "dapo"',
    "exgrpo": "chooses what it trains again by difficulty and by entropy (arXiv 2510.02245), and neither is known when a group is made; use algo.experience, which takes "
    'those of the highest reward, with algo.name = "grpo"',
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
    "srft": "paper, eq. 8, 9 and 12, as others quote them, with LUFFY's shaping; the authors' code is said to imitate by exp(H)",
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
    "prime": "paper; verl, `recipe/prime`, `prime_core_algos.compute_rloo_advantage_return` and `compute_ce_dpo_loss_rm`",
    "ce": "the definition of cross-entropy",
    "dpo": "paper, eq. 7; its constants: Mitchell 2023, arXiv 2403.00409 and 2404.19733",
    "ipo_pairs": "paper, eq. 17",
    "simpo": "paper, eq. 6",
    "cpo": "paper, eq. 5, with TRL's mean over tokens",
    "orpo": "paper, eq. 6 and 7",
    "kto": "paper, eq. 8, with the divergence of the rollouts themselves",
    "opd": "paper, with the gradient of the reverse KL on the sampled token",
    "opd_topk": "paper, eq. 1, over the teacher's most probable tokens",
    "opd_student_topk": "lasgroup/SDPO, `compute_self_distillation_loss` with `distillation_topk` and `add_tail`: the student's most probable tokens",
    "gkd": "paper, eq. 1, over the whole vocabulary",
    "opsd": "siyan-zhao/OPSD with `beta = 0.5` and `top_k_loss`, with a bucket for the rest",
    "sdpo": "lasgroup/SDPO with `alpha = 0.5` and a bucket for the rest, without its importance weight; its choice of the rollout that is shown",
}
"""Recipe -> the paper, or repository and function, whose formula the tests compute a second time and compare with, in float64."""
