"""Copies of weights that serve all microbatches of a step: how often they are made, and that no bit of a gradient knows of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.algo.config import AlgoConfig, KLConfig
from headrace.models.lora import LoraConfig
from headrace.trainer.config import TrainConfig
from headrace.trainer.forward.lowered import StepCopies, step_copies
from headrace.trainer.step.learner import Assignment
from headrace.trainer.step.trainer import TorchTrainer
from support.few import few
from support.trainer_calls import batch, model_dir, trainer  # noqa: F401

LOW = {"dtype": "bfloat16", "path": "torch", "microbatch_tokens": 8}


class Casts(TorchDispatchMode):
    """Counts what is lowered to bfloat16, by the memory that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
            self.of[args[0].data_ptr()] += 1
        return func(*args, **kwargs)


def gradients(made: TorchTrainer) -> tuple[int, float, dict[str, torch.Tensor]]:
    given = batch(0, 0)
    plan = made._plans(given)[0]
    sums = made._gradient(given.temperature).fill(plan)
    named = made._learners[""].parameters
    return len(plan.packs), sums.loss, {name: p.grad.clone() for name, p in named.items() if p.grad is not None}


def test_a_weight_is_lowered_once_a_step_and_again_after_its_update(model_dir: Callable[[str], Path]):  # noqa: F811
    made = trainer(model_dir("llama"), **LOW)  # its head is tied to the embedding
    products = {m.weight.data_ptr() for m in made._model.modules() if isinstance(m, torch.nn.Linear)}
    for seed in (0, 1):
        with Casts() as casts:
            report = made.step(batch(seed, seed))
        assert report.microbatches >= 3
        assert len(products) == 15 and {casts.of[place] for place in products} == {1}


WAYS: dict[str, tuple[str, dict[str, Any], AlgoConfig]] = {
    "tied": ("llama", {}, AlgoConfig()),
    "untied": ("qwen3", {}, AlgoConfig()),
    "mixture": ("mixtral", {}, AlgoConfig()),
    "head with a bias": ("phi", {}, AlgoConfig()),
    "carried states": ("gemma2", {}, AlgoConfig()),
    "by its own head": ("granite", {}, AlgoConfig()),
    "checkpointed": ("qwen3", {"gradient_checkpointing": True}, AlgoConfig()),
    "reference": ("qwen3", {}, AlgoConfig(kl=KLConfig(coef=0.1))),
    "whole step first": ("qwen3", {}, AlgoConfig(name="m2po", tau=0.05)),
}


@pytest.mark.parametrize("way", few(WAYS, keep=3))
def test_gradients_are_bit_for_bit_those_of_autocasts_own_copies(way: str, model_dir: Callable[[str], Path]):  # noqa: F811
    name, settings, algo = WAYS[way]
    made = trainer(model_dir(name), algo, **{**LOW, **settings})
    assert made._copies_of_step.places
    packs, loss, found = gradients(made)
    assert packs >= 3
    names = [name for name, _ in made._model.named_parameters()]
    made._learners[""].forget()
    made._copies_of_step = StepCopies((), torch.bfloat16)
    _, own_loss, expected = gradients(made)
    assert loss == own_loss and found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(isinstance(p, torch.nn.Parameter) for p in made._model.parameters())
    assert names == [name for name, _ in made._model.named_parameters()]


@pytest.mark.parametrize("product", ("float32", "as it is"))
@pytest.mark.parametrize("published", ("float32", "bfloat16"))
def test_a_model_that_takes_a_weight_out_of_autocasts_reach_has_no_copies(
    published: str,
    product: str,
    model_dir: Callable[[str], Path],  # noqa: F811
):
    """Weights that were published in bfloat16 are rounded already, until they are trained."""
    made = trainer(model_dir("qwen3"), **LOW)
    with torch.no_grad():
        for parameter in made._model.parameters():
            parameter.copy_(parameter.to(getattr(torch, published)))
    assert step_copies(made._forward, torch.bfloat16).places

    def exact(module: Any, args: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            weight = module.weight.float() if product == "float32" else module.weight
            return torch.nn.functional.linear(args[0].float(), weight)

    made._model.model.layers[1].mlp.down_proj.register_forward_hook(lambda module, args, output: exact(module, args))
    assert not step_copies(made._forward, torch.bfloat16).places
    assert all(isinstance(p, torch.nn.Parameter) for p in made._model.parameters())


def test_there_are_none_in_float32_nor_for_adapters_nor_beside_kernels(model_dir: Callable[[str], Path]):  # noqa: F811
    assert not trainer(model_dir("qwen3"), path="torch")._copies_of_step.places
    config = TrainConfig(device="cpu", dtype="bfloat16", path="torch")
    adapters = {"": Assignment(config, AlgoConfig(), LoraConfig(rank=2))}
    made = TorchTrainer(model_dir("qwen3"), config, AlgoConfig(), seed=0, adapters=adapters)
    assert not made._copies_of_step.places
    beside = trainer(model_dir("qwen3"), **{**LOW, "path": "auto"})
    assert bool(beside._copies_of_step.places) == (
        not beside._fused
    )  # a packed head would be taken for the next copy's
