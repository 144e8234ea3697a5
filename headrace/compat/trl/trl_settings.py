"""TRL's arguments: every field of its GRPOConfig with its fate, the config for machines without TRL, and both as headrace's settings. The configs
of TRL's other trainers are described as differences to this one (`other_trainers.py`)."""

from __future__ import annotations

import copy
import dataclasses
import enum
import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from headrace.core.errors import ConfigError
from headrace.settings.extras import EXTRAS
from headrace.settings.toml import Tree, merge
from headrace.views.config import ObserveConfig

# --- Every field of TRL's GRPOConfig, with its default, and its fate here
# Honoured, without meaning, or refused.
#
# The names and defaults are those of TRL 1.16 and transformers 5.23; a slow test compares them with the real dataclass. Imports nothing heavy.


Fate = Literal["honoured", "no meaning", "refused"]


class TrlField(NamedTuple):
    default: Any
    fate: Fate
    words: str
    """The setting that it becomes, or the reason why it has no meaning, or is refused unless it has its default."""


HONOURED: dict[str, tuple[Any, str]] = {
    "output_dir": (None, "the run is OUTPUT_DIR/headrace; save_model writes the model beside it"),
    "seed": (42, "seed"),
    "use_cpu": (False, 'engine.device and train.device = "cpu"'),
    # the model
    "model_init_kwargs": (
        None,
        'dtype = "bfloat16" is train.weights = "bfloat16"; other keys are refused by name, see there',
    ),
    # data and lengths
    "num_generations": (8, "rollout.group_size"),
    "max_completion_length": (512, "rollout.max_tokens"),
    "vllm_max_model_length": (None, "engine.context_length; without it: room for the longest prompt and completion"),
    "shuffle_dataset": (True, "task.shuffle"),
    "chat_template_kwargs": (None, "task.template, where prompts are conversations"),
    "per_device_train_batch_size": (
        8,
        "times gradient_accumulation_steps, by num_generations: staleness.groups_per_step",
    ),
    "gradient_accumulation_steps": (
        1,
        "see per_device_train_batch_size; the size of a microbatch is train.microbatch_tokens",
    ),
    "num_train_epochs": (3.0, "train.steps, from the number of rows"),
    "max_steps": (-1, "train.steps, of which each makes num_iterations updates"),
    "num_iterations": (1, "train.epochs"),
    # sampling
    "temperature": (1.0, "rollout.temperature"),
    "top_p": (1.0, "rollout.top_p"),
    "top_k": (0, "rollout.top_k"),
    "min_p": (None, "rollout.min_p"),
    "vllm_structured_outputs_regex": (None, "rollout.constraint.regex"),
    # the algorithm
    "beta": (0.0, "algo.kl.coef"),
    "use_bias_correction_kl": (True, "algo.kl.unbiased"),
    "epsilon": (0.2, "algo.clip_low"),
    "epsilon_high": (None, "algo.clip_high; of cispo: 1 + algo.clip_high"),
    "delta": (None, "algo.dual_clip"),
    "importance_sampling_level": ("token", 'sequence: algo.loss = "gspo"'),
    "loss_type": (
        "dapo",
        "algo.loss and algo.aggregation; bnpo is as dapo, because a denominator belongs to the whole step here",
    ),
    "sapo_temperature_neg": (1.05, "algo.tau_negative"),
    "sapo_temperature_pos": (1.0, "algo.tau"),
    "vespo_k_pos": (2.0, "algo.kernel_power"),
    "vespo_lambda_pos": (3.0, "algo.kernel_rate"),
    "vespo_k_neg": (3.0, "algo.kernel_power_negative"),
    "vespo_lambda_neg": (2.0, "algo.kernel_rate_negative"),
    "reward_weights": (None, "the weights of reward.functions"),
    "scale_rewards": ("group", 'group: algo.advantage = "group_norm"; none: "centred"; batch is refused'),
    "multi_objective_aggregation": ("sum_then_normalize", 'normalize_then_sum: algo.advantage = "gdpo"'),
    "mask_truncated_completions": (False, 'algo.overlong = "mask"'),
    "off_policy_mask_threshold": (None, "algo.correction.opsm"),
    "top_entropy_quantile": (1.0, 'algo.select.kind = "entropy", with algo.select.fraction'),
    "entropy_coef": (0.0, "algo.entropy.coef"),
    "use_adaptive_entropy": (False, "algo.entropy.target"),
    "entropy_target": (0.2, "algo.entropy.target, with use_adaptive_entropy"),
    "entropy_coef_delta": (0.005, "algo.entropy.change, with use_adaptive_entropy"),
    # the optimizer
    "learning_rate": (1e-6, "train.learning_rate"),
    "lr_scheduler_type": (
        "linear",
        "train.schedule: linear, cosine, constant and constant_with_warmup; others are refused",
    ),
    "warmup_steps": (0, "train.warmup_steps; below 1: a share of the steps"),
    "weight_decay": (0.0, "train.weight_decay"),
    "adam_beta1": (0.9, "train.beta1"),
    "adam_beta2": (0.999, "train.beta2"),
    "max_grad_norm": (1.0, "train.max_grad_norm"),
    "optim": ("adamw_torch_fused", "AdamW; adamw_torch is the same, others are refused"),
    "bf16": (None, 'train.dtype: "bfloat16", or "float32" where it is false'),
    "gradient_checkpointing": (
        True,
        "train.gradient_checkpointing; on by default, as in TRL, and needless for a small model",
    ),
    # evaluation, checkpoints, views
    "eval_strategy": ("no", "eval.every, with eval_steps; prompts come from eval_dataset"),
    "eval_steps": (None, "eval.every"),
    "num_generations_eval": (None, "eval.samples"),
    "save_strategy": ("steps", "checkpoint.every, with save_steps; best is refused"),
    "save_steps": (500, "checkpoint.every"),
    "save_total_limit": (None, "checkpoint.keep"),
    "report_to": (
        "none",
        "observe.tensorboard, observe.trackio and the other sinks of [observe]; all: those whose package is installed; others are refused",
    ),
    "disable_tqdm": (None, 'observe.terminal = "off" where it is true'),
    # the hub
    "push_to_hub": (False, "trainer.push_to_hub() uploads the trained model; nothing is uploaded during training"),
    "hub_model_id": (None, "the name under which trainer.push_to_hub() uploads"),
    "hub_private_repo": (None, "trainer.push_to_hub() makes a private repository"),
    "hub_token": (None, "the token of trainer.push_to_hub()"),
}

