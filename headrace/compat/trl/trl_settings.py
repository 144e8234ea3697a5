"""TRL's arguments as headrace's settings."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.compat.trl.fields import FIELDS
from headrace.compat.trl.grpo_config import changed, unknown, value_of
from headrace.core.errors import ConfigError
from headrace.settings.toml import Tree
from headrace.views.config import ObserveConfig

ROOM = 256
"""Tokens that a chat template may add to a prompt."""
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
AGGREGATIONS = {
    "grpo": "seq_mean_token_mean",
    "dr_grpo": "token_sum",
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "cispo": "token_mean",
    "sapo": "seq_mean_token_mean",
    "luspo": "seq_mean_token_sum",
}
"""The denominator of each of TRL's losses, by `loss_type`."""


def refuse_what_cannot_be(args: Any) -> None:
    """Raises ConfigError with a line for each field that cannot be honoured."""
    said = [
        f"{name}={value_of(args, name)!r} cannot be honoured: {FIELDS[name].words}" for name in changed(args, "refused")
    ]
    said += [f"{name} is not known to this version of headrace, and cannot be honoured" for name in unknown(args)]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        said.append("the script was started as several processes: start it as one (several devices are train.parallel)")
    if said:
        raise ConfigError("\n".join(said))


def without_meaning(args: Any) -> str:
    """Returns one sentence that names the fields without a meaning here, or an empty string."""
    names = list(changed(args, "no meaning"))
    return f"{', '.join(names)}: without a meaning here (docs/from_trl.md says why for each)" if names else ""


