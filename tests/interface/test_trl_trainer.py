"""headrace.compat.trl: TRL's arguments as settings, what is refused, and scripts that change one import."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.compat.trl import (
    AsyncGRPOTrainer,
    DistillationTrainer,
    GRPOConfig,
    GRPOTrainer,
    OnlineDPOTrainer,
    RLOOTrainer,
)
from headrace.compat.trl.trl_settings import (
    FIELDS,
    GRPO,
    algo_from,
    refuse_what_cannot_be,
    settings_from,
    without_meaning,
)
from headrace.core.errors import ConfigError
from headrace.run.config import RunConfig, checked
from headrace.settings.toml import build

ROOT = Path(__file__).resolve().parents[2]
TRL = ROOT / ".venv-trl"
ROWS = [{"prompt": f"{i} + {i}?", "answer": str(2 * i)} for i in range(64)]
SMALL = {
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 8,
    "bf16": False,
    "disable_tqdm": True,
}


def share_of_e(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any
) -> list[float]:
    assert len(columns["answer"]) == len(completions) == len(completion_ids)
    return [text.count("e") / max(len(text), 1) for text in completions]


TRAINERS: dict[str, Any] = {
    "GRPO": GRPOTrainer,
    "RLOO": RLOOTrainer,
    "AsyncGRPO": AsyncGRPOTrainer,
    "OnlineDPO": OnlineDPOTrainer,
    "Distillation": DistillationTrainer,
}


def of(trainer: Any = GRPOTrainer, **given: Any) -> dict[str, Any]:
    return settings_from(trainer.kind, trainer.config("out", **given), rows=ROWS, held_out=0)


def fields(fate: str, without: Iterable[str] = ()) -> list[Any]:
    """Every field of a fate of every trainer; of the others those that are not GRPO's."""
    return [
        pytest.param(trainer, name, id=f"{title}-{name}")
        for title, trainer in TRAINERS.items()
        for name, field in trainer.kind.fields.items()
        if field.fate == fate and name not in without and (trainer is GRPOTrainer or field != FIELDS.get(name))
    ]


def algo(**given: Any) -> dict[str, Any]:
    return algo_from(GRPOConfig("out", **given))


def test_steps_of_trl_are_updates_of_which_a_step_makes_several() -> None:
    given = {"max_steps": 100, "warmup_steps": 10, "save_steps": 25, "eval_strategy": "no"}
    plain, several = of(**given), of(**given, num_iterations=4)
    assert [tree["train"]["steps"] for tree in (plain, several)] == [100, 25]
    assert [tree["train"]["warmup_steps"] for tree in (plain, several)] == [10, 3]
    assert [tree["checkpoint"]["every"] for tree in (plain, several)] == [25, 7]
    epochs = {**given, "max_steps": -1, "num_train_epochs": 3}
    assert of(**epochs)["train"]["steps"] == of(**epochs, num_iterations=4)["train"]["steps"], "rows come as often"


# -- the table --------------------------------------------------------------------------------------------------------------


def test_the_page_has_the_table_of_all_fields() -> None:
    page, made = ROOT / "docs" / "from_trl.md", runpy.run_path(str(ROOT / "docs" / "make_trl.py"))["page"]
    text = page.read_text(encoding="utf-8")
    assert text == made(text), "a field has changed: run `make docs`"
    assert [name for name in FIELDS if text.count(f"`{name}`") == 0] == []


def test_every_field_has_one_fate_and_a_reason() -> None:
    assert {field.fate for field in FIELDS.values()} == {"honoured", "no meaning", "refused"}
    assert all(field.words for field in FIELDS.values()) and len(FIELDS) > 150
    assert next(field.name for field in dataclasses.fields(GRPOConfig)) == "output_dir"


@pytest.mark.parametrize(("trainer", "name"), fields("refused"))
def test_each_refused_field_is_named(trainer: Any, name: str) -> None:
    default = trainer.kind.fields[name].default
    other = (not default) if isinstance(default, bool) else 7 if default is None else default * 2 or 1
    with pytest.raises(ConfigError, match=rf"^{name}={other!r} cannot be honoured: "):
        refuse_what_cannot_be(trainer.kind, trainer.config("out", **{name: other}))