_MEMORY = "rows are packed without padding, and logits are never held whole"
_ENGINE = "the engine is headrace's own, and generates without end beside the trainer"
_MISMATCH = "ratios are taken to the sampler's own log-probs, which holds the mismatch of engine and trainer"
_OFF = "it belongs to a setting that is refused"
_LOG = "every step is written to metrics.jsonl, and the report shows prompts and completions"
_LOADER = "there is no data loader: prompts are drawn one by one"
_ONE = "one process trains on each device; several are train.parallel"
_EVAL = "an evaluation samples held-out prompts with the engine, beside training"
_SAVE = "a checkpoint holds all that a run needs, and is written whole or not at all"
_FUSED = (
    "norms, rotary embeddings, gated activations and the head's sums are fused anyway, by train.compile on GPUs and by C++ kernels on CPUs, and "
    "logits are never held whole"
)
_COMPILED = "train.compile has its place: layers are compiled on GPUs without being asked"
_FORWARD = "it does not change the numbers of this trainer"

NO_MEANING: dict[str, dict[str, Any]] = {
    _ENGINE: {
        "generation_batch_size": None, "steps_per_generation": None, "cache_implementation": None, "use_vllm": False,
        "vllm_mode": "colocate", "vllm_model_impl": "vllm", "vllm_enable_sleep_mode": False, "vllm_server_base_url": None,
        "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000, "vllm_server_timeout": 240.0, "vllm_group_port": 51216,
        "vllm_gpu_memory_utilization": 0.3, "vllm_tensor_parallel_size": 1, "use_transformers_continuous_batching": False,
        "transformers_continuous_batching_config": None, "use_transformers_paged": False, "ds3_gather_for_generation": True,
        "use_cache": False,
    },
    _MISMATCH: {
        "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_cap": None,
    },
    _MEMORY: {
        "pad_to_multiple_of": "auto", "torch_empty_cache_steps": None,
        "average_tokens_across_devices": True, "gradient_checkpointing_kwargs": None, "activation_checkpointing": None,
        "activation_checkpointing_kwargs": None, "skip_memory_metrics": True,
    },
    _FUSED: {
        "use_liger_kernel": False, "liger_kernel_config": None,
    },
    _COMPILED: {
        "torch_compile": False, "torch_compile_backend": None, "torch_compile_mode": None,
    },
    _FORWARD: {
        "disable_dropout": False, "tf32": None,         "label_smoothing_factor": 0.0, "remove_unused_columns": False, "label_names": None,
    },
    _OFF: {
        "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512, "greater_is_better": None, "metric_for_best_model": None,
    },
    _LOG: {
        "logging_steps": 10, "logging_strategy": "steps", "logging_first_step": False, "log_on_each_node": True,
        "logging_nan_inf_filter": True, "log_level": "passive", "log_level_replica": "warning", "log_completions": False,
        "log_multimodal": True, "num_completions_to_print": None, "log_unique_prompts": False, "run_name": None,
        "project": "huggingface", "include_num_input_tokens_seen": "no", "debug": "",
    },
    _LOADER: {
        "dataloader_drop_last": False, "dataloader_num_workers": 0, "dataloader_pin_memory": True, "dataloader_persistent_workers": False,
        "dataloader_prefetch_factor": None, "dataloader_multiprocessing_context": None, "dataloader_in_order": True,
        "train_sampling_strategy": "random", "length_column_name": "length", "ignore_data_skip": False, "data_seed": None,
    },
    _ONE: {
        "ddp_find_unused_parameters": None, "ddp_bucket_cap_mb": None, "ddp_broadcast_buffers": None, "ddp_static_graph": None,
        "ddp_backend": None, "ddp_timeout": 1800, "local_rank": -1, "accelerator_config": None, "fsdp_config": None,
    },
    _EVAL: {
        "eval_delay": 0, "per_device_eval_batch_size": 8, "prediction_loss_only": False, "eval_on_start": False,
        "eval_do_concat_batches": True, "eval_use_gather_object": False, "eval_accumulation_steps": None, "include_for_metrics": [],
        "batch_eval_metrics": False, "bf16_full_eval": False, "fp16_full_eval": False, "do_train": False, "do_eval": False,
        "do_predict": False,
    },
    _SAVE: {
        "save_only_model": False, "save_on_each_node": False, "enable_jit_checkpoint": False,
        "restore_callback_states_from_checkpoint": False, "resume_from_checkpoint": None, "hub_strategy": "every_save", "hub_always_push": False, "trackio_space_id": None,
        "trackio_bucket_id": None, "trackio_static_space_id": None,
    },
}  # fmt: skip

