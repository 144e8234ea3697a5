"""TRL's part of trainer.py, run by the Python of .venv-trl: `GRPOTrainer` with its own `train()`, loss, clipping and
optimizer.

One method is replaced, the one that generates and scores: it returns the same rollouts that headrace gets, padded as
TRL pads them (prompts on the left, completions on the right, to the longest of the step).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from trainer_process import Json, Stopwatch, child_main
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def main(options: Json) -> Json:
    groups = json.loads(Path(options["rollouts"]).read_text())["groups"]
    batch = padded(groups)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(options, batch, folder)
        observer = Observer(trainer, options)
        trainer.add_callback(observer)
        trainer.train()
    rows, width = batch["completion_ids"].shape
    return {
        "steps": observer.watches,
        "loss_tokens": int(batch["completion_mask"].sum()),
        "forward_tokens": rows * (width + batch["prompt_ids"].shape[1]),
        "microbatches": trainer.args.gradient_accumulation_steps,
        "loss": observer.loss,
        "grad_norm": observer.grad_norm,
        "path": f"padded, {trainer.model.config._attn_implementation}, {trainer.args.per_device_train_batch_size} rows at a time",
    }


def padded(groups: list[Json]) -> dict[str, torch.Tensor]:
    prompts = [torch.tensor(group["prompt"]) for group in groups for _ in group["rows"]]
    rows = [row for group in groups for row in group["rows"]]
    completions = [torch.tensor(row["tokens"]) for row in rows]
    logprobs = [torch.tensor(row["logprobs"]) for row in rows]
    pad: Any = pad_sequence
    return {
        "prompt_ids": pad(prompts, batch_first=True, padding_side="left"),
        "prompt_mask": pad([torch.ones_like(prompt) for prompt in prompts], batch_first=True, padding_side="left"),
        "completion_ids": pad(completions, batch_first=True),
        "completion_mask": pad([torch.ones_like(completion) for completion in completions], batch_first=True),
        "old_per_token_logps": pad(logprobs, batch_first=True),
        "advantages": torch.tensor([one for group in groups for one in group["advantages"]], dtype=torch.float32),
        "num_items_in_batch": torch.tensor(sum(map(len, completions))),
    }


class Given(GRPOTrainer):
    given: dict[str, torch.Tensor]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return self.given


class Observer(TrainerCallback):
    """Times whole optimizer steps; one microbatch before the first is the warm-up."""

    def __init__(self, trainer: Given, options: Json) -> None:
        self._trainer, self._gradients = trainer, options.get("gradients")
        self._watch: Stopwatch | None = None
        self.watches: list[Json] = []
        self.loss = self.grad_norm = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 0 and not self._gradients:
            self._warm_up(args.per_device_train_batch_size)
        self._watch = Stopwatch()

    def _warm_up(self, rows: int) -> None:
        trainer = self._trainer
        trainer.current_gradient_accumulation_steps = 1
        few = {name: tensor if tensor.ndim == 0 else tensor[:rows] for name, tensor in trainer.given.items()}
        trainer.model.train()
        with trainer.compute_loss_context_manager():
            trainer.compute_loss(trainer.model_wrapped, few).backward()
        trainer.model.zero_grad(set_to_none=True)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._gradients:
            named = {name: parameter.grad for name, parameter in self._trainer.model.named_parameters()}
            save_file({name: grad.contiguous() for name, grad in named.items() if grad is not None}, self._gradients)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        assert self._watch is not None
        self.watches.append(self._watch.read())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.loss, self.grad_norm = logs.get("loss", self.loss), logs.get("grad_norm", self.grad_norm)


def trainer_of(options: Json, batch: dict[str, torch.Tensor], folder: str) -> Given:
    """Configures TRL as its users do: eight rows at a time by default, the rest by gradient accumulation."""
    rows = len(batch["completion_ids"])
    at_once = min(options["rows_at_once"], rows)
    if rows % at_once:
        raise ValueError(f"{rows} rows cannot be accumulated {at_once} at a time")
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=rows // at_once,
        num_generations=options["samples"],
        max_completion_length=batch["completion_ids"].shape[1],
        max_steps=options["steps"],
        learning_rate=1e-6,
        adam_beta2=0.95,
        max_grad_norm=0.0 if options.get("gradients") else 1.0,
        bf16=options["dtype"] == "bfloat16",
        gradient_checkpointing=options.get("checkpointing", False),
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        shuffle_dataset=False,
        seed=0,
    )
    tokenizer = AutoTokenizer.from_pretrained(options["model"], local_files_only=True)
    prompts = Dataset.from_dict({"prompt": [str(number) for number in range(rows)]})
    trainer = Given(
        options["model"], reward_funcs=nothing, args=config, train_dataset=prompts, processing_class=tokenizer
    )
    trainer.given = batch
    return trainer


def nothing(completions: list[Any], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


if __name__ == "__main__":
    child_main(main)
