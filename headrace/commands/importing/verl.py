"""verl's settings (verl/trainer/config, `ppo_trainer.yaml`) as ours.

A run of verl has its defaults where its config says nothing. Those that differ from ours and change what is learned are written out.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.commands.importing.given import CONFIG_NAME, CONFIG_PLACE
from headrace.commands.importing.translation import Library, Translation

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
DEFAULT = "verl's default"
PROCESSES = "rewards are computed in processes of their own"
OFF = "only used with settings that are off"
BASES = ("ppo_trainer", "ppo_megatron_trainer")
"""verl's own configs, whose values are its defaults."""
REFERENCE = (
    "strategy",
    "use_",
    "log_prob",
    "profiler",
    "fsdp",
    "ulysses",
    "entropy_",
    "megatron",
    "load_",
    "rollout_n",
    "ppo_",
)
"""Beginnings of the reference's settings that change nothing of what it says."""
PLACEMENT = "memory, devices and processes, which headrace fits to the machine (docs/auto.md, docs/scale.md)"

ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_passk": "pass@k",
    "rloo": "rloo",
    "opo": "opo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++_baseline",
}
ALONE = "single_turn_agent"
"""The agent loop of a prompt and its completion."""
LOSSES = {
    "gspo": "gspo_token",
    "geo_mean": "gmpo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "cispo": "cispo",
    "sapo": "sapo",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "dro": "kimi",
}
BOUNDED = ("vanilla", "geo_mean", "clip_cov", "cispo")
"""Losses whose bounds of the ratio mean the same here."""
REGIONS = ("dppo_tv", "dppo_kl")
"""Losses that take these bounds for those of a divergence."""
OF_SEQUENCES = ("geo_mean", "sapo")
"""Losses that verl takes the mean over sequences of, whatever loss_agg_mode says."""
MEGATRON = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Megatron's names of all linear layers."""
SELECTING = {"clip_cov": "clip_cov_ratio", "kl_cov": "kl_cov_ratio"}
"""Losses that select tokens, and the name of their share."""
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "token_sum",
}
ESTIMATES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
KINDS = {".parquet": "parquet", ".jsonl": "jsonl", ".csv": "csv"}


def is_of(given: Mapping[str, Any]) -> bool:
    return any(name.startswith(("actor_rollout_ref.", "algorithm.adv_")) for name in given)


def translate(t: Translation) -> None:
    """Fills a translation of a run of verl's trainer."""
    t.leave("classes of verl", *(name for name in t.given if name.endswith("._target_")))
    _base(t)
    _model(t)
    _data(t)
    _rollouts(t)
    per_batch = _batches(t)
    _algorithm(t)
    _critic(t, per_batch)
    _divergence(t)
    _optimizer(t, per_batch)
    _reward(t)
    _lora(t)
    _left_out(t)


def _base(t: Translation) -> None:
    """Says where the settings are that this file's go over."""
    place, name = t.value(CONFIG_PLACE), t.value(CONFIG_NAME, default=BASES[0])
    if place or str(name).removesuffix(".yaml") not in BASES:
        t.also.append(
            f"the script's settings go over those of {str(name).removesuffix('.yaml')}.yaml ({CONFIG_NAME}){f' of {place}' if place else ''}, which was not read: "
            "translate that file too, and add what it has"
        )


def _model(t: Translation) -> None:
    path = t.value(f"{MODEL}path")
    if path is None:
        t.to_do["model.path"] = "the model: a directory that transformers loads, or a hub id"
    else:
        t.put("model.path", os.path.expanduser(str(path)))
    if name := t.value("trainer.experiment_name"):
        plain = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in str(name)).strip("._-")
        t.put("name", plain or None)
    for logger in _listed(t.value("trainer.logger")):
        if logger in ("wandb", "tensorboard", "mlflow", "trackio"):
            t.put(f"observe.{logger}", True)
        else:
            t.leave("a run has its own log, report and board", "trainer.logger")


