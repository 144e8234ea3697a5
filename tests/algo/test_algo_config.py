"""Recipes and settings of the algorithm: what they resolve to, what is refused and with which remedy."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, get_args

import pytest
from pydantic import ValidationError

from headrace.algo.advantages import ADVANTAGES
from headrace.algo.config import AlgoConfig, ratio_problems
from headrace.algo.objective import AGGREGATIONS, objective_of, reach_of
from headrace.algo.policy.clipped import PPOClip
from headrace.algo.policy.loss import Cap, optional
from headrace.algo.policy.user import UserLoss
from headrace.algo.recipe_parts import KL, Correction
from headrace.algo.recipes import LOSSES, NOT_HERE, RECIPES, Recipe
from headrace.algo.rules import OPSM, KPop, Veto
from headrace.core.errors import ConfigError
from headrace.run.config import load_config
from headrace.run.learning_problems import caveats

MINIMAL = {
    "model": {"path": "m"},
    "task": {"kind": "reasoning_gym", "name": "chain_sum"},
    "reward": {"function": "reasoning_gym"},
}


def test_every_recipe_names_functions_that_exist():
    for name, recipe in RECIPES.items():
        assert recipe.advantage in ADVANTAGES and recipe.aggregation in AGGREGATIONS, name
        assert LOSSES[recipe.loss.name] is type(recipe.loss), "two losses of one name"


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_is_a_valid_algorithm(name):
    algo = AlgoConfig(name)
    assert algo.recipe == RECIPES[name] and callable(objective_of(algo))
    assert reach_of(algo) == "step" or RECIPES[name].select.kind == "none"


def test_constants_are_those_of_the_papers():
    """Written down a second time, from the reference and the papers: a typo in the table would train another algorithm."""
    of = {name: AlgoConfig(name).recipe for name in RECIPES}
    constants = {name: recipe.loss.constants() for name, recipe in of.items()}
    plain = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0}
    assert {name: own for name, own in constants.items() if own not in ({}, plain)} == {
        "vapo": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 0.0},
        "dapo": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 0.0},
        "srft": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0, "good_weight": 0.1},
        "grpo_roc": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 0.0},
        "gspo": {"clip_low": 0.05, "clip_high": 0.05},
        "gspo_token": {"clip_low": 0.05, "clip_high": 0.05},
        "cispo": {"clip_low": 1.0, "clip_high": 4.0},
        "gmpo": {"clip_low": 0.4, "clip_high": 0.4},
        "m2po": {"clip_low": 0.3, "clip_high": 0.5, "tau": 0.04},
        "bapo": {"clip_low": 0.4, "clip_high": 0.2, "clip_low_least": 0.1, "clip_high_most": 2.0, "good_share": 0.4},
        "aspo": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
        "dcpo": {"clip_low": 0.16, "clip_high": 0.2, "cap": 10.0},
        "sapo": {"tau": 1.0, "tau_negative": 1.05},
        "ce_gppo": {"clip_low": 0.2, "clip_high": 0.2, "beyond_low": 0.75, "beyond_high": 1.0},
        "vespo": {
            "kernel_power": 2.0,
            "kernel_rate": 3.0,
            "kernel_power_negative": 3.0,
            "kernel_rate_negative": 2.0,
        },
        "kimi": {"tau": 0.1},
        **{name: {"cap": 2.0} for name in ("reinforce", "opd", "opd_topk", "opd_student_topk", "gkd", "opsd", "sdpo")},
        "dppo_tv": {"delta": 0.2, "cap": 20.0},
        "dppo_kl": {"delta": 0.05, "cap": 20.0},
        "dppo_tv_quadratic": {"delta": 0.2, "penalty": 1e-3},
        "ipo": {"delta": 0.3, "penalty": 0.0},
        "kl_cov": {"penalty": 1.0},
        "dpo": {"pair_beta": 0.1, "pair_smoothing": 0.0, "pair_flips": 0.0, "pair_nll": 0.0},
        "cpo": {"pair_beta": 0.1, "pair_nll": 1.0},
        "orpo": {"pair_beta": 0.1},
        "kto": {"pair_beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
        "ipo_pairs": {"pair_beta": 0.1},
        "simpo": {"pair_beta": 2.0, "pair_margin": 1.0},
    }
    assert (of["second_moment"].select.kind, of["second_moment"].select.tau) == ("second_moment", 0.04)
    assert [(of[name].select.kind, of[name].select.share) for name in ("clip_cov", "kl_cov")] == [
        ("clip_cov", 2e-4),
        ("kl_cov", 2e-4),
    ]
    corrections = {name: recipe.correction for name, recipe in of.items() if recipe.correction != Correction()}
    assert corrections == {
        "decoupled_ppo": Correction(mode="mask", level="token", low=0.0, high=5.0),
        "tis": Correction(mode="truncate", level="token", low=0.0, high=2.0),
        "icepop": Correction(mode="mask", level="token", low=0.5, high=5.0),
        "mis": Correction(mode="mask", level="sequence", low=0.5, high=2.0),
        "mis_geometric": Correction(mode="mask", level="geometric", low=0.95, high=1.05, rules=(Veto(1e-4),)),
        "kpop": Correction(rules=(KPop(2.0),)),
        "opsm": Correction(rules=(OPSM(0.05),)),
    }
    assert {name for name, recipe in of.items() if recipe.old == "trainer"} == {"tis", "icepop", "mis", "mis_geometric"}
    assert {name for name, recipe in of.items() if recipe.old == "loglinear"} == {"decoupled_ppo"}
    assert {name for name, advantage in ADVANTAGES.items() if advantage.whitened} == {
        "return_to_go",
        "group_baseline",
        "gdpo",
    }
    alone = {name for name, advantage in ADVANTAGES.items() if not advantage.compares}
    assert alone == {"raw", "return_to_go", "gae", "implicit", "zero"}
    assert {name for name, advantage in ADVANTAGES.items() if not advantage.reads_sum} == {"gdpo", "zero"}
    assert (of["opd"].distill.kind, of["opd"].distill.coef, of["opd_topk"].distill.kind) == ("sampled", 1.0, "reverse")
    assert [(of[name].distill.kind, of[name].distill.beta) for name in ("opsd", "sdpo")] == [("jsd", 0.5)] * 2
    assert {name: recipe.shown for name, recipe in of.items() if recipe.shown} == {"opsd": "more", "sdpo": "sibling"}


@pytest.mark.parametrize("loss", sorted(name for name, loss in LOSSES.items() if not loss.whole))
def test_a_loss_brings_the_constants_of_its_own_recipe(loss):
    own = next(recipe for recipe in RECIPES.values() if recipe.loss.name == loss)
    select = {"kind": "kl_cov"} if loss == "kl_cov" else {}
    found = AlgoConfig("dapo", loss=loss, select=select).recipe
    if loss == "ppo_clip":
        assert found == RECIPES["dapo"]  # which it is made of: its own choice stays
        return
    assert found.loss == own.loss == LOSSES[loss]()
    assert (found.advantage, found.aggregation) == ("group_norm", "token_mean")


def test_a_constant_that_is_given_beats_that_of_the_loss():
    assert AlgoConfig(loss="cispo", clip_high=2.0).recipe.loss.constants() == {"clip_low": 1.0, "clip_high": 2.0}
    assert AlgoConfig("dapo", clip_low=0.1).recipe.loss == PPOClip(clip_low=0.1, clip_high=0.28)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_a_setting_is_taken_by_the_losses_that_have_the_constant_and_refused_by_the_others(loss):
    """Every constant of every loss, tried with this one: none is ignored."""
    base = {"select": {"kind": "kl_cov"}} if loss == "kl_cov" else {}
    for name in {name for one in LOSSES.values() for name in one.reads()}:
        value = 3.0 if name in ("dual_clip", "clip_high_most", "cap") else 0.123
        chosen = {"name": loss} if LOSSES[loss].whole else {"loss": loss, **base}
        if name in LOSSES[loss].reads():
            assert AlgoConfig(**chosen, **{name: value}).recipe.loss.constants()[name] == value
        else:
            with pytest.raises(ValidationError, match=f"algo.{name} has no meaning with algo.loss = {loss}"):
                AlgoConfig(**chosen, **{name: value})


@pytest.mark.parametrize("name", ["pass@k", "reinforce++_baseline"])
def test_names_with_signs_are_valid_toml(name):
    assert load_config(MINIMAL, [f'algo.name="{name}"']).algo.name == name
    assert load_config(MINIMAL, [f"algo.name={name}"]).algo.name == name


def test_every_advantage_is_reached_by_a_recipe():
    assert {recipe.advantage for recipe in RECIPES.values()} == set(ADVANTAGES)


def test_the_default_is_grpo():
    assert AlgoConfig().recipe == Recipe(
        "group_norm", PPOClip(clip_low=0.2, clip_high=0.2), "token_mean", old="sampler"
    )


def test_settings_replace_the_values_of_the_recipe():
    recipe = AlgoConfig("rloo", clip_high=0.28, aggregation="token_mean").recipe
    assert recipe == dataclasses.replace(RECIPES["rloo"], loss=PPOClip(clip_high=0.28), aggregation="token_mean")
    nested = AlgoConfig("icepop", correction={"high": 3.0}, kl={"coef": 0.01}).recipe
    assert nested.correction == Correction(mode="mask", level="token", low=0.5, high=3.0) and nested.kl == KL(coef=0.01)
    assert dataclasses.replace(nested, correction=RECIPES["icepop"].correction, kl=KL()) == RECIPES["icepop"]


def test_a_config_survives_the_way_to_the_trainer():
    algo = AlgoConfig(
        "tis", correction={"high": 1.2}, kl={"coef": 0.1, "place": "reward"}, lag={"kind": "trim", "maximum": 2}
    )
    assert AlgoConfig(**dataclasses.asdict(algo)) == algo


def test_settings_come_from_toml_and_sets():
    config = load_config(MINIMAL, ["algo.name=tis", "algo.correction.high=1.2", "algo.kl.coef=0.01"])
    assert config.algo.recipe.correction == Correction(mode="truncate", level="token", low=0.0, high=1.2)
    assert config.algo.reference_in_loss and not config.algo.reference_in_reward


def test_a_users_functions_are_seen_from_the_config(tmp_path):
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "m"\n[task]\nkind = "reasoning_gym"\nname = "chain_sum"\n[reward]\nfunction = "reasoning_gym"\n'
        '[algo]\nloss = "mine.py:loss"\nadvantage = "raw"\n'
    )
    algo = load_config(tmp_path / "run.toml").algo
    assert algo.loss == f"{tmp_path / 'mine.py'}:loss" and algo.advantage == "raw"
    assert algo.recipe.loss == UserLoss(algo.loss)


def test_length_constant_is_filled_in_once():
    assert AlgoConfig("dr_grpo").with_length(12).length_constant == 12
    assert AlgoConfig("dr_grpo", length_constant=7).with_length(12).length_constant == 7
    assert AlgoConfig().with_length(12) == AlgoConfig()


def test_what_a_group_needs():
    assert AlgoConfig().compares and AlgoConfig().min_rollouts == 2
    for name in ("reinforce", "reinforce++", "opd", "ce", "kto"):
        assert not AlgoConfig(name).compares and AlgoConfig(name).min_rollouts == 1
    assert not AlgoConfig(distill={"kind": "sampled"}).compares  # the teacher teaches where rewards are equal
    assert AlgoConfig("opd").teacher_top == 0 and AlgoConfig("opd_topk", distill={"k": 8}).teacher_top == 8
    assert (
        AlgoConfig("opd_topk", distill={"model": "t"}).teacher_top == AlgoConfig("gkd").teacher_top == 0
    )  # none is served


def test_a_product_over_long_sequences_is_warned_of():
    (told,) = caveats(AlgoConfig("mis"), 2048, max_lag=1)
    assert "2048 tokens" in told and "geometric" in told
    assert (
        caveats(AlgoConfig("mis"), 64)
        == caveats(AlgoConfig("mis_geometric"), 2048)
        == caveats(AlgoConfig(), 2048)
        == []
    )


@pytest.mark.parametrize(
    "plain",
    [{"loss": "ce"}, {"loss": "importance"}, {"old": "trainer"}, {"name": "tis", "correction": {"mode": "none"}}],
)
def test_lag_without_clip_or_correction_is_warned_of(plain):
    (told,) = caveats(AlgoConfig(**plain), 64, max_lag=2)
    assert "staleness.max_lag = 2" in told and "2 of 128" in told and "algo.name = tis" in told
    assert caveats(AlgoConfig(**plain), 64, max_lag=0) == []


def test_every_recipe_but_cross_entropy_has_a_trust_region():
    assert [name for name in RECIPES if caveats(AlgoConfig(name), 64, max_lag=1)] == ["ce"]
    assert caveats(AlgoConfig(loss="mine.py:loss"), 64, max_lag=1) == [], "nobody knows"
    assert caveats(AlgoConfig(old="trainer", correction={"veto": 1e-4}), 64, max_lag=1) == []


@pytest.mark.parametrize("wrong", [{"clip_low": 0}, {"clip_low": 1.5}, {"clip_hi": 0.2}, {"correction": {"lo": 1}}])
def test_bad_settings_are_refused(wrong):
    with pytest.raises(ValidationError):
        AlgoConfig(**wrong)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": "grop"}, "did you mean grpo?"),
        ({"loss": "ppo"}, "algo.loss = ppo does not exist"),
        ({"advantage": "group_nrom"}, "did you mean group_norm?"),
        ({"loss": "kimi", "clip_low": 0.1}, "no meaning with algo.loss = kimi; remove it"),
        (
            {"loss": "reinforce", "clip_low": 0.1, "clip_high": 0.1},
            "have no meaning with algo.loss = reinforce; remove them",
        ),
        ({"dual_clip": 0.5}, "use more than 1"),
        ({"name": "aspo", "dual_clip": 0.0}, "use more than 1 (3 is usual)"),
        ({"name": "dcpo", "cap": 0.9}, "use more than 1 (10 is usual)"),
        ({"name": "bapo", "clip_low": 0.05}, "set the first no smaller than the second"),
        ({"name": "bapo", "clip_high": 3.0}, "the third no larger than the fourth"),
        ({"denominator": "kept"}, "no rule takes anything out"),
        ({"correction": {"mode": "truncate"}}, "twice"),
        ({"correction": {"high": 3.0}}, "need algo.correction.mode"),
        ({"name": "icepop", "correction": {"low": 6.0}}, "is not below"),
        ({"lag": {"decay": 0.5}}, "needs algo.lag.kind = exponential"),
        ({"lag": {"kind": "exponential", "maximum": 2}}, "needs algo.lag.kind = trim"),
        ({"lag": {"kind": "trim"}}, "needs algo.lag.maximum"),
        ({"length_constant": 512}, "use token_sum, or remove it"),
        ({"name": "ce", "distill": {"kind": "forward"}}, "algo.loss = reinforce"),
        ({"name": "opd_topk", "lag": {"kind": "exponential"}}, "algo.lag is about the policy loss"),
        ({"name": "opd_topk", "correction": {"veto": 1e-4}}, "algo.correction is about the policy loss"),
        ({"name": "opd_topk", "cap": 3.0}, "algo.cap is about the policy loss"),
        ({"select": {"tau": 0.1}}, "needs algo.select.kind = second_moment"),
        ({"name": "second_moment", "select": {"fraction": 0.1}}, "clip_cov, kl_cov or entropy"),
        ({"subset": {"keep": 3}}, "algo.subset.keep needs algo.subset.kind"),
        ({"name": "gfpo", "subset": {"by": "tidy"}}, "algo.subset.by needs algo.subset.kind = cleanest"),
        ({"name": "gfpo", "credit": "turn"}, 'set algo.credit = "rollout"'),
        ({"name": "dpo", "subset": {"kind": "shortest"}}, "chooses its own pairs"),
        ({"name": "pods", "subset": {"keep": 1}}, "raise it to 2 or more"),
        ({"entropy": {"coef": 0.1, "change": 0.1}}, "needs algo.entropy.target"),
        ({"name": "dpo", "entropy": {"coef": 0.1}}, "algo.entropy weighs single tokens"),
        ({"attempts": 2}, "use algo.name = pass@k_training, or remove it"),
        ({"gamma": 0.9}, 'set algo.credit = "turn", or algo.name = "reinforce++"'),
        ({"name": "reinforce++", "lam": 0.9}, 'set algo.name = "ppo" or algo.credit = "turn", or remove algo.lam'),
        ({"loss": "kl_cov"}, "belong together"),
        ({"select": {"kind": "clip_cov"}, "distill": {"kind": "sampled"}}, "remove one of them"),
        ({"kl": {"coef": 0.1, "estimator": "k1"}}, "expected gradient of zero on policy"),
        ({"kl": {"coef": 0.1, "place": "reward", "unbiased": True}}, "remove it"),
        ({"kl": {"coef": 0.1, "estimator": "k2", "unbiased": True}}, "use k3"),
        ({"kl": {"estimator": "k2"}}, "algo.kl.coef > 0"),
        ({"kl": {"target": 0.1}}, "algo.kl.coef > 0"),
        ({"kl": {"coef": 0.1, "place": "reward", "every": 4}}, 'set algo.kl.place = "loss", or remove algo.kl.every'),
        ({"kl": {"coef": 0.1, "change": 0.2}}, "needs algo.kl.target"),
        (
            {"kl": {"coef": 0.1, "place": "reward", "target": 0.1}},
            'set algo.kl.place = "loss", or remove algo.kl.target',
        ),
        ({"distill": {"coef": 2.0}}, "needs algo.distill.kind"),
        ({"name": "opd", "distill": {"k": 4}}, "forward, reverse or jsd"),
        ({"name": "opd_topk", "distill": {"beta": 0.1}}, "needs algo.distill.kind = jsd"),
        (
            {"name": "gkd", "distill": {"k": 4}},
            "over the teacher's or the student's most probable tokens, or remove it",
        ),
        ({"name": "opd", "distill": {"over": "vocabulary"}}, "algo.distill.over is of distributions that are compared"),
        ({"name": "opd", "distill": {"temperature": 2.0}}, "algo.distill.temperature is of distributions"),
        ({"distill": {"model": "t"}}, "needs algo.distill.kind"),
        ({"name": "gkd", "clip_low": 0.1}, "remove it"),
        ({"name": "gkd", "old": "trainer", "correction": {"mode": "mask"}}, "needs no importance weight: remove it"),
        ({"advantage": "zero"}, "would teach nothing"),
        ({"name": "gdpo", "length_penalty": 0.1}, "does not look at; remove it"),
        ({"name": "opd", "kl": {"coef": 0.1, "place": "reward"}}, "does not look at; remove it"),
        ({"loss": "my.py:fn", "old": "trainer"}, "remove algo.old"),
        ({"loss": "my.py:fn", "clip_low": 0.2}, "no meaning with algo.loss = my.py:fn"),
    ],
)
def test_bad_pairs_are_refused_with_the_remedy(given, words):
    with pytest.raises(ValidationError) as refused:
        AlgoConfig(**given)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "followed",
    [
        {"gamma": 0.9, "credit": "turn"},
        {"gamma": 0.9, "name": "reinforce++"},
        {"lam": 0.9, "credit": "turn"},
        {"attempts": 2, "name": "pass@k_training"},
        {"name": "gfpo", "subset": {"by": "tidy", "kind": "cleanest"}},
        {"entropy": {"change": 0.1, "target": 0.3}},
        {"select": {"kind": "entropy", "fraction": 0.1}},
        {"name": "bapo", "clip_low": 0.05, "clip_low_least": 0.05},
        {"name": "bapo", "clip_high": 3.0, "clip_high_most": 3.0},
    ],
)
def test_remedies_can_be_followed(followed):
    assert AlgoConfig(**followed).recipe


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"old": "trainer", "clip_high": 0.1}, "set train.epochs or train.minibatches"),
        ({"name": "kimi", "old": "trainer"}, "use algo.old = sampler"),
    ],
)
def test_a_bound_that_no_ratio_reaches_is_refused_and_one_of_several_updates_is_not(given, words):
    (problem,) = ratio_problems(AlgoConfig(**given), updates=1)
    assert words in problem
    assert not list(ratio_problems(AlgoConfig(**given), updates=2))
    assert not list(ratio_problems(AlgoConfig(**{**given, "old": "sampler"}), updates=1))


@pytest.mark.parametrize("name", [*NOT_HERE, "XPO", "nash-md", "NashMD"])
def test_what_is_not_here_is_refused_by_its_name_with_what_is(name):
    with pytest.raises(ValidationError, match=f"algo.name = {name} is not here: it .*; use algo") as refused:
        AlgoConfig(name)
    for setting, value in re.findall(r'algo\.(name|credit) = "(\w+)"', str(refused.value)):
        assert AlgoConfig(**{setting: value}).recipe
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text().partition("## What is not here")[2]
    assert {one for one in NOT_HERE if f"**`{one}`**" in page} == set(NOT_HERE)


def test_k1_is_offered_in_the_reward():
    assert AlgoConfig(kl={"coef": 0.1, "place": "reward", "estimator": "k1"}).reference_in_reward


def test_the_controllers_half_imports_no_torch():
    code = "import sys, headrace.algo.training_rows, headrace.trainer.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_reward_by_which_rollouts_are_clean_must_be_there_when_a_run_begins():
    """An environment may give rewards of names that only it knows."""
    functions = [{"function": "reasoning_gym"}, {"function": "r.py:tidy", "weight": 0.0}]
    rewarded = MINIMAL | {"reward": {"functions": functions}}
    given = ["algo.name=grpo_roc", "algo.subset.by=tdy"]
    with pytest.raises(ConfigError, match="is the name of no reward; there are reasoning_gym, tidy. Use one of them"):
        load_config(rewarded, given)
    for sets in (["algo.name=grpo_roc", "algo.subset.by=tidy"], [*given, "environment.function=e.py:play"]):
        load_config(rewarded, sets)


def test_a_constant_without_bounds_is_a_setting_too():
    assert optional(float) == float | None
    assert optional(Cap) == Annotated[float | None, *get_args(Cap)[1:]]


def test_the_reference_of_an_adapter_does_not_move():
    moving = ["algo.kl.coef=0.1", "algo.kl.every=4"]
    with pytest.raises(
        ConfigError, match=r"an adapter's is its base, which stays; remove it, or train all weights \(lora.rank = 0\)"
    ):
        load_config(MINIMAL, [*moving, "lora.rank=4"])
    assert load_config(MINIMAL, moving).algo.recipe.kl.every == 4