REFUSED: dict[str, tuple[Any, str]] = {
    "trust_remote_code": (False, "no code of a model is run; use a model that transformers itself has"),
    "router_aux_loss_coef": (None, "there is no auxiliary loss of routers; rollout.keep_routing replays the sampler's experts instead"),
    "cast_lm_head_to_fp32": (False, "the head computes in train.dtype; use bf16=False"),
    "generation_kwargs": (None, "sampling has temperature, top_p, top_k and min_p"),
    "repetition_penalty": (1.0, "the sampler would not draw from the distribution that is trained"),
    "sync_ref_model": (False, 'a reference that moves is copied here, not mixed: headrace_settings={"algo": {"kl": {"every": 512}}}'),
    "entropy_coef_min": (0.0, "the factor of the entropy is at least 0"),
    "entropy_coef_max": (1.0, "the factor of the entropy is at most 1"),
    "max_tool_calling_iterations": (None, "tools are an environment here (docs/environments.md)"),
    "log_completions_hub_repo": (None, "completions stay in the run's directory"),
    "lr_scheduler_kwargs": (None, "schedules have no arguments here"),
    "optim_args": (None, "AdamW has no arguments beside weight decay and betas"),
    "optim_target_modules": (None, "all parameters have one optimizer; peft_config trains an adapter"),
    "adam_epsilon": (1e-8, "AdamW's epsilon is 1e-8"),
    "fp16": (False, "training is in bfloat16 or float32"),
    "neftune_noise_alpha": (None, "noise on embeddings would be another policy than the one that was sampled from"),
    "auto_find_batch_size": (False, "train.microbatch_tokens bounds memory"),
    "full_determinism": (False, "a replay is exact as it is (docs/journal.md); engine.exact makes sampling so"),
    "parallelism_config": (None, "several devices are train.parallel"),
    "fsdp": (None, "several devices are train.parallel, which holds a part of the weights on each"),
    "deepspeed": (None, "several devices are train.parallel, which holds a part of the weights on each"),
    "hub_revision": (None, "trainer.push_to_hub() uploads to the main branch"),
    "load_best_model_at_end": (False, "headrace export --step takes any checkpoint that was kept"),
}  # fmt: skip

