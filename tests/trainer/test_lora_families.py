"""LoRA by default settings on families with routers, gates, mixers and experts of their own: it trains, and is published merged for an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.algo.config import AlgoConfig
from headrace.core.batches import Batch, Group
from headrace.core.errors import ConfigError
from headrace.core.types import Prompt
from headrace.models.lora import LoraConfig
from headrace.testing.makers import row
from headrace.testing.small_models import small_model
from headrace.trainer.config import TrainConfig
from headrace.trainer.model.adapters import Adapters, adaptable, expert_parameters
from headrace.trainer.step.learner import Assignment
from headrace.trainer.step.trainer import TorchTrainer
from support.few import few

LEFT_OUT = {
    "qwen3_next": "mlp.shared_expert_gate",  # one output
    "llama4_text": "feed_forward.router",  # returns a tuple
    "mamba2": "mixer.out_proj",  # read past the adapter by a fused kernel
    "granitemoehybrid": "mamba.out_proj",
}


@pytest.mark.parametrize("name", few(LEFT_OUT, keep=1))
def test_what_cannot_be_adapted_is_left_out_and_the_rest_moves(name: str, tmp_path: Path) -> None:
    model = small_model(name)
    model.save_pretrained(tmp_path)
    lora = LoraConfig(rank=2, publish="merged", experts=bool(expert_parameters(model)))
    train = TrainConfig(dtype="float32", device="cpu", learning_rate=1e-2)
    trainer = TorchTrainer(tmp_path, train, AlgoConfig(), 0, adapters={"": Assignment(train, AlgoConfig(), lora)})
    before = {key: tensor.clone() for key, tensor in trainer.parameters()}
    rows = tuple(row((9 + i, 10, 11), prompt=(5, 6, 7, 8), advantage=(-1.0) ** i) for i in range(4))
    for step in range(2):  # in the first, B is zero and A gets no gradient
        trainer.step(Batch(step, (Group(0, Prompt("p", "", (1,)), (), rows),)))
    moved = {key for key, tensor in trainer.parameters() if not torch.equal(tensor, before[key])}
    adapted = {f"{key}.weight" for key in adaptable(model)}
    assert moved >= adapted & before.keys() and not any(LEFT_OUT[name] in key for key in moved)
    assert all(any(key.endswith(end) for key in moved) for end in expert_parameters(model))


def test_a_target_that_is_left_out_is_refused_by_name(tmp_path: Path) -> None:
    model = small_model("mamba2")
    with pytest.raises(ConfigError, match="lora.targets names out_proj, .*there are in_proj"):
        Adapters(model, {"": LoraConfig(rank=2, targets=("out_proj",))}, torch.float32, tmp_path)
    Adapters(small_model("mamba2"), {"": LoraConfig(rank=2, targets=("in_proj",))}, torch.float32, tmp_path)
