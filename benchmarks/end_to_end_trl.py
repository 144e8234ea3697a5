"""TRL's part of end_to_end.py, run by the Python of .venv-trl: `GRPOTrainer`, or `AsyncGRPOTrainer` with vLLM beside
it.

Prompts, reward function, batch, learning rate and AdamW's settings are those of headrace. All else is TRL's own choice,
except gradient checkpointing, which is off: it costs time, and there is enough memory. Two parts of the asynchronous
trainer cannot run on a CPU and are replaced: FlashAttention-3 by torch's own attention, and NCCL by a file in shared
memory that vLLM reads again.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import requests
import torch
from datasets import Dataset
from end_to_end_reward import right_number
from safetensors.torch import save_file
from torch.nn.functional import scaled_dot_product_attention
from trainer_process import Json, child_main
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    async_rollout_worker,
    packing,
)


def main(options: Json) -> Json:
    tokenizer = AutoTokenizer.from_pretrained(options["model"], local_files_only=True)
    prompts = dataset(options, tokenizer)
    trainer = {"sync": synchronous, "async": asynchronous}[options["work"]](options, tokenizer, prompts)
    observer = Observer(trainer, options)
    trainer.add_callback(observer)
    trainer.train()
    spent = {name: seconds / len(observer.rewards) for name, seconds in trainer.clocks.items()}
    return {
        "points": observer.points,
        "steps": len(observer.rewards),
        "seconds": observer.seconds,
        "rewards": observer.rewards,
        "spent": {**spent, **observer.waits()},
        "stopped": observer.why,
    }


def dataset(options: Json, tokenizer: Any) -> Dataset:
    """Raises ValueError if the chat template makes other tokens of a prompt than headrace trains on."""
    rows = json.loads(Path(options["prompts"]).read_text())["train"]
    prompts = [[{"role": "user", "content": row["text"]}] for row in rows]
    text = tokenizer.apply_chat_template(prompts[0], add_generation_prompt=True, tokenize=False)
    if tokenizer(text, add_special_tokens=False)["input_ids"] != rows[0]["tokens"]:
        raise ValueError("the prompts are not the same tokens on both sides")
    return Dataset.from_dict({"prompt": prompts, "answer": [str(row["answer"]) for row in rows]})


def settings(options: Json) -> Json:
    return {
        "output_dir": options["folder"],
        "per_device_train_batch_size": options["groups"] * options["group_size"],
        "num_generations": options["group_size"],
        "max_completion_length": options["max_tokens"],
        "max_steps": options["steps"],
        "learning_rate": options["learning_rate"],
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": options["warmup"],
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": options["dtype"] == "bfloat16",
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": options["seed"],
    }


def timed(clocks: dict[str, float], name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **more: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*arguments, **more)
        finally:
            clocks[name] += time.perf_counter() - began

    return call


# -- synchronous ------------------------------------------------------------------------------------------------------------


class Synchronous(GRPOTrainer):
    """A trainer with clocks; `Observer` separates nested times."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.clocks: dict[str, float] = defaultdict(float)
        self._generate_single_turn = timed(self.clocks, "generation", self._generate_single_turn)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        began, generation = time.perf_counter(), self.clocks["generation"]
        try:
            return super()._generate_and_score_completions(inputs)
        finally:
            inside = self.clocks["generation"] - generation
            self.clocks["log-probs, rewards"] += time.perf_counter() - began - inside

    def training_step(self, *arguments: Any, **more: Any) -> Any:
        inner = ("generation", "log-probs, rewards")
        began, before = time.perf_counter(), sum(self.clocks[name] for name in inner)
        try:
            return super().training_step(*arguments, **more)
        finally:
            inside = sum(self.clocks[name] for name in inner) - before
            self.clocks["loss, backward, update"] += time.perf_counter() - began - inside


def synchronous(options: Json, tokenizer: Any, prompts: Dataset) -> Synchronous:
    config = GRPOConfig(**settings(options), model_init_kwargs={"dtype": "float32"}, shuffle_dataset=False)
    return Synchronous(
        options["model"],
        reward_funcs=right_number,
        args=config,
        train_dataset=prompts,
        processing_class=tokenizer,
    )


# -- asynchronous -----------------------------------------------------------------------------------------------------------


