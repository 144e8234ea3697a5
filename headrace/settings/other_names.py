"""The names that other libraries (TRL, verl, OpenRLHF, prime-rl) give to our settings, for people who write a config from memory.

A name is looked up whole, then without its first parts: `actor_rollout_ref.rollout.n`, `rollout.n`, `n`. Names that headrace uses too
(`rollout.temperature`, `train.warmup_steps`) need no row: they are found like misplaced names.
"""

from __future__ import annotations

from typing import NamedTuple


class Meaning(NamedTuple):
    whose: str
    """Libraries that use the name."""
    ours: str
    """Our setting, or several; empty if there is none."""
    note: str = ""
    """The difference between the two settings."""


_BY_TOKENS = "which counts tokens, bounds memory, and never changes the gradient"
_STEPS = "which counts optimizer steps; prompts are drawn epoch after epoch until all steps are done"
_LENGTH = "which holds prompt and completion together"
_IN_LOSS = "of a divergence in the loss, by its mean over tokens"
_BY_STEP = "the factor's relative change for each step, where a horizon counts steps"
_GROUPS = "which counts prompts, each with rollout.group_size completions"

MEANINGS: dict[str, Meaning] = {
    # the model
    "model_name_or_path": Meaning("TRL", "model.path"),
    "pretrain": Meaning("OpenRLHF", "model.path"),
    "actor_rollout_ref.model.path": Meaning("verl", "model.path"),
    "model.name": Meaning("prime-rl", "model.path"),
    # the data
    "dataset_name": Meaning("TRL", "task.path", "with task.kind; save a data set of the hub with save_to_disk first"),
    "data.train_files": Meaning("verl", "task.path", "with task.kind = parquet"),
    "data.val_files": Meaning("verl", "task.held_out_path"),
    "data.prompt_key": Meaning("verl", "task.prompt"),
    "prompt_data": Meaning("OpenRLHF", "task.path", "with task.kind"),
    "input_key": Meaning("OpenRLHF", "task.prompt"),
    "label_key": Meaning("OpenRLHF", "task.answer"),
    "apply_chat_template": Meaning("OpenRLHF", "task.chat"),
    "chat_template_kwargs": Meaning("TRL", "task.template"),
    "apply_chat_template_kwargs": Meaning("verl", "task.template"),
    "system_prompt": Meaning("several libraries", "task.system"),
    # the reward
    "reward_funcs": Meaning("TRL", "reward.function", 'as "path/to/file.py:name"; several are reward.functions'),
    "reward_weights": Meaning("TRL", "reward.functions", "each entry has a weight"),
    "remote_rm_url": Meaning("OpenRLHF", "reward.services", "each entry has a url (docs/scoring.md)"),
    "custom_reward_function.path": Meaning("verl", "reward.function", 'as "path/to/file.py:name"'),
    "custom_reward_function.name": Meaning("verl", "reward.function", 'as "path/to/file.py:name"'),
    # rollouts
    "num_generations": Meaning("TRL", "rollout.group_size"),
    "rollout.n": Meaning("verl", "rollout.group_size"),
    "n_samples_per_prompt": Meaning("OpenRLHF", "rollout.group_size"),
    "rollouts_per_example": Meaning("prime-rl", "rollout.group_size"),
    "max_completion_length": Meaning("TRL", "rollout.max_tokens"),
    "max_response_length": Meaning("verl", "rollout.max_tokens"),
    "generate_max_len": Meaning("OpenRLHF", "rollout.max_tokens"),
    "max_new_tokens": Meaning("transformers and OpenRLHF", "rollout.max_tokens"),
    "sampling.max_tokens": Meaning("prime-rl", "rollout.max_tokens"),
    "max_prompt_length": Meaning("TRL and verl", "engine.context_length", _LENGTH),
    "prompt_max_len": Meaning("OpenRLHF", "engine.context_length", _LENGTH),
    "max_model_len": Meaning("vLLM, verl and prime-rl", "engine.context_length", _LENGTH),
    "seq_len": Meaning("prime-rl", "engine.context_length", _LENGTH),
    "top_p_sampling": Meaning("several libraries", "rollout.top_p"),
    # the algorithm
    "beta": Meaning("TRL", "algo.kl.coef"),
    "kl_coef": Meaning("verl and others", "algo.kl.coef"),
    "kl_loss_coef": Meaning("verl", "algo.kl.coef"),
    "init_kl_coef": Meaning("OpenRLHF", "algo.kl.coef"),
    "kl_target": Meaning("OpenRLHF", "algo.kl.target", _IN_LOSS),
    "kl_ctrl.target_kl": Meaning("verl", "algo.kl.target", _IN_LOSS),
    "kl_horizon": Meaning("OpenRLHF", "algo.kl.change", _BY_STEP),
    "kl_ctrl.horizon": Meaning("verl", "algo.kl.change", _BY_STEP),
    "ref_model_sync_steps": Meaning("TRL", "algo.kl.every", "after which the reference is the policy, and no mixture"),
    "sync_ref_model": Meaning("TRL", "algo.kl.every", "after which the reference is the policy, and no mixture"),
    "kl_loss_type": Meaning("verl", "algo.kl.estimator"),
    "kl_estimator": Meaning("OpenRLHF", "algo.kl.estimator"),
    "use_kl_loss": Meaning("verl and OpenRLHF", 'algo.kl.coef with algo.kl.place = "loss"'),
    "use_kl_in_reward": Meaning("verl", 'algo.kl.coef with algo.kl.place = "reward"'),
    "epsilon": Meaning("TRL", "algo.clip_low and algo.clip_high"),
    "epsilon_high": Meaning("TRL", "algo.clip_high"),
    "clip_ratio": Meaning("verl", "algo.clip_low and algo.clip_high"),
    "clip_ratio_low": Meaning("verl", "algo.clip_low"),
    "clip_ratio_high": Meaning("verl", "algo.clip_high"),
    "clip_ratio_c": Meaning("verl", "algo.dual_clip"),
    "eps_clip": Meaning("OpenRLHF", "algo.clip_low and algo.clip_high"),
    "eps_clip_low_high": Meaning("OpenRLHF", "algo.clip_low and algo.clip_high"),
    "cliprange": Meaning("TRL", "algo.clip_low and algo.clip_high"),
    "delta": Meaning("TRL", "algo.dual_clip"),
    "loss_type": Meaning(
        "TRL", "algo.name", "such as grpo, dr_grpo, dapo; or algo.loss and algo.aggregation separately"
    ),
    "loss_agg_mode": Meaning("verl", "algo.aggregation"),
    "scale_rewards": Meaning("TRL", "algo.advantage", "centred does not divide by the deviation, group_norm does"),
    "importance_sampling_level": Meaning("TRL", 'algo.name = "gspo"', "if it is sequence"),
    "mask_truncated_completions": Meaning("TRL", 'algo.overlong = "mask"'),
    "adv_estimator": Meaning("verl", "algo.name"),
    "advantage_estimator": Meaning("OpenRLHF", "algo.name"),
    "num_iterations": Meaning("TRL", "train.epochs"),
    "ppo_epochs": Meaning("verl", "train.epochs"),
    "ppo_mini_batch_size": Meaning("verl", "train.minibatches", "which counts the parts of a step"),
    "entropy_coeff": Meaning("verl", "algo.entropy.coef"),
    "entropy_coef": Meaning("TRL", "algo.entropy.coef"),
    "gamma": Meaning("PPO", "algo.gamma", 'over turns, or over tokens with algo.name = "ppo" or "reinforce++"'),
    "step_advantage_w": Meaning("verl-agent", "algo.state_weight"),
    "lam": Meaning("PPO", "algo.lam", 'over tokens with algo.name = "ppo", else over turns'),
    "vf_coef": Meaning("TRL", "algo.critic.trunk", "the head itself has a learning rate of its own"),
    "cliprange_value": Meaning("verl", "", "values are not clipped (docs/decisions/0049-several-updates.md)"),
    "critic_warmup": Meaning("verl", "algo.critic.alone_steps"),
    "critic_pretrain": Meaning("OpenRLHF", "algo.critic.model"),
    "critic_learning_rate": Meaning("OpenRLHF", "algo.critic.model_learning_rate", "of the critic's own model"),
    # the optimizer
    "lr": Meaning("several libraries", "train.learning_rate"),
    "actor_learning_rate": Meaning("OpenRLHF", "train.learning_rate"),
    "lr_scheduler_type": Meaning("TRL", "train.schedule"),
    "lr_scheduler": Meaning("OpenRLHF", "train.schedule"),
    "lr_warmup_steps": Meaning("verl", "train.warmup_steps"),
    "warmup_ratio": Meaning("TRL", "train.warmup_steps", "which counts steps"),
    "grad_clip": Meaning("verl", "train.max_grad_norm"),
    "adam_beta1": Meaning("TRL", "train.beta1"),
    "adam_beta2": Meaning("TRL", "train.beta2"),
    "bf16": Meaning("TRL and OpenRLHF", 'train.dtype = "bfloat16"'),
    "per_device_train_batch_size": Meaning("TRL", "staleness.groups_per_step", _GROUPS),
    "train_batch_size": Meaning("verl and OpenRLHF", "staleness.groups_per_step", _GROUPS),
    "rollout_batch_size": Meaning("OpenRLHF", "staleness.groups_per_step", _GROUPS),
    "batch_size": Meaning("several libraries", "staleness.groups_per_step", _GROUPS),
    "micro_train_batch_size": Meaning("OpenRLHF", "train.microbatch_tokens", _BY_TOKENS),
    "ppo_micro_batch_size_per_gpu": Meaning("verl", "train.microbatch_tokens", _BY_TOKENS),
    "ppo_max_token_len_per_gpu": Meaning("verl", "train.microbatch_tokens", _BY_TOKENS),
    "gradient_accumulation_steps": Meaning("TRL", "train.microbatch_tokens", _BY_TOKENS),
    "max_steps": Meaning("TRL and prime-rl", "train.steps"),
    "total_training_steps": Meaning("verl", "train.steps"),
    "num_train_epochs": Meaning("TRL", "train.steps", _STEPS),
    "total_epochs": Meaning("verl", "train.steps", _STEPS),
    "num_episodes": Meaning("OpenRLHF", "train.steps", _STEPS),
    "max_epochs": Meaning("OpenRLHF", "train.epochs"),
    "lora_r": Meaning("TRL", "lora.rank"),
    "lora_rank": Meaning("verl and OpenRLHF", "lora.rank"),
    "lora_alpha": Meaning("TRL, verl and OpenRLHF", "lora.alpha"),
    "lora_target_modules": Meaning("TRL", "lora.targets"),
    "target_modules": Meaning("peft and verl", "lora.targets"),
    "load_in_4bit": Meaning("TRL and OpenRLHF", 'lora.quantise = "nf4"'),
    # staleness, engine, machine
    "max_async_level": Meaning("prime-rl", "staleness.max_lag"),
    "async_level": Meaning("prime-rl", "staleness.max_lag"),
    "max_off_policy_steps": Meaning("prime-rl", "staleness.max_lag"),
    "gpu_memory_utilization": Meaning("vLLM and verl", "engine.kv_gib", "in GiB"),
    "vllm_gpu_memory_utilization": Meaning("TRL", "engine.kv_gib", "in GiB"),
    "max_num_seqs": Meaning("vLLM and verl", "engine.max_running"),
    "use_vllm": Meaning("TRL", 'engine.kind = "vllm"'),
    "tensor_model_parallel_size": Meaning("verl", "", "a vLLM server takes it at its start, docs/engines.md"),
    "n_gpus_per_node": Meaning("verl", "train.parallel.shard", "and the other axes of [train.parallel], docs/scale.md"),
    "nnodes": Meaning("verl", "orchestration.kind", "docs/cluster.md"),
    # the run
    "output_dir": Meaning("TRL and prime-rl", "out", "the run's directory in it is called name"),
    "default_local_dir": Meaning("verl", "out", "the run's directory in it is called name"),
    "save_path": Meaning("OpenRLHF", "out", "the run's directory in it is called name"),
    "run_name": Meaning("TRL", "name"),
    "experiment_name": Meaning("verl", "name"),
    "save_steps": Meaning("TRL and OpenRLHF", "checkpoint.every"),
    "save_freq": Meaning("verl", "checkpoint.every"),
    "ckpt.interval": Meaning("prime-rl", "checkpoint.every"),
    "save_total_limit": Meaning("TRL", "checkpoint.keep"),
    "eval_steps": Meaning("TRL and OpenRLHF", "eval.every"),
    "test_freq": Meaning("verl", "eval.every"),
    "report_to": Meaning("TRL", "observe.tensorboard or observe.trackio or observe.wandb or observe.mlflow"),
    "use_wandb": Meaning("OpenRLHF", "observe.wandb"),
}


def meaning(name: str) -> str:
    """Returns a sentence about a name of another library, or an empty string. `name`: dotted, as it was given."""
    parts = name.split(".")
    for cut in range(len(parts)):
        if found := MEANINGS.get(".".join(parts[cut:]).lower()):
            return _sentence(name, found)
    return ""


def _sentence(name: str, found: Meaning) -> str:
    several = " and " in found.whose or found.whose == "several libraries"
    note = f" ({found.note})" if found.note else ""
    if not found.ours:
        return f"{name} is not a setting: {found.whose} {'have' if several else 'has'} it, headrace does not{note}; remove it"
    return f"{name} is not a setting: it is what {found.whose} {'call' if several else 'calls'} {found.ours}{note}"