def settings_from(args: Any, *, rows: Sequence[Mapping[str, Any]], held_out: int) -> Tree:
    """Returns the settings, without model, task and reward. Raises ConfigError for pairs that cannot be honoured.

    `rows`: those for training; `held_out`: the number of prompts for evaluation."""

    def get(name: str) -> Any:
        return value_of(args, name)

    group, groups = get("num_generations"), _groups(args)
    steps = _steps(args, len(rows), groups)
    tree: Tree = {
        "seed": get("seed"),
        "rollout": {
            "group_size": group,
            "max_tokens": get("max_completion_length"),
            "temperature": float(get("temperature")),
            "top_p": float(get("top_p")),
            "top_k": max(0, get("top_k") or 0),
            "min_p": float(get("min_p") or 0.0),
            "constraint": {"regex": get("vllm_structured_outputs_regex") or ""},
        },
        "algo": algo_from(args),
        "train": {
            "steps": steps,
            "learning_rate": float(get("learning_rate")),
            "schedule": _schedule(get("lr_scheduler_type")),
            "warmup_steps": _share(get("warmup_steps"), steps),
            "weight_decay": float(get("weight_decay")),
            "beta1": float(get("adam_beta1")),
            "beta2": float(get("adam_beta2")),
            "max_grad_norm": _norm(get("max_grad_norm")),
            "dtype": "float32" if get("bf16") is False else "bfloat16",
            "gradient_checkpointing": bool(get("gradient_checkpointing")),
        },
        "staleness": {"groups_per_step": groups},
        "engine": {
            "context_length": get("vllm_max_model_length") or get("max_completion_length") + _longest(rows) + ROOM
        },
        "checkpoint": _checkpoints(args, steps, len(rows) // groups),
        "eval": _evaluation(args, steps, held_out=held_out, epoch=len(rows) // groups),
        "observe": _views(args),
    }
    if get("use_cpu"):
        tree["train"]["device"] = tree["engine"]["device"] = "cpu"
    _refuse_optimizers(get("optim"))
    return tree


def algo_from(args: Any) -> Tree:
    """Returns the section [algo]. Raises ConfigError for a loss that there is not."""
    kind, level = value_of(args, "loss_type"), value_of(args, "importance_sampling_level")
    if kind not in AGGREGATIONS:
        raise ConfigError(f"loss_type={kind!r} cannot be honoured; there are: {', '.join(AGGREGATIONS)}")
    algo: Tree = {"name": "grpo", "aggregation": AGGREGATIONS[kind], "advantage": _advantage(args)}
    if kind in ("cispo", "sapo"):
        if level != "token":
            raise ConfigError(
                f'loss_type={kind!r} with importance_sampling_level={level!r} cannot be honoured; use "token"'
            )
        algo |= _cispo(args) if kind == "cispo" else _sapo(args)
    else:
        low = value_of(args, "epsilon")
        high = value_of(args, "epsilon_high")
        algo |= {"clip_low": float(low), "clip_high": float(low if high is None else high)}
        algo |= _level(kind, level)
        algo |= _two_sided(args, algo)
    if beta := value_of(args, "beta"):
        algo["kl"] = {
            "coef": float(beta),
            "estimator": "k3",
            "unbiased": bool(value_of(args, "use_bias_correction_kl")),
        }
    if value_of(args, "mask_truncated_completions"):
        algo["overlong"] = "mask"
    if threshold := value_of(args, "off_policy_mask_threshold"):
        algo["correction"] = {"opsm": float(threshold)}
    return algo


def _level(kind: str, level: str) -> Tree:
    if level not in ("token", "sequence"):
        raise ConfigError(f"importance_sampling_level={level!r} cannot be honoured; there are: token, sequence")
    if kind == "luspo" and level != "sequence":
        raise ConfigError('loss_type="luspo" needs importance_sampling_level="sequence", as in TRL')
    return {"loss": "gspo"} if level == "sequence" else {}


def _two_sided(args: Any, algo: Tree) -> Tree:
    delta = value_of(args, "delta")
    if delta is None:
        return {}
    if "loss" in algo or delta <= 1 + algo["clip_high"]:
        raise ConfigError(
            f"delta={delta} cannot be honoured with ratios of sequences, nor below 1 + epsilon_high = {1 + algo['clip_high']}"
        )
    return {"dual_clip": float(delta)}


def _cispo(args: Any) -> Tree:
    high = value_of(args, "epsilon_high")
    high = value_of(args, "epsilon") if high is None else high
    if high <= 1:
        raise ConfigError(
            f'loss_type="cispo" with epsilon_high={high} would weigh every token by less than 1; 5.0 is usual'
        )
    return {"name": "cispo", "clip_high": float(high) - 1}


def _sapo(args: Any) -> Tree:
    return {
        "name": "sapo",
        "tau": float(value_of(args, "sapo_temperature_pos")),
        "tau_negative": float(value_of(args, "sapo_temperature_neg")),
    }


def _advantage(args: Any) -> str:
    if value_of(args, "multi_objective_aggregation") == "normalize_then_sum":
        return "gdpo"
    scale = {True: "group", False: "none"}.get(value_of(args, "scale_rewards"), value_of(args, "scale_rewards"))
    if scale not in ("group", "none"):
        raise ConfigError(f"scale_rewards={scale!r} cannot be honoured; there are: group, none")
    return "group_norm" if scale == "group" else "centred"


def _groups(args: Any) -> int:
    batch = value_of(args, "per_device_train_batch_size") * value_of(args, "gradient_accumulation_steps")
    group = value_of(args, "num_generations")
    if batch % group:
        raise ConfigError(
            f"per_device_train_batch_size * gradient_accumulation_steps = {batch} completions a step do not hold whole groups of "
            f"num_generations = {group}; make it a multiple"
        )
    return int(batch // group)


def _steps(args: Any, rows: int, groups: int) -> int:
    most = value_of(args, "max_steps")
    return most if most > 0 else max(1, math.ceil(value_of(args, "num_train_epochs") * max(1, rows // groups)))


def _share(value: float, steps: int) -> int:
    """A number below 1 is a share of the steps, as in transformers."""
    return math.ceil(value * steps) if 0 < value < 1 else int(value)


def _schedule(kind: str) -> str:
    if kind not in SCHEDULES:
        raise ConfigError(f"lr_scheduler_type={kind!r} cannot be honoured; there are: {', '.join(SCHEDULES)}")
    return SCHEDULES[kind]


def _norm(value: float) -> float:
    if not value:
        raise ConfigError(
            "max_grad_norm=0 cannot be honoured: the gradient of a step is always bounded; a large number comes near it"
        )
    return float(value)


def _refuse_optimizers(name: str) -> None:
    if name not in ("adamw_torch", "adamw_torch_fused"):
        raise ConfigError(f"optim={name!r} cannot be honoured: training uses torch's AdamW; leave it out")


def _longest(rows: Sequence[Mapping[str, Any]]) -> int:
    """Bytes of the longest prompt, and so at least its tokens."""
    return max((len(str(row.get("prompt", "")).encode()) for row in rows), default=0)


def _checkpoints(args: Any, steps: int, epoch: int) -> Tree:
    strategy = value_of(args, "save_strategy")
    if strategy not in ("no", "steps", "epoch"):
        raise ConfigError(f"save_strategy={strategy!r} cannot be honoured; there are: no, steps, epoch")
    every = {"no": 0, "steps": _share(value_of(args, "save_steps"), steps), "epoch": max(1, epoch)}[strategy]
    return {"every": every, "keep": value_of(args, "save_total_limit") or 1_000_000}


def _evaluation(args: Any, steps: int, *, held_out: int, epoch: int) -> Tree:
    strategy = value_of(args, "eval_strategy")
    if strategy == "no" or not held_out:
        if strategy != "no":
            raise ConfigError(f"eval_strategy={strategy!r} needs an eval_dataset")
        return {"prompts": 0}
    every = _share(value_of(args, "eval_steps") or value_of(args, "logging_steps"), steps)
    samples = value_of(args, "num_generations_eval") or value_of(args, "num_generations")
    return {"prompts": held_out, "samples": samples, "every": max(1, epoch if strategy == "epoch" else every)}


def _views(args: Any) -> Tree:
    given = value_of(args, "report_to")
    names = [given] if isinstance(given, str) else list(given or ())
    known = [field.name for field in dataclasses.fields(ObserveConfig) if field.name != "terminal"]
    if strange := [name for name in names if name not in (*known, "none")]:
        raise ConfigError(f"report_to={strange[0]!r} cannot be honoured; there are: none, {', '.join(known)}")
    views: Tree = {name: True for name in names if name != "none"}
    return views | ({"terminal": "off"} if value_of(args, "disable_tqdm") is True else {})