FIELDS: dict[str, TrlField] = {
    **{name: TrlField(default, "honoured", words) for name, (default, words) in HONOURED.items()},
    **{
        name: TrlField(default, "no meaning", why)
        for why, names in NO_MEANING.items()
        for name, default in names.items()
    },
    **{name: TrlField(default, "refused", why) for name, (default, why) in REFUSED.items()},
}


# --- A config with TRL's names and defaults, for machines without TRL, and how a given one is compared with its defaults


class TrainerKind(NamedTuple):
    """One of TRL's trainers: the fields of its config, and what they become."""

    title: str
    """The name within those of its classes: `GRPO` of GRPOTrainer and GRPOConfig."""
    fields: Mapping[str, TrlField]
    algo: Callable[[Any], Tree]
    """Returns the section [algo] for a config. Raises ConfigError for what there is not."""
    more: Callable[[Any], Tree] = lambda args: {}
    """Returns settings that replace those that every trainer's config has."""
    group: int = 0
    """Completions of a prompt, where the config has no field for them: the batch then counts prompts."""
    rewarded: bool = True
    """Whether its scripts have reward functions."""


def config_class(kind: TrainerKind) -> Any:
    """Returns a dataclass with the names and defaults of TRL's. It does not need TRL."""
    return dataclasses.make_dataclass(
        f"{kind.title}Config",
        [
            (
                name,
                Any,
                dataclasses.field(default_factory=partial(copy.copy, rule.default), kw_only=name != "output_dir"),
            )
            for name, rule in sorted(kind.fields.items(), key=lambda pair: pair[0] != "output_dir")
        ],
        namespace={
            "__doc__": f"The fields of TRL's {kind.title}Config, with its defaults. TRL's own may be given instead."
        },
    )


def value_of(args: Any, name: str) -> Any:
    """Returns a field as a plain value: transformers turns names into enums."""
    value = getattr(args, name) if hasattr(args, name) else FIELDS[name].default  # a field of another trainer
    return value.value if isinstance(value, enum.Enum) else value


def changed(kind: TrainerKind, args: Any, fate: Fate) -> Iterator[str]:
    """Yields the fields of a fate whose value is not the default. TRL's own config fills in many fields when it is made: so it is compared
    with another one that was given nothing."""
    plain = _plain(args)
    derived = ("generation_batch_size", "steps_per_generation", "run_name", "output_dir", "logging_dir")
    for name, rule in kind.fields.items():
        if rule.fate == fate and name not in derived and value_of(args, name) != value_of(plain, name):
            yield name


def _plain(args: Any) -> Any:
    """Returns a config that was given nothing. Where there is no GPU, transformers makes none with bf16 unless `use_cpu` is given."""
    return type(args)(use_cpu=True, bf16=args.bf16)


def unknown(kind: TrainerKind, args: Any) -> list[str]:
    """Returns fields that this table does not have: those of a later TRL, if they were changed."""
    plain = _plain(args)
    names = [field.name for field in dataclasses.fields(args) if field.name not in kind.fields and field.init]
    return [name for name in names if getattr(args, name) != getattr(plain, name)]


# --- TRL's arguments as headrace's settings.


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
    "vespo": "token_mean",
    "luspo": "seq_mean_token_sum",
}
"""The denominator of each of TRL's losses, by `loss_type`."""


