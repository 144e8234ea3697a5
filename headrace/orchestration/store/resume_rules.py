"""What a resumed run may change, and what of its past is still good then."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from headrace.config import RunConfig
from headrace.errors import ConfigError
from headrace.rollouts.staleness import still_bounded
from headrace.scoring.config import RewardConfig


def check_resumable(old: RunConfig, new: RunConfig) -> None:
    """A resumed run may change most settings. Raises ConfigError for those that its buffer and its weights depend on."""
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
    """Of a section, each setting that is another one by itself."""
    if not dataclasses.is_dataclass(was):
        return [f"{name} was {was}, not {now}"] if was != now else []
    return [
        said
        for field in dataclasses.fields(was)
        for said in _differences(f"{name}.{field.name}", getattr(was, field.name), getattr(now, field.name))
    ]


def check_steps(run_dir: Path, done: int, wanted: int) -> None:
    """Raises ConfigError where a run has done more steps than it is to have."""
    if wanted < done:
        raise ConfigError(
            f"{run_dir} has done {done} steps, and train.steps = {wanted} asks for fewer: set train.steps to {done} (it ends where it "
            "stands) or more, or start a new run"
        )


def check_bound(old: RunConfig, new: RunConfig) -> None:
    """For a run in whose checkpoint groups wait. Raises ConfigError where they may be older than the new settings promise."""
    if not still_bounded(old.staleness, new.staleness):
        was, now = old.staleness, new.staleness
        raise ConfigError(
            f"groups that wait in the checkpoint were admitted with staleness.max_lag = {was.max_lag}, window = {was.window}, overdue "
            f'= "{was.overdue}" and may be older than max_lag = {now.max_lag}, window = {now.window} lets pacing promise; keep '
            'these settings, raise max_lag, or set staleness.overdue = "trim" (or drop) with window = 1, which looks at every token\'s age'
        )


def same_training(old: RunConfig, new: RunConfig) -> bool:
    """Whether the steps of a run can be done again with other settings, and come out the same."""

    def course(config: RunConfig) -> dict[str, Any]:
        tree = dataclasses.asdict(config)
        kept = {
            name: tree[name]
            for name in ("task", "environment", "reward", "teachers", "rollout", "algo", "train", "staleness")
        }
        if _says_nothing(config.reward):
            kept["reward"]["functions"] = ()
        kept["train"] = {
            name: value
            for name, value in tree["train"].items()
            if name not in ("cores", "threads", "minutes", "max_skipped_steps")
        }
        if config.train.schedule == "constant":
            del kept["train"]["steps"]
        return kept

    return course(old) == course(new)


def scoring_mark(config: RunConfig) -> str:
    """Of what makes training rows of rollouts: rows of one mark are not trained under another."""
    algo, recipe = config.algo, config.algo.recipe
    made = {
        "advantage": recipe.advantage,
        "cross-entropy": recipe.loss.weighs_rollouts,
        "overlong": algo.overlong,
        "length": (algo.length_penalty, config.rollout.max_tokens) if algo.length_penalty else None,
        "reference": dataclasses.astuple(recipe.kl) if algo.reference_in_reward else None,
        "teachers": [dataclasses.asdict(dataclasses.replace(one, engine={})) for one in config.teachers],
        "top": algo.teacher_top,
        "rewards": [dataclasses.asdict(one) for one in config.reward.specs] if not _says_nothing(config.reward) else [],
    }
    overlong = config.reward.soft_overlong_punishment
    if overlong.cache:  # else the mark is that of a run before there was one
        made["punished"] = (dataclasses.asdict(overlong), config.rollout.max_tokens)
    return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16]


def _says_nothing(reward: RewardConfig) -> bool:
    """One function from Python of weight 1: runs of earlier versions kept no word of it, and go on with it all the same."""
    return len(reward.specs) == 1 and reward.specs[0].from_python and reward.specs[0].weight == 1.0
