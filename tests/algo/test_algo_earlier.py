"""Runs of an earlier version are read with the constants that they were trained with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.algo.policy.clipped import GSPO, GSPOToken, PPOClip
from headrace.algo.policy.region import IPO, DPPOTVQuadratic
from headrace.algo.recipe_parts import Correction
from headrace.algo.recipes import RECIPES, Recipe
from headrace.algo.rules import OPSM, Veto
from headrace.run.config import dump_config, load_config, read_config

MINIMAL = {
    "model": {"path": "m"},
    "task": {"kind": "reasoning_gym", "name": "chain_sum"},
    "reward": {"function": "reasoning_gym"},
}
THEN = {
    "gspo": Recipe("group_norm", GSPO(clip_low=3e-4, clip_high=4e-4), "seq_mean_token_mean"),
    "gspo_token": Recipe("group_norm", GSPOToken(clip_low=3e-4, clip_high=4e-4), "seq_mean_token_mean"),
    "mis_geometric": replace(
        RECIPES["tis"], correction=Correction(mode="mask", level="geometric", low=0.99, high=1.001, rules=(Veto(1e-4),))
    ),
    "opsm": Recipe("group_norm", PPOClip(), "token_mean", correction=Correction(rules=(OPSM(1e-4),))),
    "dppo_kl": Recipe("centred", DPPOTVQuadratic(), "token_mean"),
    "ipo": Recipe("centred", IPO(delta=0.1, penalty=1e-3), "token_mean"),
    "grpo": RECIPES["grpo"],
}
"""Rows of the table as it was."""


NEW = ("denominator", "extract_truncated", "gamma", "lam")
"""Settings that they lack."""


def as_written_then(directory: Path, *sets: str, name: str = "grpo") -> Path:
    """The config.toml of a run from before `algo.denominator`."""
    lines = dump_config(load_config(MINIMAL, list(sets))).splitlines()
    kept = [line.replace('name = "grpo"', f'name = "{name}"') for line in lines if not line.startswith(NEW)]
    (directory / "config.toml").write_text("\n".join(kept))
    return directory / "config.toml"


@pytest.mark.parametrize("name", sorted(THEN))
def test_a_recipe_of_then_is_read_as_it_was(name, tmp_path):
    config = read_config(as_written_then(tmp_path, name=name))
    assert config.algo.recipe == THEN[name]
    (tmp_path / "resumed.toml").write_text(dump_config(config))  # what a resumed run keeps
    assert read_config(tmp_path / "resumed.toml").algo == config.algo


def test_what_was_given_then_stays(tmp_path):
    path = as_written_then(tmp_path, "algo.loss=gspo", "algo.clip_high=0.01")
    recipe = read_config(path).algo.recipe
    assert recipe.loss == GSPO(clip_low=3e-4, clip_high=0.01)
    path = as_written_then(tmp_path, "algo.correction.opsm=0.3", name="opsm")
    assert read_config(path).algo.recipe.correction.rules == (OPSM(0.3),)


def test_a_run_with_the_divergence_in_its_reward_can_still_be_read(tmp_path):
    path = as_written_then(tmp_path, "algo.kl.coef=0.1", "algo.kl.place=reward")
    path.write_text(path.read_text().replace('place = "reward"', 'place = "reward"\nestimator = "k3"'))
    assert read_config(path).algo.recipe.kl.estimator == "k1"


def test_an_answer_is_still_extracted_from_what_was_cut_off(tmp_path):
    config = read_config(as_written_then(tmp_path, 'reward.extract="last_number"'))
    assert config.reward.extract_truncated
    (tmp_path / "resumed.toml").write_text(dump_config(config))
    assert read_config(tmp_path / "resumed.toml").reward == config.reward
    assert not load_config(MINIMAL).reward.extract_truncated


def test_a_config_of_a_person_means_what_it_says_today(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[model]\npath = "m"\n[task]\nkind = "reasoning_gym"\nname = "chain_sum"\n[reward]\nfunction = "reasoning_gym"\n'
        '[algo]\nname = "gspo"\noverlong = "mask"\n'
    )
    assert read_config(path).algo.recipe == RECIPES["gspo"]
    assert load_config(MINIMAL, ["algo.name=dppo_kl"]).algo.recipe == RECIPES["dppo_kl"]


def test_adapters_of_a_run_of_then(tmp_path):
    path = as_written_then(tmp_path)
    path.write_text(
        path.read_text().replace("adapters = []\n", "")
        + '\n[[adapters]]\nname = "one"\n[adapters.algo]\nname = "dppo_kl"\n[[adapters]]\nname = "two"\n'
    )
    adapters = read_config(path).adapters
    assert adapters[0].algo == {"name": "dppo_tv_quadratic"} and not adapters[1].algo


def test_m2po_was_another_rule(tmp_path):
    """Until 2026-11-29 it masked the largest log ratios of all tokens; a run of then is done again with that."""
    lines = dump_config(load_config(MINIMAL, ["algo.name=m2po"])).splitlines()
    path = tmp_path / "then.toml"
    path.write_text("\n".join(line for line in lines if not line.startswith(("gamma = ", "lam = "))))
    assert read_config(path).algo.recipe == RECIPES["second_moment"]
    (tmp_path / "now.toml").write_text("\n".join(lines))
    assert read_config(tmp_path / "now.toml").algo.recipe == RECIPES["m2po"]


def test_dcpo_had_half_of_its_rules(tmp_path):
    """Until 2026-11-30 it standardised rewards within the group; a run of then is resumed with that, and its adapters too."""
    text = dump_config(load_config(MINIMAL, ["algo.name=dcpo", "algo.credit=rollout", "algo.gamma=1.0"]))
    path = tmp_path / "then.toml"
    path.write_text(text)
    then = read_config(path).algo
    assert then.advantage == "group_norm" and then.recipe.loss == RECIPES["dcpo"].loss
    (tmp_path / "resumed.toml").write_text(dump_config(read_config(path)))  # what a resumed run keeps
    assert read_config(tmp_path / "resumed.toml").algo == then
    path.write_text(
        text.replace("adapters = []\n", "")
        + '\n[[adapters]]\nname = "one"\n[adapters.algo]\nname = "dcpo"\ncredit = "rollout"\ngamma = 1.0\n'
    )
    assert read_config(path).adapters[0].algo["advantage"] == "group_norm"
    assert load_config(MINIMAL, ["algo.name=dcpo"]).algo.recipe == RECIPES["dcpo"]
