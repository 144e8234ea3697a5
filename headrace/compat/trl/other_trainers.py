"""TRL's RLOOTrainer, AsyncGRPOTrainer, OnlineDPOTrainer and DistillationTrainer, as differences to its GRPOTrainer: the fields that their configs
have, and what those become."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.compat.trl.grpo_trainer import GRPOTrainer, Refusals, dtype_of, save_model_in_memory
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
    "sync_ref_model": TrlField(
        False, "refused", "an engine serves the reference, and that is the model that training began with"
    ),
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


# --- Online DPO (TRL 1.16, experimental): the better of two completions is preferred, near a reference


_BATCH = TrlField(8, "honoured", "times gradient_accumulation_steps: staleness.groups_per_step; it counts prompts")
_NOT_PAIRS = {*_ONLY_GRPO, *_NOT_ASYNC, *(
    "chat_template_kwargs", "epsilon", "epsilon_high", "log_completions", "max_completion_length", "max_tool_calling_iterations",
    "num_completions_to_print", "num_generations", "router_aux_loss_coef", "vllm_max_model_length",
)} - {
    "beta", "cache_implementation", "disable_dropout", "ds3_gather_for_generation", "generation_kwargs", "loss_type", "reward_weights",
    "use_vllm", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_group_port", "vllm_mode", "vllm_model_impl",
    "vllm_server_host", "vllm_server_port", "vllm_structured_outputs_regex", "vllm_tensor_parallel_size",
}  # fmt: skip

ONLINE_DPO_FIELDS: dict[str, TrlField] = {
    **{name: field for name, field in FIELDS.items() if name not in _NOT_PAIRS},
    "per_device_train_batch_size": _BATCH,
    "max_new_tokens": TrlField(64, "honoured", "rollout.max_tokens"),
    "beta": TrlField([0.1], "honoured", "algo.pair_beta; a list with another number for each epoch is refused"),
    "loss_type": TrlField("sigmoid", "honoured", 'sigmoid: algo.name = "dpo"; ipo: "ipo_pairs"; of two equal rewards TRL prefers one, here the pair is dropped'),
    "temperature": FIELDS["temperature"]._replace(default=0.9),
    "learning_rate": FIELDS["learning_rate"]._replace(default=5e-7),
    "disable_dropout": FIELDS["disable_dropout"]._replace(default=True),
    "vllm_gpu_memory_utilization": FIELDS["vllm_gpu_memory_utilization"]._replace(default=0.55),
    "max_length": TrlField(512, "no meaning", "rows are trained as they were sampled, with the whole prompt"),
    "reward_model_path": TrlField(None, "refused", "serve the reward model, and name it in reward.services (docs/scoring.md)"),
    "missing_eos_penalty": TrlField(None, "refused", "subtract it in the reward function, which is given completion_ids"),
}  # fmt: skip


def _online_dpo(args: Any) -> Tree:
    names, kind = {"sigmoid": "dpo", "ipo": "ipo_pairs"}, value_of(args, "loss_type")
    if kind not in names:
        raise ConfigError(f"loss_type={kind!r} cannot be honoured; there are: {', '.join(names)}")
    betas = args.beta if isinstance(args.beta, Sequence) else [args.beta]
    if len(set(betas)) != 1:
        raise ConfigError(f"beta={args.beta!r} cannot be honoured: it is the same in all epochs")
    return {"name": names[kind], "pair_beta": float(betas[0])}


ONLINE_DPO = TrainerKind("OnlineDPO", ONLINE_DPO_FIELDS, _online_dpo, group=2)
OnlineDPOConfig: Any = config_class(ONLINE_DPO)
OnlineDPOConfig.__module__ = __name__


class OnlineDPOTrainer(GRPOTrainer):
    """TRL's experimental OnlineDPOTrainer, trained asynchronously: of two completions of a prompt the one with the higher reward is preferred."""

    kind, config = ONLINE_DPO, OnlineDPOConfig

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        reward_funcs: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        compute_metrics: Any = None,
        preprocess_logits_for_metrics: Any = None,
        **others: Any,
    ) -> None:
        unheard = {
            "ref_model": ref_model,
            "data_collator": data_collator,
            "compute_metrics": compute_metrics,
            "preprocess_logits_for_metrics": preprocess_logits_for_metrics,
        }
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, **unheard, **others)


# --- Distillation (TRL 1.16): a teacher's distribution on what the student samples, without rewards


