"""The settings of runs made before 2026-11-22, in the words of today: a run is done again with the arithmetic that it had.

Recipes had other constants then, one name stood for another algorithm, and what was cut off had an extracted answer. A run keeps
all of its settings that have a value, and since that day `algo.denominator` is always one of them: a resolved `[algo]` without it
is from before.
"""

from __future__ import annotations

from typing import Any

from headrace.algo.recipes import RECIPES

Tree = dict[str, Any]
_ALWAYS_KEPT = {"name", "length_constant", "length_penalty", "overlong"}
"""What a resolved `[algo]` has had from the first version on, and nobody writes out all of."""
_RENAMED = {"dppo_kl": "dppo_tv_quadratic"}
_CONSTANTS: dict[str, Tree] = {
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gspo_token": {"clip_low": 3e-4, "clip_high": 4e-4},
    "ipo": {"delta": 0.1, "penalty": 1e-3},
}
"""Of a loss."""
_CORRECTIONS: dict[str, Tree] = {"mis_geometric": {"low": 0.99, "high": 1.001}, "opsm": {"opsm": 1e-4}}
"""Of a recipe."""


def as_it_was(config: Tree) -> Tree:
    """A run's settings as they have to be read: unchanged, but for those that an earlier version resolved."""
    algo = config.get("algo")
    if not isinstance(algo, dict) or not algo.keys() >= _ALWAYS_KEPT or "denominator" in algo:
        return config
    told = {**config, "algo": _in_todays_words(algo), **_rewards(config)}
    if "adapters" in config:
        told["adapters"] = [_adapter(one) for one in config["adapters"]]
    return told


def _adapter(table: Tree) -> Tree:
    told = {**table, **_rewards(table)}
    return {**told, "algo": _in_todays_words(table["algo"])} if "name" in table.get("algo", {}) else told


def _rewards(table: Tree) -> Tree:
    """An answer was extracted from what was cut off, too."""
    reward = table.get("reward")
    return {"reward": {"extract_truncated": True, **reward}} if isinstance(reward, dict) and reward else {}


def _in_todays_words(algo: Tree) -> Tree:
    name = str(algo["name"])
    told: Tree = {**algo, **{key: _RENAMED.get(algo[key], algo[key]) for key in ("name", "loss") if key in algo}}
    recipe = RECIPES.get(_RENAMED.get(name, name))
    if recipe is None:  # refused elsewhere
        return told
    if told.get("old") != "trainer":  # where no ratio reaches a bound
        told = {**_CONSTANTS.get(str(told.get("loss", recipe.loss.name)), {}), **told}
    correction = dict(told.get("correction", {}))
    if name in _CORRECTIONS and correction.get("mode") != "none":
        told["correction"] = {**_CORRECTIONS[name], **correction}
    kl = dict(told.get("kl", {}))
    if kl.get("place") == "reward":
        kl.pop("estimator", None)  # rows keep what it came to; what is sampled from now on gets the one that holds
        told["kl"] = kl
    return told
