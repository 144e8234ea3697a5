"""Settings of runs made before 2026-11-22 (some: 11-29, 11-30), translated so that such a run is done again with the arithmetic that it had.

Recipes had other constants then, one name stood for another algorithm, and an answer was extracted from completions
that were cut off. A run keeps all of its settings that have a value, and since that day `algo.denominator` is always
one of them: a resolved `[algo]` without it is from before.
"""

from __future__ import annotations

from typing import Any

from headrace.algo.recipes import RECIPES

Tree = dict[str, Any]
"""Settings as TOML has them, in tables."""
_ALWAYS_KEPT = {"name", "length_constant", "length_penalty", "overlong"}
"""Settings that a resolved `[algo]` has had from the first version on, and that nobody sets all by hand."""
_RENAMED = {"dppo_kl": "dppo_tv_quadratic"}
_EARLIER_CONSTANTS: dict[str, Tree] = {
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gspo_token": {"clip_low": 3e-4, "clip_high": 4e-4},
    "ipo": {"delta": 0.1, "penalty": 1e-3},
}
"""Constants by loss."""
_CORRECTIONS: dict[str, Tree] = {"mis_geometric": {"low": 0.99, "high": 1.001}, "opsm": {"opsm": 1e-4}}
"""Corrections by recipe."""


def as_it_was(config: Tree) -> Tree:
    """Returns the settings as they have to be read: unchanged, unless an earlier version resolved them."""
    algo = config.get("algo")
    if not isinstance(algo, dict) or not algo.keys() >= _ALWAYS_KEPT:
        return config
    if "lam" not in algo:
        algo = _with_first_m2po(algo)
        config = {**config, "algo": algo}
    if "credit" in algo:
        config = {**config, "algo": _with_half_of_dcpo(algo)}
        if "adapters" in config:
            config["adapters"] = [_adapter_with_half_of_dcpo(adapter) for adapter in config["adapters"]]
    if "denominator" in algo:
        return config
    translated = {**config, "algo": _translated(algo), **_rewards(config)}
    if "adapters" in config:
        translated["adapters"] = [_adapter(adapter) for adapter in config["adapters"]]
    return translated


def _with_first_m2po(algo: Tree) -> Tree:
    """Returns the settings with `second_moment` for `m2po`, which it was until 2026-11-29, when `lam` became one of those that are always kept."""
    renamed = {key: "second_moment" if algo.get(key) == "m2po" else algo[key] for key in ("name",) if key in algo}
    select = algo.get("select")
    if isinstance(select, dict) and select.get("kind") == "m2po":
        renamed["select"] = {**select, "kind": "second_moment"}
    return {**algo, **renamed}


def _with_half_of_dcpo(algo: Tree) -> Tree:
    """Returns the settings with the advantage that `dcpo` had until 2026-11-30, when `credit` and `gamma` ceased to be kept where nobody sets them."""
    if algo.get("name") != "dcpo" or "advantage" in algo or not algo.keys() >= {"credit", "gamma"}:
        return algo
    return {**algo, "advantage": "group_norm"}


def _adapter_with_half_of_dcpo(table: Tree) -> Tree:
    return {**table, "algo": _with_half_of_dcpo(table["algo"])} if "algo" in table else table


def _adapter(table: Tree) -> Tree:
    translated = {**table, **_rewards(table)}
    return {**translated, "algo": _translated(table["algo"])} if "name" in table.get("algo", {}) else translated


def _rewards(table: Tree) -> Tree:
    """Restores that answers were extracted from completions that were cut off, too."""
    reward = table.get("reward")
    return {"reward": {"extract_truncated": True, **reward}} if isinstance(reward, dict) and reward else {}


def _translated(algo: Tree) -> Tree:
    name = str(algo["name"])
    translated: Tree = {**algo, **{key: _RENAMED.get(algo[key], algo[key]) for key in ("name", "loss") if key in algo}}
    recipe = RECIPES.get(_RENAMED.get(name, name))
    if recipe is None:  # refused elsewhere
        return translated
    if translated.get("old") != "trainer":  # where no ratio reaches a bound
        translated = {**_EARLIER_CONSTANTS.get(str(translated.get("loss", recipe.loss.name)), {}), **translated}
    correction = dict(translated.get("correction", {}))
    if name in _CORRECTIONS and correction.get("mode") != "none":
        translated["correction"] = {**_CORRECTIONS[name], **correction}
    kl = dict(translated.get("kl", {}))
    if kl.get("place") == "reward":
        kl.pop("estimator", None)  # recorded rows keep their values; new ones use the estimator that is sound
        translated["kl"] = kl
    return translated
