"""A checkpoint of the trainer as a directory that `transformers` or peft loads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from headrace.trainer.step.learner import Assignment
from headrace.trainer.step.trainer import TorchTrainer


def export_weights(
    model_dir: Path,
    trained: Assignment,
    *,
    seed: int,
    checkpoint: Path,
    to: Path,
    dtype: Literal["bfloat16", "float32"],
    merge: bool,
) -> None:
    """Writes the checkpoint's weights, and the model's tokenizer and templates. `trained`: what the run trained, of which only the dtype of
    the kept weights and the adapter matter here. The directory of an adapter is for peft, unless `merge` adds the adapter to the base
    weights (in float32)."""
    train = trained.train
    masters = train.weights == "float32" or train.offload_optimizer
    kept: Literal["float32", "bfloat16"] = "float32" if masters else "bfloat16"
    train = dataclasses.replace(train, dtype=kept, weights=kept, offload_optimizer=False)
    adapters = {"": dataclasses.replace(trained, train=train)} if trained.lora.rank else {}
    trainer = TorchTrainer(model_dir, train, trained.algo, seed, adapters=adapters)
    trainer.restore(checkpoint)
    trainer.export(to, dtype, merge=merge)
