"""prime-rl's settings (src/prime_rl/configs) as ours: of an `rl.toml`, whose tables are those of its trainer, orchestrator and inference.

Its defaults differ between its versions, so that only what is given is translated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.commands.importing.translation import Library, Translation

TRAIN = ("orchestrator.train.", "orchestrator.")
"""Beginnings of the names of sampling and environments: of newer and of older configs."""
VERSIONS = "prime-rl's versions differ in it: give yours"


def is_of(given: Mapping[str, Any]) -> bool:
    return any(
        name.startswith(("orchestrator.", "trainer.model.", "trainer.optim.", "inference.model.")) for name in given
    )


def translate(t: Translation) -> None:
    """Fills a translation of a run of prime-rl."""
    _run(t)
    _rollouts(t)
    _optimizer(t)
    _loss(t)
    _environment(t)
    _left_out(t)


def _run(t: Translation) -> None:
    path = t.value(
        "model.name", "trainer.model.name", "orchestrator.model.name", "inference.model.name", "inference.vllm.model"
    )
    if path is None:
        t.to_do["model.path"] = "the model: a directory that transformers loads, or a hub id"
    t.put("model.path", path)
    steps = t.value("max_steps", "trainer.max_steps", "orchestrator.max_steps")
    if steps is None:
        t.to_do["train.steps"] = "the optimizer steps of the run"
    t.put("train.steps", steps)
    t.take("name", "wandb.name", "monitors.wandb.name")
    if any(name.startswith(("wandb", "monitors.wandb")) for name in t.given):
        t.put("observe.wandb", True)
    t.take("checkpoint.every", "ckpt.interval")
    t.take("checkpoint.keep", "ckpt.keep_last")
    t.take("seed", "seed", "orchestrator.seed")


def _rollouts(t: Translation) -> None:
    group = t.value("orchestrator.group_size", "orchestrator.rollouts_per_example", "rollouts_per_example")
    batch, size = t.number("orchestrator.batch_size", "batch_size", default=0), group if isinstance(group, int) else 0
    t.put("rollout.group_size", group)
    if batch >= 1 and size >= 1:
        groups = max(1, int(batch // size))
        rest = "" if groups * size == batch else f", of {batch} there, which are no whole groups"
        t.put("staleness.groups_per_step", groups, f"{groups * size} rollouts a step{rest}")
    else:
        t.to_do["staleness.groups_per_step"] = (
            f"the prompts of a step, each with rollout.group_size completions; {VERSIONS}"
        )
    lag = t.value("max_async_level", "orchestrator.max_async_level", "async_level", "orchestrator.async_level")
    off = t.value("max_off_policy_steps", "orchestrator.max_off_policy_steps")
    t.put("staleness.max_lag", lag if off is None else off, "a bound on every trained token")
    served = ("inference.model.max_model_len", "inference.vllm.max_model_len")
    context = t.value("seq_len", "orchestrator.seq_len", *served, "trainer.model.seq_len")
    t.put("engine.context_length", context, "prompt and completion together")
    for ours, theirs in {
        "max_tokens": ("max_completion_tokens", "max_tokens"),
        "temperature": ("temperature",),
        "top_p": ("top_p",),
        "min_p": ("min_p",),
    }.items():
        t.take(f"rollout.{ours}", *(f"{before}sampling.{name}" for before in TRAIN for name in theirs))
    if "rollout.max_tokens" not in t.settings:
        t.to_do["rollout.max_tokens"] = f"the most tokens of a completion{f', below {context}' if context else ''}"
    if any(f"{before}sampling.temp_scheduler.type" in t.given for before in TRAIN):
        t.leave_all("the temperature of a run is one", [f"{before}sampling.temp_scheduler" for before in TRAIN])
    t.take("eval.every", "orchestrator.eval.interval", "eval.interval")
    t.take("eval.samples", "orchestrator.eval.rollouts_per_example", "orchestrator.eval.group_size")
    t.take("eval.temperature", "orchestrator.eval.sampling.temperature")
    if (top_k := t.number(*(f"{before}sampling.top_k" for before in TRAIN), default=-1)) > 0:
        t.put("rollout.top_k", top_k)


def _optimizer(t: Translation) -> None:
    t.take("train.learning_rate", "trainer.optim.lr", "orchestrator.optim.lr", "optim.lr")
    if "train.learning_rate" not in t.settings:
        t.to_do["train.learning_rate"] = VERSIONS
    for ours, theirs in {
        "weight_decay": "weight_decay",
        "beta1": "betas1",
        "beta2": "betas2",
        "max_grad_norm": "max_norm",
    }.items():
        t.take(f"train.{ours}", f"trainer.optim.{theirs}", f"trainer.optim.{ours}")
    if (kind := t.word("trainer.optim.type", default="adamw")) != "adamw":
        t.to_do["train.learning_rate"] = f"that of {kind} there, and here is AdamW"
    _schedule(t)
    for table in ("trainer.model.lora", "trainer.model.experimental.lora"):
        if any(name == table or name.startswith(f"{table}.") for name in t.given):
            _lora(t, table)


def _schedule(t: Translation) -> None:
    before = "trainer.scheduler."
    schedule = t.word(f"{before}type", default="constant")
    if schedule == "linear":  # which falls in the last steps alone; here it falls from the warm-up to the end
        last, warmup = t.number(f"{before}decay_steps", default=10), t.number(f"{before}warmup_steps", default=10)
        whole = last > 0 and last + warmup == t.settings.get("train.steps")
        t.put(
            "train.schedule",
            "linear" if whole else "constant",
            "" if whole or not last else f"it fell over the last {last} steps",
        )
        t.put("train.warmup_steps", warmup)
    elif schedule in ("constant", "cosine"):
        t.put("train.schedule", schedule if f"{before}type" in t.given else None)
        t.take("train.warmup_steps", f"{before}warmup_steps")
    else:
        t.to_do["train.schedule"] = f"{schedule} has no counterpart: constant, cosine or linear"


def _lora(t: Translation, table: str) -> None:
    t.value(table)
    t.take("lora.rank", f"{table}.rank")
    if "lora.rank" not in t.settings:
        t.put("lora.rank", 16, "prime-rl's default")
    t.take("lora.alpha", f"{table}.alpha")
    t.take("lora.targets", f"{table}.target_modules")
    if t.value(f"{table}.dropout"):
        t.leave("adapters are trained without dropout", f"{table}.dropout")


def _loss(t: Translation) -> None:
    """The default is DPPO with a quadratic penalty (`dppo_tv_quadratic` here), and `ipo` the newer one."""
    before, algorithm = "trainer.loss.", t.word("orchestrator.algo.type", default="grpo")
    if algorithm != "grpo":
        t.to_do["algo.name"] = (
            f"prime-rl's {algorithm}: docs/choosing.md, and docs/distillation.md for learning from another model"
        )
        return
    kind = t.word(f"{before}type", default="default")
    if kind not in ("default", "ipo"):
        t.to_do["algo.loss"] = f"{kind} is a function of yours: file.py:name (docs/algorithms.md)"
        return
    t.put("algo.name", "dppo_tv_quadratic" if kind == "default" else "ipo")
    low, high = t.value(f"{before}dppo_mask_low"), t.value(f"{before}dppo_mask_high", f"{before}ipo_threshold")
    t.put("algo.delta", high if low is None else low)
    if low is not None and high is not None and low != high:
        t.leave(f"both directions have one bound here, {low}", f"{before}dppo_mask_high")
    t.take("algo.penalty", f"{before}kl_tau")
    if t.value(f"{before}adv_tau", default=1.0) != 1.0:
        t.leave("scale the reward instead", f"{before}adv_tau")


def _environment(t: Translation) -> None:
    listed = t.tables(*(f"{before}env" for before in TRAIN))
    first = listed[0] if listed else {}
    taskset = first.get("taskset") or {}
    taskset = taskset if isinstance(taskset, dict) else {"id": taskset}
    name, options = (
        (taskset.get("id"), {key: value for key, value in taskset.items() if key != "id"})
        if taskset
        else (first.get("id"), first.get("args"))
    )
    if not name:
        t.to_do["environment.name"] = "the taskset of verifiers that plays the rollouts (docs/libraries.md)"
        return
    t.put("task.kind", "seeds")
    t.put("environment.kind", "verifiers")
    t.put("environment.name", name)
    t.put("environment.options", {"taskset": options} if options else None)
    if first.get("harness"):
        t.notes["environment.options"] = "the harness goes to options.agent.harness (docs/libraries.md)"
    if more := sorted(first.keys() - {"id", "args", "taskset", "harness", "name"}):
        t.also.append(f"the environment {name} had settings of its own, which are not translated: {', '.join(more)}")
    t.to_do["environment.python"] = (
        "the interpreter that has verifiers and this taskset, such as ~/verifiers/bin/python"
    )
    if len(listed) > 1:
        names = (one.get("taskset") or one.get("id") for one in listed[1:])
        others = ", ".join(str(one.get("id") if isinstance(one, dict) else one) for one in names)
        t.to_do["environment.name"] = f"a run has one environment; this one also had {others}"


def _left_out(t: Translation) -> None:
    t.leave_all(
        "evaluations of other environments are [[eval.sets]], to be written by hand (docs/rows.md)",
        ("orchestrator.eval.", "orchestrator.val.", "eval."),
    )
    t.leave_all(
        "the chat template and the tool calls are the model's own (docs/environments.md)",
        ("orchestrator.renderer", "inference.model.tool", "inference.model.reasoning"),
    )
    t.leave_all(
        "groups without contrast are left out always, and prompts are drawn by difficulty as docs/curriculum.md says",
        ("orchestrator.buffer", "buffer."),
    )
    filters = {str(one.get("type")) for one in t.tables("orchestrator.filters") if one.get("enforce", True)}
    if others := sorted(filters - {"zero_advantage"}):
        t.also.append(f"prime-rl's filters ({', '.join(others)}) took rollouts out of training, and nothing does here")
    t.take("rollout.keep_routing", "trainer.enable_router_replay")
    model = [
        name for name in t.unread if name.startswith("trainer.model.") and ".lora" not in name and ".freeze" not in name
    ]
    t.leave_all("memory, devices and processes, which headrace fits to the machine (docs/auto.md, docs/scale.md)", (
        "deployment", "slurm", "inference", *model, "trainer.ac", "trainer_gpu", "inference_gpu", "trainer.memory", "trainer.weight_broadcast",
        "weight_broadcast", "orchestrator.client", "orchestrator.weight", "orchestrator.max_inflight", "orchestrator.oversampling", "orchestrator.num_train",
        "orchestrator.transport", "trainer.transport", "rollout_transport", "bench", "trainer.token_export", "orchestrator.model", "orchestrator.env_workers",
    ))  # fmt: skip
    t.leave_all(
        "a run has its own log, report and board",
        (
            "log",
            "wandb",
            "trainer.log",
            "orchestrator.log",
            "trainer.wandb",
            "orchestrator.wandb",
            "monitors",
            "prime_monitor",
            "orchestrator.prime_monitor",
        ),
    )
    t.leave_all(
        "a run goes on with `headrace train --resume RUN`, and keeps its own checkpoints",
        ("ckpt", "trainer.ckpt", "orchestrator.ckpt", "output_dir", "clean_output"),
    )


PRIME_RL = Library("prime-rl", is_of, translate)