_FREE = "completions are compared with a teacher that samples freely"
_NOTHING_TO_MEASURE = (
    "there is no reward that could be measured: headrace eval measures the saved model on a task with one"
)
_NOT_DISTILLED = {*_ONLY_GRPO, *_NOT_ASYNC, "epsilon", "epsilon_high", "num_generations", "router_aux_loss_coef"} - {
    "beta", "cache_implementation", "disable_dropout", "ds3_gather_for_generation", "generation_kwargs", "log_unique_prompts",
    "max_tool_calling_iterations", "pad_to_multiple_of", "shuffle_dataset", "use_vllm", "vllm_enable_sleep_mode",
    "vllm_gpu_memory_utilization", "vllm_group_port", "vllm_max_model_length", "vllm_mode", "vllm_model_impl", "vllm_server_host",
    "vllm_server_port", "vllm_structured_outputs_regex", "vllm_tensor_parallel_size",
}  # fmt: skip

DISTILLATION_FIELDS: dict[str, TrlField] = {
    **{name: field for name, field in FIELDS.items() if name not in _NOT_DISTILLED},
    "temperature": FIELDS["temperature"]._replace(words="rollout.temperature and algo.distill.temperature"),
    "vllm_structured_outputs_regex": TrlField(None, "refused", _FREE),
    "eval_strategy": TrlField("no", "refused", _NOTHING_TO_MEASURE),
    "eval_steps": TrlField(None, "no meaning", _NOTHING_TO_MEASURE),
    "per_device_train_batch_size": _BATCH,
    "beta": TrlField(1.0, "honoured", 'algo.name = "gkd", over the whole vocabulary: 1 is algo.distill.kind = "reverse", 0 "forward", a number between them "jsd" with algo.distill.beta'),
    "teacher_model_name_or_path": TrlField(None, "honoured", "scripts pass it as teacher_model=, which becomes algo.distill.model"),
    "teacher_model_init_kwargs": TrlField(None, "honoured", "the trainer computes the teacher in train.dtype; keys beside dtype are refused by name, as those of model_init_kwargs"),
    "teacher_model_revision": TrlField(None, "refused", "write it into the name: teacher_model='org/name@revision'"),
}  # fmt: skip


def _distillation(args: Any) -> Tree:
    beta = float(args.beta)
    if not 0 <= beta <= 1:
        raise ConfigError(f"beta={beta:g} cannot be honoured: it is a share, from 0 to 1")
    kind: Tree = {0.0: {"kind": "forward"}, 1.0: {"kind": "reverse"}}.get(beta, {"kind": "jsd", "beta": beta})
    temperature = float(args.temperature)
    return {"name": "gkd", "distill": {**kind, **({"temperature": temperature} if temperature != 1 else {})}}


DISTILLATION = TrainerKind("Distillation", DISTILLATION_FIELDS, _distillation, group=1, rewarded=False)
DistillationConfig: Any = config_class(DISTILLATION)
DistillationConfig.__module__ = __name__


class DistillationTrainer(GRPOTrainer):
    """TRL's DistillationTrainer, trained asynchronously: the student samples, and moves towards the teacher's distribution (arXiv 2306.13649)."""

    kind, config = DISTILLATION, DistillationConfig

    def __init__(
        self,
        model: Any,
        teacher_model: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        **others: Any,
    ) -> None:
        self._teacher = teacher_model
        super().__init__(model, None, args, train_dataset, eval_dataset, **others)

    def _translated(self, refusals: Refusals, quantization_config: Any, peft_config: Any) -> Tree:
        tree = super()._translated(refusals, quantization_config, peft_config)
        with refusals.part():
            tree.setdefault("algo", {}).setdefault("distill", {})["model"] = self._teacher_path()
        return tree

    def _teacher_path(self) -> str:
        if self._teacher is None:
            raise ConfigError("teacher_model= is missing: a name, a directory, or a transformers model")
        if not isinstance(self._teacher, str) and not hasattr(self._teacher, "save_pretrained"):
            kind = type(self._teacher).__name__
            raise ConfigError(f"teacher_model= takes a name or a transformers model, not {kind}")
        dtype_of(value_of(self.args, "teacher_model_init_kwargs"), "teacher_model_init_kwargs")
        return self._teacher if isinstance(self._teacher, str) else str(self._teacher_folder())

    def _teacher_folder(self) -> Path:
        return (self.output_dir / "headrace-teacher").absolute()

    def _write_inputs(self) -> None:
        super()._write_inputs()
        if not isinstance(self._teacher, str):
            save_model_in_memory(self._teacher, self._tokenizer, self._teacher_folder())

    def evaluate(self) -> dict[str, float]:
        """Raises ConfigError: there is nothing to measure."""
        raise ConfigError(_NOTHING_TO_MEASURE)