def refuse_what_cannot_be(kind: TrainerKind, args: Any) -> None:
    """Raises ConfigError with a line for each field that cannot be honoured."""
    messages = [
        f"{name}={value_of(args, name)!r} cannot be honoured: {kind.fields[name].words}"
        for name in changed(kind, args, "refused")
    ]
    messages += [
        f"{name} is not known to this version of headrace, and cannot be honoured" for name in unknown(kind, args)
    ]
    if int(os.environ.get("WORLD_SIZE") or "1") > 1:
        messages.append(
            "the script was started as several processes: start it as one (several devices are train.parallel)"
        )
    if messages:
        raise ConfigError("\n".join(messages))


def without_meaning(kind: TrainerKind, args: Any) -> str:
    """Returns one sentence that names the fields without a meaning here, or an empty string."""
    names = list(changed(kind, args, "no meaning"))
    return f"{', '.join(names)}: without a meaning here (docs/from_trl.md says why for each)" if names else ""


def settings_from(kind: TrainerKind, args: Any, *, rows: Sequence[Mapping[str, Any]], held_out: int) -> Tree:
    """Returns the settings, without model, task and reward. Raises ConfigError for pairs that cannot be honoured.

    `rows`: those for training; `held_out`: the number of prompts for evaluation."""

    def get(name: str) -> Any:
        return value_of(args, name)

    group, groups = _groups(kind, args)
    steps = _steps(args, len(rows), groups)
    tree: Tree = {
        "seed": get("seed"),
        "rollout": {
            "group_size": group,
            "max_tokens": _completion(args),
            "temperature": float(get("temperature")),
            "top_p": float(get("top_p")),
            "top_k": max(0, get("top_k") or 0),
            "min_p": float(get("min_p") or 0.0),
            "constraint": {"regex": get("vllm_structured_outputs_regex") or ""},
        },
        "algo": kind.algo(args),
        "train": {
            "steps": steps,
            "epochs": get("num_iterations"),
            "learning_rate": float(get("learning_rate")),
            "schedule": _schedule(get("lr_scheduler_type")),
            "warmup_steps": _share(get("warmup_steps"), steps, args),
            "weight_decay": float(get("weight_decay")),
            "beta1": float(get("adam_beta1")),
            "beta2": float(get("adam_beta2")),
            "max_grad_norm": _norm(get("max_grad_norm")),
            "dtype": "float32" if get("bf16") is False else "bfloat16",
            "gradient_checkpointing": bool(get("gradient_checkpointing")),
        },
        "staleness": {"groups_per_step": groups},
        "engine": {"context_length": get("vllm_max_model_length") or _completion(args) + _longest(rows) + ROOM},
        "checkpoint": _checkpoints(args, steps, len(rows) // groups),
        "eval": _evaluation(args, steps, held_out=held_out, epoch=len(rows) // groups, group=group),
        "observe": _views(args),
    }
    if get("use_cpu"):
        tree["train"]["device"] = tree["engine"]["device"] = "cpu"
    _refuse_optimizers(get("optim"))
    return merge(tree, kind.more(args))


def algo_from(args: Any) -> Tree:
    """Returns the section [algo] of a GRPOConfig. Raises ConfigError for a loss that there is not."""
    kind, level = value_of(args, "loss_type"), value_of(args, "importance_sampling_level")
    if kind not in AGGREGATIONS:
        raise ConfigError(f"loss_type={kind!r} cannot be honoured; there are: {', '.join(AGGREGATIONS)}")
    algo: Tree = {"name": "grpo", "aggregation": AGGREGATIONS[kind], "advantage": _advantage(args)}
    if own := {"cispo": _cispo, "sapo": _sapo, "vespo": _vespo}.get(kind):
        if level != "token":
            raise ConfigError(
                f'loss_type={kind!r} with importance_sampling_level={level!r} cannot be honoured; use "token"'
            )
        algo |= own(args)
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
    if (share := value_of(args, "top_entropy_quantile")) < 1:
        algo["select"] = {"kind": "entropy", "fraction": float(share)}
    return algo | _entropy(args)


def _entropy(args: Any) -> Tree:
    entropy = {"coef": float(value_of(args, "entropy_coef"))}
    if value_of(args, "use_adaptive_entropy"):
        entropy |= {
            "target": float(value_of(args, "entropy_target")),
            "change": float(value_of(args, "entropy_coef_delta")),
        }
    return {"entropy": entropy} if any(entropy.values()) else {}


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


def _vespo(args: Any) -> Tree:
    kernel = {
        "kernel_power": "vespo_k_pos",
        "kernel_rate": "vespo_lambda_pos",
        "kernel_power_negative": "vespo_k_neg",
        "kernel_rate_negative": "vespo_lambda_neg",
    }
    return {"name": "vespo", **{name: float(value_of(args, field)) for name, field in kernel.items()}}


def _advantage(args: Any) -> str:
    if value_of(args, "multi_objective_aggregation") == "normalize_then_sum":
        return "gdpo"
    scale = {True: "group", False: "none"}.get(value_of(args, "scale_rewards"), value_of(args, "scale_rewards"))
    if scale not in ("group", "none"):
        raise ConfigError(f"scale_rewards={scale!r} cannot be honoured; there are: group, none")
    return "group_norm" if scale == "group" else "centred"


def _completion(args: Any) -> int:
    return int(args.max_new_tokens if hasattr(args, "max_new_tokens") else value_of(args, "max_completion_length"))


def _groups(kind: TrainerKind, args: Any) -> tuple[int, int]:
    """Returns the completions of a group, and the groups of a step."""
    batch = value_of(args, "per_device_train_batch_size") * value_of(args, "gradient_accumulation_steps")
    if kind.group:
        return kind.group, int(batch)
    group = value_of(args, "num_generations")
    if batch % group:
        raise ConfigError(
            f"per_device_train_batch_size * gradient_accumulation_steps = {batch} completions a step do not hold whole groups of "
            f"num_generations = {group}; make it a multiple"
        )
    return group, int(batch // group)


def _steps(args: Any, rows: int, groups: int) -> int:
    most = value_of(args, "max_steps")
    return (
        _share(most, 0, args)
        if most > 0
        else max(1, math.ceil(value_of(args, "num_train_epochs") * max(1, rows // groups)))
    )


def _share(value: float, steps: int, args: Any) -> int:
    """A number below 1 is a share of the steps, as in transformers. TRL counts updates, of which a step makes `num_iterations`."""
    return math.ceil(value * steps if 0 < value < 1 else value / value_of(args, "num_iterations"))


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
    every = {"no": 0, "steps": _share(value_of(args, "save_steps"), steps, args), "epoch": max(1, epoch)}[strategy]
    return {"every": every, "keep": value_of(args, "save_total_limit") or 1_000_000}


def _evaluation(args: Any, steps: int, *, held_out: int, epoch: int, group: int) -> Tree:
    strategy = value_of(args, "eval_strategy")
    if strategy == "no" or not held_out:
        if strategy != "no":
            raise ConfigError(f"eval_strategy={strategy!r} needs an eval_dataset")
        return {"prompts": 0}
    every = _share(value_of(args, "eval_steps") or value_of(args, "logging_steps"), steps, args)
    samples = value_of(args, "num_generations_eval") or group
    return {"prompts": held_out, "samples": samples, "every": max(1, epoch if strategy == "epoch" else every)}


def _views(args: Any) -> Tree:
    given = value_of(args, "report_to")
    names = [given] if isinstance(given, str) else list(given or ())
    known = [field.name for field in dataclasses.fields(ObserveConfig) if field.default is False]
    if "all" in names:
        names = [name for name in known if importlib.util.find_spec(EXTRAS[name].module)]
    if strange := [name for name in names if name not in (*known, "none")]:
        raise ConfigError(f"report_to={strange[0]!r} cannot be honoured; there are: none, all, {', '.join(known)}")
    views: Tree = {name: True for name in names if name != "none"}
    return views | ({"terminal": "off"} if value_of(args, "disable_tqdm") is True else {})


GRPO = TrainerKind("GRPO", FIELDS, algo_from)
GRPOConfig: Any = config_class(GRPO)
GRPOConfig.__module__ = __name__  # a process that unpickles one looks here