def _data(t: Translation) -> None:
    files = [os.path.expanduser(str(path)) for path in _listed(t.value("data.train_files"))]
    kind = KINDS.get(Path(files[0]).suffix) if files else None
    if kind is None:
        there = f", made of {', '.join(files)}" if files else ""
        t.to_do["task.path"] = f"the prompts: a .parquet, .jsonl or .csv file, with task.kind{there}"
    else:
        t.put("task.kind", kind)
        t.put("task.path", files[0])
        if len(files) > 1:
            t.to_do["task.path"] = f"one file with the rows of all: {', '.join(files)}"
    held_out = [os.path.expanduser(str(path)) for path in _listed(t.value("data.val_files"))]
    if held_out:
        t.put("task.held_out_path", held_out[0], "the first of several" if len(held_out) > 1 else "")
        _measured(t, _count(held_out[0]))
    t.take("task.prompt", "data.prompt_key")
    t.take("task.shuffle", "data.shuffle")
    before = "data.apply_chat_template_kwargs."
    template = {name.removeprefix(before): t.value(name) for name in t.given if name.startswith(before)}
    t.put("task.template", template or None)


def _measured(t: Translation, rows: int) -> None:
    """Verl measures all rows of its file, or the first so many."""
    most = int(t.number("data.val_max_samples", default=-1))
    count = min(rows, most) if rows and most > 0 else rows or max(most, 0)
    if count:
        for setting in ("task.held_out", "eval.prompts"):
            t.put(setting, count, "as many as verl evaluates")
    else:
        t.to_do["eval.prompts"] = (
            "the number of rows of the file, all of which verl evaluates; as many in task.held_out"
        )


def _rollouts(t: Translation) -> None:
    prompt, response = (
        t.number(f"{ROLLOUT}{part}_length", f"data.max_{part}_length", default=512) for part in ("prompt", "response")
    )  # verl samples up to the first, which is the second unless it is given
    t.put("rollout.max_tokens", response)
    t.put("engine.context_length", prompt + response, "prompt and completion together")
    t.put("rollout.group_size", t.number(f"{ROLLOUT}n", default=1))
    t.take("rollout.temperature", f"{ROLLOUT}temperature")
    t.take("rollout.top_p", f"{ROLLOUT}top_p")
    if (top_k := t.number(f"{ROLLOUT}top_k", default=-1)) > 0:
        t.put("rollout.top_k", top_k)
    t.put(
        "eval.temperature",
        t.number(f"{ROLLOUT}val_kwargs.temperature", default=0),
        "verl evaluates greedily unless it is told",
    )
    t.put("eval.samples", t.number(f"{ROLLOUT}val_kwargs.n", default=1))
    t.leave_all("evaluations have the filters of rollouts, and a temperature of their own", [f"{ROLLOUT}val_kwargs."])
    tools = [f"{ROLLOUT}multi_turn.", f"{ROLLOUT}agent."]
    given = any(t.value(f"{ROLLOUT}multi_turn.{what}_config_path") for what in ("tool", "interaction"))
    agent = t.value(f"{ROLLOUT}agent.default_agent_loop", default=ALONE)
    if t.value(f"{ROLLOUT}multi_turn.enable", default=given) or agent != ALONE:
        t.to_do["environment.function"] = "the tools and turns of your rollouts (docs/environments.md)"
        t.leave_all("the tools and turns of rollouts are an environment (docs/environments.md)", tools)
    t.take("rollout.keep_routing", f"{ROLLOUT}enable_rollout_routing_replay")
    longest = t.number(f"{ROLLOUT}max_model_len", default=prompt + response)
    if longest < prompt + response:
        t.put("engine.context_length", longest, "prompt and completion together, as max_model_len says")
    kind = t.value(f"{ROLLOUT}name")
    there = f'; with {kind} installed, engine.kind = "{kind}"' if kind in ("vllm", "sglang") else ""
    t.leave(f"headrace has an engine of its own{there} (docs/engines.md)", f"{ROLLOUT}name")