@pytest.mark.parametrize("trainer", TRAINERS.values(), ids=TRAINERS)
def test_a_config_with_its_defaults_is_honoured_without_a_word(trainer: Any) -> None:
    refuse_what_cannot_be(trainer.kind, trainer.config("out"))
    assert without_meaning(trainer.kind, trainer.config("out")) == ""
    tree = {**of(trainer), "model": {"path": "m"}, "task": {"kind": "python", "rows": "x", "held_out": 0}}
    if trainer is DistillationTrainer:
        tree["algo"]["distill"]["model"] = "t"
    checked(build(RunConfig, tree))


def test_fields_without_meaning_are_named_in_one_sentence() -> None:
    said = without_meaning(GRPO, GRPOConfig("out", use_vllm=True, logging_steps=1, learning_rate=1e-5))
    assert said.startswith("use_vllm, logging_steps: without a meaning here")


BESIDE: dict[str, dict[str, Any]] = {
    "use_bias_correction_kl": {"beta": 0.1},
    "sapo_temperature_neg": {"loss_type": "sapo"},
    "entropy_target": {"use_adaptive_entropy": True},
    "entropy_coef_delta": {"use_adaptive_entropy": True},
    "sapo_temperature_pos": {"loss_type": "sapo"},
    **{f"vespo_{name}": {"loss_type": "vespo"} for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
}
"""Fields that only mean something beside others."""
OTHER: dict[str, Any] = {
    "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_high": 0.3, "delta": 2.0, "scale_rewards": False,
    "multi_objective_aggregation": "normalize_then_sum", "off_policy_mask_threshold": 0.5, "lr_scheduler_type": "cosine",
    "warmup_steps": 0.1, "bf16": False, "save_strategy": "no", "save_total_limit": 3, "report_to": ["tensorboard"], "disable_tqdm": True,
    "max_steps": 11, "min_p": 0.1, "vllm_structured_outputs_regex": "[0-9]+", "num_generations": 4, "vllm_max_model_length": 900, "per_device_train_batch_size": 16, "dtype": "bfloat16", "max_completion_length": 100,
}  # fmt: skip
OF_THE_TRAINER = {
    "push_to_hub", "hub_model_id", "hub_private_repo", "hub_token",
    "teacher_model_name_or_path", "teacher_model_init_kwargs",
    "output_dir", "model_init_kwargs", "reward_weights", "shuffle_dataset", "chat_template_kwargs", "eval_strategy", "eval_steps", "num_generations_eval", "optim"
}  # fmt: skip
"""Fields that the tests of the trainer, and of values that are refused, try."""


@pytest.mark.parametrize(("trainer", "name"), fields("honoured", OF_THE_TRAINER))
def test_each_honoured_field_changes_the_settings(trainer: Any, name: str) -> None:
    beside, default = BESIDE.get(name, {}), trainer.kind.fields[name].default
    other = "ipo" if default == "sigmoid" else OTHER.get(name, another(default))
    assert of(trainer, **beside, **{name: other}) != of(trainer, **beside), name


def test_the_other_trainers_are_what_they_say() -> None:
    rloo = of(RLOOTrainer, epsilon_high=0.3)
    assert rloo["algo"] == {
        "name": "rloo", "clip_low": 0.2, "clip_high": 0.3, "kl": {"coef": 0.05, "place": "reward"},
    }  # fmt: skip
    assert "kl" not in of(RLOOTrainer, beta=0.0)["algo"] and rloo["rollout"]["group_size"] == 2
    later = of(AsyncGRPOTrainer, dtype="bfloat16")
    assert (later["staleness"]["max_lag"], later["train"]["weights"]) == (4, "bfloat16")
    assert later["train"]["schedule"] == "constant" and later["rollout"]["max_tokens"] == 2048
    with pytest.raises(ConfigError, match="dtype='float16' cannot be honoured"):
        of(AsyncGRPOTrainer, dtype="float16")


def test_preferences_and_distillation_are_recipes() -> None:
    pairs = of(OnlineDPOTrainer, per_device_train_batch_size=4, beta=[0.2])
    assert pairs["algo"] == {"name": "dpo", "pair_beta": 0.2}
    assert pairs["rollout"]["group_size"] == 2 and pairs["staleness"]["groups_per_step"] == 4, "a batch counts prompts"
    assert pairs["rollout"]["max_tokens"] == 64 and pairs["rollout"]["temperature"] == 0.9
    with pytest.raises(ConfigError, match="it is the same in all epochs"):
        of(OnlineDPOTrainer, beta=[0.2, 0.1])
    with pytest.raises(ConfigError, match="there are: sigmoid, ipo"):
        of(OnlineDPOTrainer, loss_type="hinge")
    taught = of(DistillationTrainer, gradient_accumulation_steps=2)
    assert taught["algo"] == {"name": "gkd", "distill": {"kind": "reverse"}}
    assert taught["rollout"]["group_size"] == 1 and taught["staleness"]["groups_per_step"] == 16
    assert of(DistillationTrainer, beta=0.0)["algo"]["distill"] == {"kind": "forward"}
    assert of(DistillationTrainer, beta=0.25)["algo"]["distill"] == {"kind": "jsd", "beta": 0.25}
    with pytest.raises(ConfigError, match="a share, from 0 to 1"):
        of(DistillationTrainer, beta=2.0)
    cooler = of(DistillationTrainer, temperature=0.9, top_p=0.95)
    assert cooler["algo"]["distill"] == {"kind": "reverse", "temperature": 0.9}
    assert (cooler["rollout"]["temperature"], cooler["rollout"]["top_p"]) == (0.9, 0.95)


def another(default: Any) -> Any:
    if isinstance(default, bool):
        return not default
    if isinstance(default, list):
        return [another(value) for value in default]
    return {int: lambda: default + 1, float: lambda: default / 2 or 0.5}.get(type(default), lambda: None)()


def test_defaults_of_trl_are_dapo_with_linear_decay() -> None:
    tree = of()
    assert tree["algo"] == {
        "name": "grpo",
        "aggregation": "token_mean",
        "advantage": "group_norm",
        "clip_low": 0.2,
        "clip_high": 0.2,
    }
    assert (
        tree["train"]["schedule"] == "linear"
        and tree["train"]["beta2"] == 0.999
        and tree["train"]["learning_rate"] == 1e-6
    )
    assert (
        tree["staleness"] == {"groups_per_step": 1}
        and tree["train"]["steps"] == 3 * 64
        and tree["rollout"]["max_tokens"] == 512
    )
    assert tree["engine"]["context_length"] == 512 + len("63 + 63?") + 256
    checked(build(RunConfig, tree | {"model": {"path": "m"}, "task": {"kind": "python", "rows": "x", "held_out": 0}}))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"loss_type": "grpo"}, {"aggregation": "seq_mean_token_mean"}),
        ({"loss_type": "dr_grpo", "scale_rewards": "none"}, {"aggregation": "token_sum", "advantage": "centred"}),
        ({"loss_type": "bnpo"}, {"aggregation": "token_mean"}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"name": "cispo", "clip_high": 4.0}),
        (
            {"loss_type": "sapo"},
            {"name": "sapo", "tau": 1.0, "tau_negative": 1.05, "aggregation": "seq_mean_token_mean"},
        ),
        (
            {"loss_type": "vespo", "vespo_k_neg": 4.0},
            {"name": "vespo", "kernel_power": 2.0, "kernel_power_negative": 4.0, "aggregation": "token_mean"},
        ),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
            {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq_mean_token_mean"},
        ),
        (
            {"loss_type": "luspo", "importance_sampling_level": "sequence"},
            {"loss": "gspo", "aggregation": "seq_mean_token_sum"},
        ),
        ({"delta": 1.5}, {"dual_clip": 1.5}),
        ({"beta": 0.04}, {"kl": {"coef": 0.04, "estimator": "k3", "unbiased": True}}),
        ({"mask_truncated_completions": True}, {"overlong": "mask"}),
        ({"multi_objective_aggregation": "normalize_then_sum"}, {"advantage": "gdpo"}),
    ],
)
def test_losses_become_parts_of_a_recipe(given: dict[str, Any], expected: dict[str, Any]) -> None:
    found = algo(**given)
    assert {name: found[name] for name in expected} == expected
    build(RunConfig, {"algo": found, "model": {"path": "m"}, "task": {"kind": "python", "rows": "x"}})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"loss_type": "ppo"}, "loss_type='ppo' cannot be honoured"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "cannot be honoured"),
        ({"loss_type": "cispo"}, "epsilon_high=0.2 would weigh"),
        ({"loss_type": "luspo"}, 'needs importance_sampling_level="sequence"'),
        ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, "cannot be honoured"),
        ({"importance_sampling_level": "word"}, "there are: token, sequence"),
        ({"scale_rewards": "batch"}, "scale_rewards='batch' cannot be honoured"),
        ({"delta": 1.1}, "nor below 1 \\+ epsilon_high"),
        ({"per_device_train_batch_size": 6}, "do not hold whole groups of num_generations = 8"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type='polynomial' cannot be honoured"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0"),
        ({"optim": "adafactor"}, "optim='adafactor' cannot be honoured"),
        ({"save_strategy": "best"}, "save_strategy='best'"),
        ({"report_to": ["comet_ml"]}, "report_to='comet_ml' cannot be honoured"),
        ({"eval_strategy": "steps"}, "needs an eval_dataset"),
    ],
)
def test_values_that_cannot_be_honoured_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        of(**given)