class Attention:
    """Replaces FlashAttention-3's module."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_starts: torch.Tensor,
        key_starts: torch.Tensor,
        *longest: int,
        softmax_scale: float | None = None,
        **more: Any,
    ) -> torch.Tensor:
        """query [N, H, D], key and value [K, H_kv, D]; each segment sees the keys of its path, causally from their end."""
        outputs = []
        for (start, end), (first, last) in zip(_pairs(query_starts), _pairs(key_starts), strict=True):
            rows, columns = end - start, last - first
            mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
            out = scaled_dot_product_attention(
                query[start:end].transpose(0, 1)[None],
                key[first:last].transpose(0, 1)[None],
                value[first:last].transpose(0, 1)[None],
                attn_mask=None if rows == columns else mask,
                is_causal=rows == columns,
                scale=softmax_scale,
                enable_gqa=True,
            )
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)


def _pairs(starts: torch.Tensor) -> list[tuple[int, int]]:
    numbers = starts.tolist()
    return list(pairwise(numbers))


class FileTransfer:
    """Replaces NCCL: the weights in a file in shared memory, which the server reads again."""

    def __init__(self, url: str, served: Path, clocks: dict[str, float]) -> None:
        self._url, self._file, self._clocks = url, served / "model.safetensors", clocks

    def init_weight_transfer(self) -> None:
        """The server is up before the trainer is started."""

    def pause(self) -> None:
        self._post("/pause", params={"mode": "keep"})

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        began = time.perf_counter()
        tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in iterator}
        new = self._file.with_suffix(".new")
        save_file(tensors, new, metadata={"format": "pt"})
        new.rename(self._file)
        self._post("/collective_rpc", json={"method": "reload_weights"})
        self._post("/reset_prefix_cache")
        self._clocks["weight sync"] += time.perf_counter() - began

    def resume(self) -> None:
        self._post("/resume")

    def destroy(self) -> None:
        """Does nothing: no resource is held."""

    def _post(self, path: str, **more: Any) -> None:
        answer = requests.post(self._url + path, timeout=300, **more)
        if answer.status_code != 200:
            raise RuntimeError(f"{path} answered {answer.status_code}: {answer.text[:300]}")


class Asynchronous(AsyncGRPOTrainer):
    clocks: dict[str, float]

    def training_step(self, *arguments: Any, **more: Any) -> Any:
        began = time.perf_counter()
        try:
            return super().training_step(*arguments, **more)
        finally:
            self.clocks["loss, backward, update"] += time.perf_counter() - began


CHATML = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}},
}
"""The pattern that parses a completion into a message. TRL knows the templates of some models; this one has to be
given."""


def asynchronous(options: Json, tokenizer: Any, prompts: Dataset) -> Asynchronous:
    packing._flash_attn = lambda: Attention
    tokenizer.response_template = CHATML
    async_rollout_worker.is_vllm_available = lambda *versions: (
        True
    )  # it is, over HTTP; the worker itself imports none of it
    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None  # asks CUDA for its name
    config = AsyncGRPOConfig(
        **settings(options),
        vllm_server_base_url=options["url"],
        max_staleness=options["max_lag"],
        token_budget=-1,
    )
    clocks: dict[str, float] = defaultdict(float)
    trainer = Asynchronous(
        options["model"],
        reward_funcs=right_number,
        args=config,
        train_dataset=prompts,
        processing_class=tokenizer,
        weight_transfer=FileTransfer(options["url"], Path(options["served"]), clocks),
    )
    trainer.clocks = clocks
    return trainer


# -- both -------------------------------------------------------------------------------------------------------------------


class Observer(TrainerCallback):
    """Saves weights every few steps, off the clock, and ends the run by headrace's rules."""

    def __init__(self, trainer: Any, options: Json) -> None:
        self._trainer, self._options = trainer, options
        self._weights = Path(options["folder"]) / "weights"
        self._weights.mkdir(parents=True, exist_ok=True)
        self._began = self._saving = 0.0
        self.points: list[Json] = []
        self.rewards: list[float] = []
        self.seconds, self.why = 0.0, "finished"
        self._waits: dict[str, list[float]] = defaultdict(list)

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.seconds = time.perf_counter() - self._began - self._saving
        if state.global_step % self._options["every"] == 0:
            self._save(state.global_step)
        if self.seconds > self._options["limit"]:
            self.why, control.should_training_stop = "out of time", True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if "reward" not in logs:
            return
        self.rewards.append(float(logs["reward"]))
        for name in ("perf/rollout_wait_s", "perf/weight_sync_s"):
            if name in logs:
                self._waits[name].append(float(logs[name]))
        print(f"step {state.global_step}: reward {self.rewards[-1]:.3f}, {self.seconds:.0f} s", flush=True)
        last = self.rewards[-self._options["window"] :]
        if len(last) == self._options["window"] and statistics.mean(last) >= self._options["enough"]:
            self.why, control.should_training_stop = "good enough", True

    def _save(self, step: int) -> None:
        began = time.perf_counter()
        path = self._weights / f"step-{step:06d}.safetensors"
        named = self._trainer.accelerator.unwrap_model(self._trainer.model).named_parameters()
        save_file({name: tensor.detach().to(torch.bfloat16) for name, tensor in named}, path)
        self.points.append({"step": step, "seconds": self.seconds, "weights": str(path)})
        self._saving += time.perf_counter() - began

    def waits(self) -> Json:
        named = {"perf/rollout_wait_s": "trainer waits"}
        return {named[name]: statistics.mean(values) for name, values in self._waits.items() if name in named}


if __name__ == "__main__":
    child_main(main)
