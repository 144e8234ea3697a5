"""The settings that a resumed run may change, and the saved results that remain valid then."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from headrace.config import RunConfig
from headrace.errors import ConfigError
from headrace.rollouts.staleness import still_bounded
from headrace.scoring.config import RewardConfig, RewardSpec


def check_resumable(old: RunConfig, new: RunConfig) -> None:
    """Raises ConfigError for changed settings on which the buffer or the weights depend. Most settings may change."""
    fixed = {
        "model.path": (old.model.path, new.model.path),
        "seed": (old.seed, new.seed),
        "staleness.groups_per_step": (old.staleness.groups_per_step, new.staleness.groups_per_step),
        "lora": (old.lora, new.lora),
        "the rows (dataset=)": (old.task.rows, new.task.rows),
        "the names of adapters": ([one.name for one in old.adapters], [one.name for one in new.adapters]),
    }
    changed = [said for name, (was, now) in fixed.items() for said in _differences(name, was, now)]
    if changed:
        raise ConfigError(
            f"a run cannot be resumed with other values here: {'; '.join(changed)}. Start a new run for that"
        )


def _differences(name: str, was: Any, now: Any) -> list[str]:
    """A text for each setting that differs. A section gives one for each of its settings."""
    if not dataclasses.is_dataclass(was):
        return [f"{name} was {was}, not {now}"] if was != now else []
    return [
        said
        for field in dataclasses.fields(was)
        for said in _differences(f"{name}.{field.name}", getattr(was, field.name), getattr(now, field.name))
    ]


def check_steps(run_dir: Path, done: int, wanted: int) -> None:
    """Raises ConfigError if the run has done more steps than `wanted`."""
    if wanted < done:
        raise ConfigError(
            f"{run_dir} has done {done} steps, and train.steps = {wanted} asks for fewer: set train.steps to {done} (the run then "
            "ends at once) or more, or start a new run"
        )


def check_bound(old: RunConfig, new: RunConfig) -> None:
    """Raises ConfigError if groups that wait in the checkpoint may be older than the new settings promise."""
    if not still_bounded(old.staleness, new.staleness):
        was, now = old.staleness, new.staleness
        raise ConfigError(
            f"groups in the checkpoint were admitted with staleness.max_lag = {was.max_lag}, window = {was.window}, overdue "
            f'= "{was.overdue}" and may be older than max_lag = {now.max_lag}, window = {now.window} promises by pacing alone; keep '
            'these settings, raise max_lag, or set staleness.overdue = "trim" (or drop) with window = 1, which looks at every token\'s age'
        )


def same_training(old: RunConfig, new: RunConfig) -> bool:
    """Whether the steps of a run give the same results when they are repeated under the new settings."""

    def relevant(config: RunConfig) -> dict[str, Any]:
        tree = dataclasses.asdict(config)
        kept = {
            name: tree[name]
            for name in (
                "task",
                "curriculum",
                "environment",
                "reward",
                "teachers",
                "rollout",
                "algo",
                "train",
                "staleness",
            )
        }
        if _is_default(config.reward):
            kept["reward"]["functions"] = ()
        kept["train"] = {
            name: value
            for name, value in tree["train"].items()
            if name not in ("cores", "threads", "minutes", "max_skipped_steps", "max_deaths")
        }
        if config.train.schedule == "constant":
            del kept["train"]["steps"]
        return kept

    return relevant(old) == relevant(new)


def scoring_mark(config: RunConfig) -> str:
    """A hash of the settings that turn rollouts into training rows. Rows made under one mark are not trained under another."""
    algo, recipe = config.algo, config.algo.recipe
    made = {
        "advantage": recipe.advantage,
        "cross-entropy": recipe.loss.weighs_rollouts,
        "overlong": algo.overlong,
        "length": (algo.length_penalty, config.longest_rollout) if algo.length_penalty else None,
        "reference": dataclasses.astuple(recipe.kl) if algo.reference_in_reward else None,
        "teachers": [dataclasses.asdict(dataclasses.replace(one, engine={})) for one in config.teachers],
        "top": algo.teacher_top,
        "rewards": [_spec_mark(one) for one in config.reward.specs] if not _is_default(config.reward) else [],
    }
    if config.reward.endpoints:
        made["services"] = [one.mark for one in config.reward.endpoints]
    if algo.credit != "rollout":  # left out otherwise, as the punishment below
        made["credit"] = algo.credit
    overlong = config.reward.soft_overlong_punishment
    if overlong.cache:  # left out otherwise: the mark then equals that of runs from before this setting existed
        made["punished"] = (dataclasses.asdict(overlong), config.rollout.max_tokens)
    return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16]


def _spec_mark(spec: RewardSpec) -> dict[str, Any]:
    """The settings of a function. Those that came later are left out unless they are used."""
    later = ("compares", "segments", "form")
    return {
        name: value
        for name, value in dataclasses.asdict(spec).items()
        if name not in later or value != getattr(RewardSpec, name)
    }


def _is_default(reward: RewardConfig) -> bool:
    """One function from Python with weight 1. Earlier versions recorded nothing of it, and their runs can still be resumed with it."""
    return len(reward.specs) == 1 and reward.specs[0].from_python and reward.specs[0].weight == 1.0
