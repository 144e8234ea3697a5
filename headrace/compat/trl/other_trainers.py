"""TRL's RLOOTrainer and AsyncGRPOTrainer, as differences to its GRPOTrainer: the fields that their configs have, and what those become."""

from __future__ import annotations

from typing import Any

from headrace.compat.trl.grpo_trainer import GRPOTrainer
from headrace.compat.trl.trl_settings import FIELDS, TrainerKind, TrlField, config_class, value_of
from headrace.core.errors import ConfigError
from headrace.settings.toml import Tree

# --- RLOO (TRL 1.16): no choice of losses, a KL in the reward


_ONLY_GRPO = (
    "cast_lm_head_to_fp32", "delta", "entropy_coef", "entropy_coef_delta", "entropy_coef_max", "entropy_coef_min", "entropy_target",
    "importance_sampling_level", "log_completions_hub_repo", "loss_type", "max_tool_calling_iterations", "multi_objective_aggregation",
    "off_policy_mask_threshold", "sapo_temperature_neg", "sapo_temperature_pos", "scale_rewards", "top_entropy_quantile",
    "use_adaptive_entropy", "use_bias_correction_kl", "vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos",
    "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
)  # fmt: skip
_TOKEN = "of each token's ratio; TRL clips that of the whole completion, which is the same while the policy is the one that sampled"

RLOO_FIELDS: dict[str, TrlField] = {
    **{name: field for name, field in FIELDS.items() if name not in _ONLY_GRPO},
    "num_generations": TrlField(2, "honoured", "rollout.group_size"),
    "beta": TrlField(0.05, "honoured", 'algo.kl.coef, with algo.kl.place = "reward"; 0 needs no reference'),
    "epsilon": TrlField(0.2, "honoured", f"algo.clip_low, {_TOKEN}"),
    "epsilon_high": TrlField(None, "honoured", f"algo.clip_high, {_TOKEN}"),
    "normalize_advantages": TrlField(
        False,
        "refused",
        'advantages of rloo are not divided; headrace_settings={"algo": {"name": "reinforce++_baseline"}} whitens',
    ),
    "reward_clip_range": TrlField(None, "refused", "clip in the reward function"),
}


def _rloo(args: Any) -> Tree:
    low, high = value_of(args, "epsilon"), value_of(args, "epsilon_high")
    algo: Tree = {"name": "rloo", "clip_low": float(low), "clip_high": float(low if high is None else high)}
    if beta := args.beta:
        algo["kl"] = {"coef": float(beta), "place": "reward"}
    if value_of(args, "mask_truncated_completions"):
        algo["overlong"] = "mask"
    return algo


RLOO = TrainerKind("RLOO", RLOO_FIELDS, _rloo)
RLOOConfig: Any = config_class(RLOO)
RLOOConfig.__module__ = __name__


class RLOOTrainer(GRPOTrainer):
    """TRL's RLOOTrainer, trained asynchronously, as GRPOTrainer is: a leave-one-out baseline (arXiv 2402.14740), the KL in the reward."""

    kind, config = RLOO, RLOOConfig


# --- Asynchronous GRPO (TRL 1.16, experimental): a lag that is named, and fields for a server that there is not


_SERVER = "the engine is headrace's own, whose deadlines are its own (docs/watch.md)"
_ASYNC_ONLY: dict[str, TrlField] = {
    "dtype": TrlField("float32", "honoured", 'train.weights: "bfloat16", or "float32"'),
    "max_staleness": TrlField(4, "honoured", "staleness.max_lag, which nothing exceeds: TRL discards what is older, headrace paces"),
    "token_budget": TrlField(None, "no meaning", "a step has per_device_train_batch_size * gradient_accumulation_steps completions; its microbatches have train.microbatch_tokens"),
    "weight_sync_steps": TrlField(1, "refused", "every step publishes its weights"),
    "fork_threshold_tokens": TrlField(1024, "no meaning", "sampled tokens are never made from text again, so that none drift"),
    "max_inflight_tasks": TrlField(-1, "no meaning", "what is under way follows from staleness.max_lag and engine.max_running"),
    "queue_maxsize": TrlField(1024, "no meaning", "what is under way follows from staleness.max_lag and engine.max_running"),
    "request_timeout": TrlField(600, "no meaning", _SERVER),
    "weight_sync_timeout": TrlField(1800, "no meaning", _SERVER),
    "heartbeat_stale_after_s": TrlField(300.0, "no meaning", _SERVER),
}  # fmt: skip
_NOT_ASYNC = {*_ONLY_GRPO, *(
    "beta", "cache_implementation", "disable_dropout", "ds3_gather_for_generation", "generation_batch_size", "generation_kwargs",
    "log_multimodal", "log_unique_prompts", "mask_truncated_completions", "num_generations_eval", "num_iterations", "pad_to_multiple_of",
    "ref_model_mixup_alpha", "ref_model_sync_steps", "reward_weights", "shuffle_dataset", "steps_per_generation", "sync_ref_model",
    "transformers_continuous_batching_config", "use_transformers_continuous_batching", "use_transformers_paged", "use_vllm",
    "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_group_port", "vllm_max_model_length", "vllm_mode", "vllm_model_impl",
    "vllm_server_host", "vllm_server_port", "vllm_structured_outputs_regex", "vllm_tensor_parallel_size",
)} - {"max_tool_calling_iterations"}  # fmt: skip

ASYNC_FIELDS: dict[str, TrlField] = {
    **{name: field for name, field in FIELDS.items() if name not in _NOT_ASYNC},
    **_ASYNC_ONLY,
    "lr_scheduler_type": FIELDS["lr_scheduler_type"]._replace(default="constant"),
    "max_completion_length": FIELDS["max_completion_length"]._replace(default=2048),
    "vllm_server_base_url": FIELDS["vllm_server_base_url"]._replace(default="http://localhost:8000"),
    "logging_steps": FIELDS["logging_steps"]._replace(default=1),
    "ignore_data_skip": FIELDS["ignore_data_skip"]._replace(default=True),
    "remove_unused_columns": FIELDS["remove_unused_columns"]._replace(default=True),
}


def _async_algo(args: Any) -> Tree:
    low, high = value_of(args, "epsilon"), value_of(args, "epsilon_high")
    return {"name": "grpo", "clip_low": float(low), "clip_high": float(low if high is None else high)}


def _async_more(args: Any) -> Tree:
    kind = str(args.dtype).removeprefix("torch.")
    if kind not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype={args.dtype!r} cannot be honoured; there are: float32, bfloat16")
    weights: Tree = {"train": {"weights": "bfloat16"}} if kind == "bfloat16" else {}
    return {"staleness": {"max_lag": int(args.max_staleness)}, **weights}


ASYNC_GRPO = TrainerKind("AsyncGRPO", ASYNC_FIELDS, _async_algo, _async_more)
AsyncGRPOConfig: Any = config_class(ASYNC_GRPO)
AsyncGRPOConfig.__module__ = __name__


class AsyncGRPOTrainer(GRPOTrainer):
    """TRL's experimental AsyncGRPOTrainer, without its server: engine, buffer and trainer are those of headrace, and `max_staleness` its lag."""

    kind, config = ASYNC_GRPO, AsyncGRPOConfig