# -- the trainer ------------------------------------------------------------------------------------------------------------


def trainer(folder: Path, model: Any, **given: Any) -> GRPOTrainer:
    args = GRPOConfig(str(folder / "out"), **{**SMALL, **given.pop("args", {})})
    given = {"reward_funcs": share_of_e, "train_dataset": ROWS, **given}
    return GRPOTrainer(model=model, args=args, **given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"callbacks": [1]}, "the callback int has no event, which cannot be honoured"),
        (
            {"eval_dataset": {"a": ROWS, "b": [{"question": "1"}]}},
            "eval_dataset\\['b'\\]= needs rows with a column prompt",
        ),
        ({"tools": [len]}, "tools= cannot be honoured"),
        ({"optimizers": (1, None)}, "optimizers= cannot be honoured"),
        ({"reward_funcs": "org/reward-model"}, "is a reward model"),
        ({"reward_funcs": [len], "args": {"reward_weights": [1.0, 2.0]}}, "2 numbers for 1 functions"),
        ({"train_dataset": [{"question": "1"}]}, "rows with a column prompt"),
        ({"train_dataset": {"train": ROWS}}, "takes rows with a prompt"),
        ({"train_dataset": [{"prompt": "1", "image": "x"}]}, "the column image"),
        ({"args": {"model_init_kwargs": {"revision": "v2"}}}, "revision.*cannot be honoured"),
        ({"args": {"model_init_kwargs": {"dtype": "float16"}}}, "float16.*cannot be honoured"),
        ({"peft_config": object()}, "takes a LoraConfig"),
        ({"quantization_config": object()}, "quantization_config= cannot be honoured"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_named(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trainer(tmp_path, "org/name", **given)


def test_arguments_of_the_template_become_settings_where_it_is_used(tmp_path: Path, tiny_llama: Path) -> None:
    given: dict[str, Any] = {"args": {"chat_template_kwargs": {"enable_thinking": False}}}
    plain = trainer(tmp_path, str(tiny_llama), train_dataset=[{"prompt": "1"}], **given)
    assert plain._settings["task"]["template"] == {} and not plain._settings["task"]["chat"]
    rows = [{"prompt": [{"role": "user", "content": "1"}], "tools": []}]
    chat = trainer(tmp_path, str(tiny_llama), train_dataset=rows, **given)
    assert chat._settings["task"]["template"] == {"enable_thinking": False} and chat._settings["task"]["chat"]


def test_peft_settings_become_an_adapter(tmp_path: Path, tiny_llama: Path) -> None:
    from peft import LoraConfig

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    settings = trainer(tmp_path, str(tiny_llama), peft_config=config)._settings
    assert settings["lora"]["rank"] == 4 and settings["lora"]["targets"] == ["q_proj", "v_proj"]
    assert trainer(tmp_path, str(tiny_llama), peft_config=LoraConfig(r=4))._settings["lora"]["targets"] == [
        "q_proj",
        "v_proj",
    ]
    with pytest.raises(ConfigError, match="modules_to_save cannot be honoured"):
        trainer(tmp_path, str(tiny_llama), peft_config=LoraConfig(r=4, modules_to_save=["lm_head"]))
    with pytest.warns(UserWarning, match=r"lora_dropout=0.05 is left out: rollouts are sampled without dropout"):
        made = trainer(tmp_path, str(tiny_llama), peft_config=LoraConfig(r=4, lora_dropout=0.05))
    assert made._settings["lora"]["rank"] == 4


def test_all_refusals_come_at_once_and_before_anything_is_written(tmp_path: Path, tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    with pytest.raises(ConfigError) as refused:
        trainer(
            tmp_path,
            AutoModelForCausalLM.from_pretrained(tiny_llama),
            reward_funcs="org/reward-model",
            train_dataset=[{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}],
            eval_dataset=ROWS[:4],
            peft_config=object(),
            callbacks=[Listener(), Unheard()],
            args={"fp16": True, "repetition_penalty": 1.1, "loss_type": "ppo"},
        )
    lines = str(refused.value).splitlines()
    words = [
        "fp16=",
        "repetition_penalty=",
        "reward_funcs",
        "Unheard has on_save",
        "messages",
        "loss_type",
        "LoraConfig",
    ]
    assert len(lines) == len(words) and all(any(word in line for line in lines) for word in words), lines
    assert list(tmp_path.iterdir()) == []
    rows = [{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}]
    remedy = re.search(r"(\[\{\*\*row.*?\]) leaves out", str(refused.value))[1]  # type: ignore[index]
    prompts = eval(remedy, {"rows": rows})
    assert trainer(tmp_path, str(tiny_llama), train_dataset=prompts)._settings["task"]["chat"]


class Listener:
    """A callback as transformers has it, with the names of the events that it heard."""

    def __init__(self, last: int = 0) -> None:
        self.heard, self.last = list[str](), last

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.heard.append("begin")

    def on_step_end(self, args: Any, state: Any, control: Any, processing_class: Any, **more: Any) -> None:
        assert processing_class.vocab_size
        self.heard.append(f"step {state.global_step}")
        control.should_training_stop = state.global_step == self.last

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **more: Any) -> None:
        self.heard.append(f"loss {logs['step']}")

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.heard.append("end")


class Unheard(Listener):
    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None: ...


def test_callbacks_hear_of_steps_and_end_a_run(tmp_path: Path, tiny_llama: Path) -> None:
    listener = Listener(last=2)
    made = trainer(
        tmp_path,
        str(tiny_llama),
        callbacks=[listener],
        args={"max_steps": 400, "vllm_max_model_length": 64},
        headrace_settings={"engine": {"kv_gib": 0.01}, "watch": {"identity_every": 0}},
    )
    result = made.train()
    assert 2 <= result.global_step < 400
    assert listener.heard[:4] == ["begin", "step 1", "loss 1", "step 2"] and listener.heard[-1] == "end"


def test_a_script_trains_saves_and_continues(tmp_path: Path, tiny_llama: Path) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        made = trainer(
            tmp_path,
            str(tiny_llama),
            eval_dataset={"sums": ROWS[:8], "few": ROWS[8:10]},
            args={
                "max_steps": 3, "learning_rate": 1e-2, "eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1, "use_vllm": True,
                "vllm_mode": "colocate", "num_generations_eval": 2, "vllm_max_model_length": 64, "max_completion_length": 8,
            },
            headrace_settings={"engine": {"kv_gib": 0.01}, "watch": {"identity_every": 0}},
        )  # fmt: skip
    assert [
        str(one.message).partition(":")[0]
        for one in seen
        if "headrace" in str(one.filename) or "meaning" in str(one.message)
    ] == ["use_vllm, logging_steps"]
    result = made.train()
    assert (
        result.global_step == 3
        and made.state.log_history[-1]["step"] == 3
        and made.run == tmp_path / "out" / "headrace"
    )
    made.save_model()
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert headrace.open(made.run).sets["few"]["step"] == [0, 2, 3], (
        "the second data set is measured whenever the first is"
    )
    assert set(made.evaluate()) == {
        f"eval_{name}_{what}" for name in ("sums", "few") for what in ("reward", "reward_sem")
    }
    made.log_metrics("train", result.metrics)
    made.save_metrics("train", result.metrics)
    made.save_state()
    made.create_model_card(dataset_name="sums")
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"train_results.json", "all_results.json", "trainer_state.json", "README.md"} <= written
    assert json.loads((tmp_path / "out" / "trainer_state.json").read_text())["global_step"] == 3
    trained, before = made.model.state_dict(), AutoModelForCausalLM.from_pretrained(tiny_llama).state_dict()
    assert trained.keys() == before.keys() and any(not trained[name].equal(before[name]) for name in before)
    assert made.model is made.model and made.processing_class("e").input_ids
    with pytest.raises(AttributeError, match="has no optimizer: it trains in processes of its own"):
        made.optimizer  # noqa: B018


def test_a_model_in_memory_and_conversations(tmp_path: Path, tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    seen: list[Any] = []

    def about(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        seen.append((prompts[0], completions[0]))
        return [float(len(completion[0]["content"]) % 3) for completion in completions]

    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    made = trainer(
        tmp_path,
        model,
        processing_class=AutoTokenizer.from_pretrained(tiny_llama),
        reward_funcs=[about, share_of_e_of_chats],
        train_dataset=rows,
        args={"max_steps": 1, "reward_weights": [1.0, 0.5]},
        headrace_settings={"engine": {"kv_gib": 0.01}, "watch": {"identity_every": 0}},
    )
    assert made.train().global_step == 1
    assert seen[0][0][0]["role"] == "user" and seen[0][1][0]["role"] == "assistant"
    assert {"rewards.about", "rewards.share_of_e_of_chats"} <= set(made.state.log_history[0])


def test_arguments_of_online_dpo_stand_where_trl_has_them() -> None:
    names = list(inspect.signature(OnlineDPOTrainer).parameters)
    assert names[:7] == ["model", "ref_model", "reward_funcs", "args", "data_collator", "train_dataset", "eval_dataset"]


def test_rows_are_the_same_with_and_without_an_evaluation(tmp_path: Path, tiny_llama: Path) -> None:
    """Both ways a reward function is given what JSON can hold of a column."""
    rows = [
        {"prompt": "a", "answer": np.int64(3), "by": {1: np.float32(0.5)}},
        {"prompt": "b", "answer": {2}, "by": {}},
    ]
    given = {}
    for held_out in (None, rows):
        args = GRPOTrainer.config(str(tmp_path / str(bool(held_out))), eval_strategy="steps" if held_out else "no", num_generations=2, bf16=False, use_cpu=True)  # fmt: skip
        made = GRPOTrainer(str(tiny_llama), share_of_e, args, rows, held_out)
        kept = made._settings["task"].get("path")
        given[bool(held_out)] = (
            [json.loads(line) for line in Path(kept).read_text().splitlines()] if kept else made._dataset
        )
    assert given[False] == given[True] == [{"prompt": "a", "answer": 3, "by": {"1": 0.5}}, {"prompt": "b", "answer": [2], "by": {}}]  # fmt: skip


@pytest.mark.whole
def test_pairs_and_a_teacher_of_trl_train(tmp_path: Path, tiny_llama: Path) -> None:
    """Online DPO with its reference, and distillation from a teacher in memory, in two runs of one step."""
    small = {"engine": {"kv_gib": 0.01}, "watch": {"identity_every": 0}}
    plain = {"per_device_train_batch_size": 2, "max_steps": 1, "bf16": False, "disable_tqdm": True, "use_cpu": True}
    pairs = OnlineDPOTrainer(
        str(tiny_llama),
        reward_funcs=share_of_e,
        args=OnlineDPOTrainer.config(str(tmp_path / "pairs"), max_new_tokens=8, **plain),
        train_dataset=ROWS,
        headrace_settings=small,
    )
    assert pairs.train().global_step == 1
    from transformers import AutoModelForCausalLM

    teacher = AutoModelForCausalLM.from_pretrained(tiny_llama)
    taught = DistillationTrainer(
        str(tiny_llama),
        teacher,
        DistillationTrainer.config(
            str(tmp_path / "taught"),
            max_completion_length=8,
            teacher_model_init_kwargs={"dtype": "float32", "revision": "main"},
            **plain,
        ),
        [{"prompt": row["prompt"]} for row in ROWS],
        headrace_settings=small,
    )
    assert taught.train().global_step == 1
    assert taught.run is not None and taught.state.log_history[0]["loss"] == pytest.approx(0, abs=1e-3), (
        "its own teacher"
    )
    with pytest.raises(ConfigError, match="no reward that could be measured"):
        taught.evaluate()


@pytest.mark.parametrize(
    ("teacher", "given", "words"),
    [
        (None, {}, "teacher_model= is missing"),
        (3, {}, "teacher_model= takes a name or a transformers model, not int"),
        ("t", {"teacher_model_init_kwargs": {"dtype": "float16"}}, r"teacher_model_init_kwargs\['dtype'\]='float16'"),
        (
            "t",
            {"teacher_model_revision": "v2"},
            "teacher_model_revision='v2' cannot be honoured: write it into the name",
        ),
        ("t", {"eval_strategy": "steps"}, "no reward that could be measured"),
    ],
)
def test_what_a_distillation_lacks_is_named(tmp_path: Path, teacher: Any, given: dict[str, Any], words: str) -> None:
    args = DistillationTrainer.config(str(tmp_path / "out"), **{"per_device_train_batch_size": 2, **given})
    with pytest.raises(ConfigError, match=words):
        DistillationTrainer("org/name", teacher, args, ROWS)
    assert not (tmp_path / "out").exists()


def share_of_e_of_chats(completions: list[Any], **columns: Any) -> list[float]:
    return [completion[0]["content"].count("e") / 8 for completion in completions]


# -- the real TRL -----------------------------------------------------------------------------------------------------------

needs_trl = pytest.mark.skipif(not TRL.is_dir(), reason="TRL is in an environment of its own: make bench-trl-setup")

REAL = """
import dataclasses, json, trl, trl.experimental.async_grpo, trl.experimental.online_dpo
def plain(field):
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return getattr(field.default, "value", field.default)
configs = (
    trl.GRPOConfig, trl.RLOOConfig, trl.experimental.async_grpo.AsyncGRPOConfig, trl.experimental.online_dpo.OnlineDPOConfig,
    trl.DistillationConfig,
)
print(json.dumps([{field.name: plain(field) for field in dataclasses.fields(config)} for config in configs]))
"""


@pytest.mark.slow
@needs_trl
def test_the_tables_are_those_of_the_real_dataclasses() -> None:
    done = subprocess.run([TRL / "bin" / "python", "-c", REAL], capture_output=True, text=True, check=True)
    for real, trainer in zip(json.loads(done.stdout.splitlines()[-1]), TRAINERS.values(), strict=True):
        known = trainer.kind.fields
        assert set(real) == set(known), (trainer, set(real) ^ set(known))
        assert {name: value for name, value in real.items() if value != known[name].default} == {}


DRIVER = """
import runpy, sys
sys.path.append({site!r})   # TRL; everything else is headrace's own environment
sys.argv = {argv!r}
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.slow
@needs_trl
@pytest.mark.parametrize("title", ["GRPO", "RLOO", "Distillation"])
def test_the_example_script_of_trl_trains_with_one_import_changed(tmp_path: Path, tiny_llama: Path, title: str) -> None:
    site = next(TRL.glob("lib/python*/site-packages"))
    text = (site / "trl" / "scripts" / f"{title.lower()}.py").read_text()
    before = f"from trl import {title}Trainer, get_dataset"
    assert text.count(before) == 1
    script = tmp_path / "script.py"
    script.write_text(
        text.replace(before, f"from headrace.compat.trl import {title}Trainer\n    from trl import get_dataset")
    )
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "judge.py").write_text(
        "def share_of_e(completions, **columns):\n    return [text.count('e') / max(len(text), 1) for text in completions]\n"
    )
    out = tmp_path / "out"
    own: tuple[Any, ...] = ("--reward_funcs", "judge.share_of_e", "--num_generations", 4)
    if title == "Distillation":
        own = ("--teacher_model_name_or_path", tiny_llama)
    argv = [
        *("script.py", "--model_name_or_path", tiny_llama, "--dataset_name", data, *own),
        *("--output_dir", out, "--max_steps", 2, "--per_device_train_batch_size", 8),
        *("--max_completion_length", 8, "--vllm_max_model_length", 64, "--learning_rate", 0.01, "--bf16", "false"),
        *("--use_cpu", "true", "--lr_scheduler_type", "cosine", "--report_to", "none", "--save_steps", 1),
    ]
    code = DRIVER.format(site=str(site), argv=[str(one) for one in argv], script=str(script))
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Training completed" in done.stdout and "without a meaning here" not in done.stderr
    config = (out / "headrace" / "config.toml").read_text()
    assert 'schedule = "cosine"' in config and f"group_size = {1 if title == 'Distillation' else 4}" in config
    assert (out / "model.safetensors").is_file() and len(list((out / "headrace" / "checkpoints").iterdir())) == 2