def _batches(t: Translation) -> int:
    """Returns the optimizer steps of one of verl's batches, of which each mini-batch is one."""
    batch = t.number("data.train_batch_size", default=1024)
    mini = min(t.number(f"{ACTOR}ppo_mini_batch_size", default=256), batch)
    if mini < 1:  # verl's asynchronous trainers, which draw prompts one by one
        t.to_do["staleness.groups_per_step"] = "the prompts of an optimizer step"
        batch = mini = max(batch, mini, 1)
    per_batch = math.ceil(batch / mini)
    t.put(
        "staleness.groups_per_step",
        mini,
        f"verl draws {batch} prompts and takes {per_batch} optimizer step{'s' * (per_batch > 1)} with them; a group of equal rewards "
        "takes no place here, and another is drawn",
    )
    t.put(
        "staleness.max_lag", max(1, per_batch - 1), "0: generation waits for training, as in verl with one mini-batch"
    )
    if (passes := t.number(f"{ACTOR}ppo_epochs", default=1)) != 1:
        t.put(
            "train.epochs",
            passes,
            "each of verl's mini-batches is a step here, and makes its updates one after the other",
        )
    total, epochs = t.number("trainer.total_training_steps", default=0), t.number("trainer.total_epochs", default=30)
    rows, most = _count(t.settings.get("task.path", "")), t.number("data.train_max_samples", default=-1)
    if most > 0:
        t.also.append(f"verl drew from {most} rows alone (data.train_max_samples): make a file of them")
        rows = min(rows, most)
    if total > 0:
        t.put("train.steps", total * per_batch)
    elif rows:
        t.put("train.steps", rows // batch * per_batch * epochs or 1, f"{epochs} epochs of {rows} rows")
    else:
        t.to_do["train.steps"] = f"{epochs} epochs are {epochs} * (rows of the file) / {mini}"
    for setting, name in (("checkpoint.every", "save_freq"), ("eval.every", "test_freq")):
        if (every := t.number(f"trainer.{name}", default=-1)) > 0:
            t.put(setting, every * per_batch)
    return per_batch


def _algorithm(t: Translation) -> None:
    estimator = t.word("algorithm.adv_estimator", default="gae")
    if estimator not in ESTIMATORS:
        t.to_do["algo.name"] = f"{estimator} has no counterpart: docs/choosing.md"
    mode = t.word(f"{ACTOR}policy_loss.loss_mode", default="vanilla")
    if estimator in ESTIMATORS:
        t.put("algo.name", LOSSES.get(mode, "") if estimator == "grpo" and mode in LOSSES else ESTIMATORS[estimator])
        if mode in LOSSES and estimator != "grpo":
            t.put("algo.select.kind", mode if mode in SELECTING else None)
            t.put("algo.loss", LOSSES[mode] if mode != "clip_cov" else None)
    if mode not in LOSSES and mode != "vanilla":
        t.to_do["algo.loss"] = f"{mode} has no counterpart: docs/algorithms.md"
    if estimator == "grpo" and not t.value("algorithm.norm_adv_by_std_in_grpo", default=True):
        t.put("algo.advantage", "centred")
    elif estimator == "grpo" and mode == "dro":
        t.put("algo.advantage", "group_norm")
    said = t.word(f"{ACTOR}loss_agg_mode", default="token-mean")
    if said not in AGGREGATIONS:
        t.to_do["algo.aggregation"] = f"{said} has no counterpart: docs/algorithms.md"
    elif mode == "gspo" and f"{ACTOR}loss_agg_mode" not in t.given:
        t.also.append(
            "verl 0.9.1 takes GSPO's mean over tokens where loss_agg_mode is not set, and earlier versions over sequences, as here: set algo.aggregation = "
            '"token_mean" if yours was the former'
        )
    elif mode not in OF_SEQUENCES:
        t.put("algo.aggregation", AGGREGATIONS[said])
    if estimator in ESTIMATORS or mode == "vanilla":
        _bounds(t, mode)
    if coef := t.number(f"{ACTOR}entropy_coeff", default=0):
        t.put("algo.entropy.coef", coef)
    if estimator not in ("reinforce_plus_plus", "gae"):
        t.leave("verl discounts nothing with this estimator", "algorithm.gamma")
    elif (gamma := t.number("algorithm.gamma", default=1.0)) != 1.0:
        t.put("algo.gamma", gamma)
    if estimator == "gae" and (lam := t.number("algorithm.lam", default=1.0)) != 1.0:
        t.put("algo.lam", lam)
    if t.value("algorithm.use_pf_ppo"):
        t.also.append(
            "verl drew rollouts again by their rewards (algorithm.use_pf_ppo); algo.subset chooses some (docs/algorithms.md)"
        )
        t.leave_all("rollouts are not drawn again", ["algorithm.pf_ppo."])
    if t.value("algorithm.filter_groups.enable"):
        t.leave(
            "headrace leaves out every group without contrast, and draws on until the step is full",
            "algorithm.filter_groups.enable",
        )
        if (metric := t.value("algorithm.filter_groups.metric")) not in (None, "seq_reward", "seq_final_reward"):
            t.also.append(
                f"verl left out groups of equal {metric} (algorithm.filter_groups.metric), and here the reward alone says which have no contrast"
            )
        t.leave_all("a step draws on until it is full", ["algorithm.filter_groups."])


def _critic(t: Translation, per_batch: int) -> None:
    """verl updates the policy from batch `critic_warmup` on, counted from 1 (`RayPPOTrainer.fit`)."""
    if t.word("algorithm.adv_estimator", default="gae") != "gae":
        return
    if (alone := (t.number("trainer.critic_warmup", default=0) - 1) * per_batch) > 0:
        t.put("algo.critic.alone_steps", alone, "verl's first update of the policy is in batch critic_warmup")
    if (path := t.value("critic.model.path")) is not None:
        t.put("algo.critic.model", os.path.expanduser(str(path)))
        t.put("algo.critic.model_learning_rate", t.number("critic.optim.lr", default=1e-5))


def _bounds(t: Translation, mode: str) -> None:
    """Translates the constants of a loss."""
    names = [f"{ACTOR}clip_ratio{which}" for which in ("", "_low", "_high")]
    if mode in BOUNDED or mode in REGIONS:
        both = t.value(names[0], default=0.2)
        low, high = (t.value(name, default=both) for name in names[1:])
        if mode in REGIONS:
            t.put("algo.delta", high, "verl's bound for bad tokens is another" if low != high else "")
            t.put("algo.cap", t.value(f"{ACTOR}clip_ratio_c", default=3.0), _whose(t, f"{ACTOR}clip_ratio_c"))
        else:
            t.put("algo.clip_low", low)
            t.put("algo.clip_high", high)
        if both != 0.2 and any(t.given.get(name) is None for name in names[1:]):
            t.also.append(
                f"verl's own clip_ratio_low and clip_ratio_high are 0.2 and go over clip_ratio, which is {both} and is translated: "
                "see which one your run had"
            )
    elif mode == "gspo":
        t.leave("the ratio is to the sampler here, whose rounding needs wider bounds (docs/algorithms.md)", *names)
    if mode == "vanilla":
        t.put("algo.dual_clip", t.value(f"{ACTOR}clip_ratio_c", default=3.0), _whose(t, f"{ACTOR}clip_ratio_c"))
    if mode in SELECTING:
        t.take("algo.select.fraction", f"{ACTOR}policy_loss.{SELECTING[mode]}")
    if mode == "clip_cov":
        bounds = [f"{ACTOR}policy_loss.clip_cov_{which}" for which in ("lb", "ub")]
        t.leave("the tokens of the largest covariance are taken out, without a draw between bounds", *bounds)
    if mode == "dro":
        t.take("algo.tau", f"{ACTOR}policy_loss.dro_beta")
    if mode == "kl_cov":
        t.take("algo.penalty", f"{ACTOR}policy_loss.ppo_kl_coef")


def _divergence(t: Translation) -> None:
    in_loss, in_reward = t.value(f"{ACTOR}use_kl_loss"), t.value("algorithm.use_kl_in_reward")
    if in_loss:
        kind = t.value(f"{ACTOR}kl_loss_type", default="low_var_kl")
        estimator = ESTIMATES.get(str(kind).removesuffix("+"), "")
        t.put("algo.kl.coef", t.value(f"{ACTOR}kl_loss_coef", default=0.001))
        t.put("algo.kl.place", "loss")
        t.put(
            "algo.kl.estimator",
            estimator if estimator in ("k2", "k3") else "k3",
            "" if estimator in ("k2", "k3") else f"{kind} has no gradient as a loss",
        )
    elif in_reward:
        t.put("algo.kl.coef", t.value("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty_coef", default=0.001))
        t.put("algo.kl.place", "reward")
        t.put("algo.kl.estimator", "k1")
        penalty, control = "algorithm.kl_penalty", "algorithm.kl_ctrl.type"
        if ESTIMATES.get(str(t.value(penalty, default="kl")).removesuffix("+")) != "k1":
            t.leave("the divergence in the reward is always k1 (docs/algorithms.md)", penalty)
        if t.value(control, default="fixed") != "fixed":
            t.leave(
                "the coefficient of a divergence in the reward stays what it is (algo.kl.target moves that of one in the loss)",
                *(name for name in t.given if name.startswith("algorithm.kl_ctrl.")),
            )
    if in_loss or in_reward:
        own = t.value("actor_rollout_ref.ref.model.path", default=t.value(f"{MODEL}path"))
        if own != t.value(f"{MODEL}path"):
            t.also.append(
                f"verl's reference is {own} (ref.model.path), and here it is the model that training begins with"
            )
    else:
        t.leave_all(OFF, ["actor_rollout_ref.ref.model"])
    if in_loss and in_reward:
        t.leave("the divergence is in the loss already, and has one place", "algorithm.use_kl_in_reward")


def _optimizer(t: Translation, per_batch: int) -> None:
    optim = f"{ACTOR}optim."
    t.put("train.learning_rate", t.value(f"{optim}lr", default=1e-6), _whose(t, f"{optim}lr"))
    t.put("train.weight_decay", t.value(f"{optim}weight_decay", default=0.01), _whose(t, f"{optim}weight_decay"))
    betas = t.value(f"{optim}betas", default=(0.9, 0.999))
    first, second = betas if isinstance(betas, list | tuple) and len(betas) == 2 else (betas, betas)
    t.put("train.beta1", first)
    t.put("train.beta2", second, _whose(t, f"{optim}betas"))
    t.put("train.max_grad_norm", t.value(f"{ACTOR}grad_clip", f"{optim}clip_grad", default=1.0))
    schedule = t.word(
        f"{optim}warmup_style", f"{optim}lr_scheduler_type", default="constant"
    )  # the older name wins there
    if schedule in ("constant", "cosine"):
        t.put("train.schedule", schedule)
        if schedule == "cosine":
            t.leave("the rate falls to zero, along half a wave", f"{optim}min_lr_ratio", f"{optim}num_cycles")
    else:
        t.to_do["train.schedule"] = f"{schedule} has no counterpart: constant, cosine or linear"
    steps = t.number(f"{optim}lr_warmup_steps", default=-1)
    share = t.number(f"{optim}lr_warmup_steps_ratio", default=0.0)
    if steps > 0 or (steps == 0 and not share):  # its newer versions take 0 for "not given"
        t.put("train.warmup_steps", steps * per_batch)
    elif share and "train.steps" in t.settings:
        t.put("train.warmup_steps", round(share * t.settings["train.steps"]))
    elif share:
        t.to_do["train.warmup_steps"] = f"{share:g} of train.steps"
    t.take("train.gradient_checkpointing", f"{MODEL}enable_gradient_checkpointing")


def _reward(t: Translation) -> None:
    tables = ("custom_reward_function.", "reward.custom_reward_function.")
    path, name = (t.value(*(f"{table}{what}" for table in tables)) for what in ("path", "name"))
    before = [f"{table}reward_kwargs." for table in tables]
    more = {one.removeprefix(begin): t.value(one) for begin in before for one in t.given if one.startswith(begin)}
    if path:
        t.files["verl_reward.py"] = _WRAPPER.format(
            path=json.dumps(_place(str(path))),
            name=json.dumps(name := name or "compute_score"),
            more=repr(more),
            source=json.dumps(t.word("data.reward_fn_key", default="data_source")),
        )
        t.put(
            "reward.function", "verl_reward.py:reward", f"calls {name} of {path} as verl does, once for each completion"
        )
        t.put("reward.special_tokens", "hide", "as verl decodes")
    else:
        t.to_do["reward.function"] = (
            'verl chose one by the row\'s data_source; name yours: "rewards.py:name", which is given the columns of the row, such as '
            "reward_model with its ground_truth (docs/scoring.md)"
        )
        t.leave("a reward function is given all columns of the row", "data.reward_fn_key")
        t.leave(OFF, *(f"{table}name" for table in tables))
    _reward_manager(t)


def _reward_manager(t: Translation) -> None:
    """Translates what verl does with a function's scores, and a reward model. Both stand in `reward_model` or, in newer versions, in `reward`."""
    if t.value("reward_model.enable", "reward.reward_model.enable"):
        t.to_do["reward.services"] = "the reward model behind a server (docs/scoring.md, services)"
        reason = "the reward model is served by itself"
    else:
        reason = OFF
    parts = ("model.", "rollout.", "micro_batch", "max_length", "forward_", "strategy", "use_dynamic", "enable", "ulysses", "profiler", "megatron.", "nccl")  # fmt: skip
    t.leave_all(reason, [*(f"reward_model.{part}" for part in parts), "reward.reward_model."])
    t.leave_all(
        PROCESSES,
        [f"reward_model.{name}" for name in ("use_reward_loop", "num_workers", "launch_", "n_gpus", "nnodes")],
    )
    for manager in ("naive", "dapo", "prime"):  # all of them call the function once for each completion
        t.same(
            "the reward function is called for each completion",
            {"reward_model.reward_manager": manager, "reward_manager.name": manager},
        )
    beginnings = ("reward_model.", "reward_model.reward_kwargs.", "reward.reward_kwargs.")
    buffers = [f"{begin}overlong_buffer{end}." for begin in beginnings for end in ("", "_cfg")]
    if t.value(*(f"{buffer}enable" for buffer in buffers)):
        longest = t.settings["rollout.max_tokens"]
        cache = "reward.soft_overlong_punishment.cache"
        t.take(cache, *(f"{buffer}len" for buffer in buffers))
        if cache not in t.settings:
            t.to_do[cache] = (
                "verl punishes completions in their last so many tokens, and nothing gave the number (overlong_buffer.len)"
            )
        t.take("reward.soft_overlong_punishment.weight", *(f"{buffer}penalty_factor" for buffer in buffers))
        t.same("rollout.max_tokens says it", {f"{begin}max_resp_len": longest for begin in beginnings})
    else:
        t.leave_all(OFF, [*buffers, *(f"{begin}max_resp_len" for begin in beginnings)])
    t.leave("the report has all parts of a reward", *(f"{buffer}log" for buffer in buffers))


def _lora(t: Translation) -> None:
    old, new = (t.number(f"{MODEL}lora{part}", default=0) for part in ("_rank", ".rank"))
    if adapter := t.value(f"{MODEL}lora_adapter_path"):
        t.also.append(
            f"verl goes on with the adapter {adapter} (lora_adapter_path): merge it into a model, and name that in model.path"
        )
    if not (old or new):
        t.leave_all(OFF, [f"{MODEL}lora", f"{MODEL}target_modules", f"{MODEL}exclude_modules"])
        return
    t.put("lora.rank", old or new)
    if old:
        t.put("lora.alpha", t.number(f"{MODEL}lora_alpha", default=16))
        t.put("lora.targets", t.value(f"{MODEL}target_modules", default="all-linear"))
    else:  # Megatron's, which has other names for a model's parts
        t.put("lora.alpha", t.number(f"{MODEL}lora.alpha", default=32), _whose(t, f"{MODEL}lora.alpha"))
        named = set(_listed(t.value(f"{MODEL}lora.target_modules", default=MEGATRON)))
        if named >= set(MEGATRON):
            t.put("lora.targets", "all-linear")
        else:
            t.to_do["lora.targets"] = f"the parts that Megatron calls {', '.join(map(str, named))}"
        t.leave("the adapter is merged or not as the engine takes it", f"{MODEL}lora.merge")


def _left_out(t: Translation) -> None:
    judged = t.word("algorithm.adv_estimator", default="gae") == "gae"
    why = "a critic has few settings (algo.critic)" if judged else "this estimator has no critic"
    t.leave_all(why, ("critic.", "trainer.critic_", "algorithm.lam"))
    t.leave_all(
        "columns with images are named in task.images (docs/vision.md)",
        ("data.image_key", "data.video_key", "data.return_multi_modal"),
    )
    t.leave_all("a run goes on with `headrace train --resume RUN`", ("trainer.resume_", "trainer.del_local"))
    t.leave_all(
        "runs lie in `out`, and keep checkpoint.keep checkpoints",
        ("trainer.default_", "trainer.max_", "trainer.project_name"),
    )
    t.leave_all(
        "the report shows samples, and the journal has every token",
        ("trainer.log_val", "trainer.rollout_data", "trainer.validation_data", "trainer.val_before"),
    )
    t.leave_all(OFF, (
        f"{ACTOR}kl_loss", "algorithm.kl_", "algorithm.pf_ppo", f"{ACTOR}policy_loss.clip_cov", f"{ACTOR}policy_loss.kl_cov",
        f"{ACTOR}policy_loss.ppo_kl", f"{ROLLOUT}multi_turn", f"{ROLLOUT}agent", f"{ROLLOUT}trace", "algorithm.filter_groups",
        f"{ACTOR}optim.min_lr", f"{ACTOR}optim.num_cycles", f"{ACTOR}optim.total", f"{ACTOR}clip_ratio",
        "custom_reward_function.",
    ))  # fmt: skip
    t.leave_all("prompts are checked against the context at the start, and each is used as it is", (
        "data.filter_overlong", "data.truncation", "data.val_batch", "data.return_", "data.dataloader", "data.validation_shuffle",
        "data.seed",
    ))  # fmt: skip
    usual = {"ignore_eos": False, "do_sample": True, "over_sample_rate": 0}
    t.same("here as there", {f"{ROLLOUT}{name}": value for name, value in usual.items()} | {"trainer.val_only": False})
    t.leave_all(PLACEMENT, (
        f"{ACTOR}fsdp", f"{ACTOR}ppo_micro", f"{ACTOR}ppo_max_token", f"{ACTOR}ulysses", f"{ACTOR}use_", f"{ACTOR}strategy", f"{ACTOR}checkpoint",
        f"{ACTOR}megatron", f"{ACTOR}entropy_", f"{ACTOR}shuffle", f"{ACTOR}profile", *(f"actor_rollout_ref.ref.{name}" for name in REFERENCE), "actor_rollout_ref.hybrid",
        "actor_rollout_ref.nccl", f"{MODEL}use_", f"{MODEL}enable_", f"{MODEL}fused", f"{MODEL}trust",
        "trainer.n_gpus", "trainer.nnodes", "trainer.balance", "trainer.device",
        "trainer.ray", "trainer.use_", "trainer.esi", "ray", "global_profiler", "data.use_shm", "data.trust",
        *(f"{ROLLOUT}{name}" for name in (
            "gpu_", "tensor_", "max_num", "log_prob", "dtype", "enforce", "free_", "cudagraph", "disable_", "engine_kwargs", "load_format", "layered",
            "enable_", "mode", "update_", "multi_stage", "skip_",
            "calculate_", "profiler", "data_parallel", "expert_",
        )),
    ))  # fmt: skip


def _whose(t: Translation, *names: str) -> str:
    return "" if any(t.given.get(name) is not None for name in names) else DEFAULT


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _place(path: str) -> str:
    """A file that is here is found from every directory, and what is in it is known to a run that is resumed."""
    found = os.path.expanduser(path)
    return os.path.abspath(found) if os.path.isfile(found) else found


def _count(path: str) -> int:
    """Returns the number of rows of a file; 0 where it is not here."""
    from headrace.core.errors import ConfigError
    from headrace.episodes.tasks.read import kind_of, read_rows

    try:
        return len(read_rows(kind_of(path), path)) if path and Path(path).is_file() else 0
    except ConfigError:
        return 0


_WRAPPER = '''"""Calls a reward function that was written for verl as verl does: once for each completion. Written by `headrace import`."""

import importlib.util

PATH, NAME, MORE, SOURCE = {path}, {name}, {more}, {source}


def _function():
    spec = importlib.util.spec_from_file_location("verl_reward_function", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, NAME)


SCORE = _function()


def reward(prompts, completions, **columns):
    found = []
    for place, text in enumerate(completions):
        row = {{name: values[place] for name, values in columns.items()}}
        truth = (row.get("reward_model") or {{}}).get("ground_truth")
        score = SCORE(data_source=row.get(SOURCE), solution_str=text, ground_truth=truth, extra_info=row.get("extra_info") or {{}}, **MORE)
        found.append(float(score["score"] if isinstance(score, dict) else score))
    return found
'''

VERL = Library("verl", is_of, translate)
