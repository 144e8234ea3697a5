"""Layers that torch.compile has written: their gradients are the eager ones', other lengths need no other graphs, and whatever cannot be
compiled, or not exactly, is trained eagerly with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import register_backend

from headrace.algo.config import AlgoConfig
from headrace.core.errors import ConfigError
from headrace.models.lora import LoraConfig
from headrace.trainer.config import TrainConfig, train_problems, uncompiled
from headrace.trainer.forward.compiled import MANY, Compilation, _tried, compiled, difference
from headrace.trainer.model.causal_lm import layers_of
from headrace.trainer.parallel import ParallelConfig
from headrace.trainer.step.learner import Assignment
from headrace.trainer.step.trainer import TorchTrainer
from support.trainer_calls import batch, model_dir, near, trainer  # noqa: F401

Saved = Callable[[str], Path]
SMALL = {"path": "torch", "microbatch_tokens": 8}


def gradients(made: TorchTrainer, seed: int) -> tuple[int, float, dict[str, torch.Tensor]]:
    given = batch(seed, 0)
    plan = made._plans(given)[0]
    sums = made._gradient(given.temperature).fill(plan)
    named = made._learners[""].parameters
    found = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    made._learners[""].forget()
    return len({len(pack.tokens) for pack in plan.packs}), sums.loss, found


def compile_by(made: TorchTrainer, backend: str) -> Compilation:
    found = compiled(made._forward, made._dtype, made._copies_of_step, backend)
    made._forward, made._compilation = found.forward, found
    return found


def compare(made: TorchTrainer, backend: str, tolerance: float) -> None:
    expected = [gradients(made, seed) for seed in (0, 1, 2)]
    found = compile_by(made, backend)
    assert not found.why_not and made.path.startswith("packed trees, chunked head, compiled")
    for seed, (lengths, loss, gradient) in enumerate(expected):
        assert lengths >= 3
        _, found_loss, found_gradient = gradients(made, seed)
        assert found_loss == pytest.approx(loss, rel=tolerance, abs=tolerance)
        near(found_gradient, gradient, tolerance)
    new, sentence = found.news()  # those of the trial serve all lengths but 1, which torch compiles apart
    assert new <= 2 and not sentence


@pytest.mark.slow
def test_gradients_are_the_eager_ones_and_other_lengths_need_no_other_graphs(model_dir: Saved):  # noqa: F811
    made = trainer(model_dir("qwen3"), **SMALL)
    compare(made, "eager", 3e-6)
    assert made.step(batch(0, 0)).graphs == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mixtral"])
def test_a_mixture_is_compiled_around_its_experts(model: str, model_dir: Saved):  # noqa: F811
    made = trainer(model_dir(model), **SMALL)
    compare(made, "eager", 3e-6)
    assert made.step(batch(0, 0)).graphs == 0


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no gradient of it")


@register_backend(name="headrace_broken")
def broken(graph: Any, inputs: Any) -> Any:
    """A backend whose graphs cannot be gone through backwards."""

    def call(*given: Any) -> Any:
        return tuple(_Broken.apply(x) if isinstance(x, torch.Tensor) else x for x in graph(*given))

    return call


@pytest.mark.slow
def test_ranks_that_break_off_are_refused_and_one_device_goes_on(model_dir: Saved):  # noqa: F811
    made = trainer(model_dir("llama"), **SMALL)
    before = gradients(made, 0)
    assert "RuntimeError: no gradient of it" in compile_by(made, "headrace_broken").why_not
    _, loss, gradient = gradients(made, 0)
    assert loss == before[1] and all(torch.equal(gradient[name], tensor) for name, tensor in before[2].items()), (
        "nothing of the pass that broke off is in the first step"
    )
    with pytest.raises(ConfigError, match="in these ranks: RuntimeError: no gradient of it; set train.compile = false"):
        compiled(made._forward, made._dtype, made._copies_of_step, "headrace_broken", torch.Tensor.clone)


@pytest.mark.slow
def test_no_rank_compiles_where_another_does_not(model_dir: Saved):  # noqa: F811
    made = trainer(model_dir("llama"), **SMALL)
    found = compiled(made._forward, made._dtype, made._copies_of_step, "eager", torch.ones_like)
    assert "not compiled: another rank's could not be" in found.why_not and not found.forward.backend
    assert not any("forward" in vars(layer) for layer in layers_of(made._model))


@register_backend(name="headrace_wrong")
def wrong(graph: Any, inputs: Any) -> Any:
    def call(*given: Any) -> Any:
        return tuple(x * 1.01 if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in graph(*given))

    return call


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "backend", "reason"),
    [
        ("qwen3", "headrace_wrong", "log-probs or gradients differ from the eager ones by"),
        ("qwen3", "headrace_absent", "InvalidBackend: Invalid backend: 'headrace_absent'"),
        ("gemma2", "eager", "it is run carried states, chunked head"),
    ],
)
def test_what_is_not_compiled_stays_as_it_was_and_is_said_once(
    model: str,
    backend: str,
    reason: str,
    model_dir: Saved,  # noqa: F811
):
    made = trainer(model_dir(model), **SMALL)
    before = gradients(made, 0)
    found = compile_by(made, backend)
    assert f"ForCausalLM are not compiled: {reason}" in found.why_not and not made._forward.backend
    assert not any("forward" in vars(layer) for layer in layers_of(made._model))
    _, loss, gradient = gradients(made, 0)
    assert loss == before[1] and all(torch.equal(gradient[name], tensor) for name, tensor in before[2].items())
    assert made.step(batch(0, 0)).notice == found.why_not and not made.step(batch(1, 1)).notice


def test_a_pass_in_which_a_layer_cannot_be_compiled_comes_to_its_end_eagerly() -> None:
    asked, failures = [], list[Exception]()

    def fast(x: int) -> int:
        asked.append(x)
        raise ValueError("no graph")

    layers = [_tried(lambda x: x + 1, fast, failures) for _ in range(3)]
    found = 0
    for layer in layers:
        found = layer(found)
    assert found == 3 and asked == [0] and [str(error) for error in failures] == ["no graph"]


@pytest.mark.parametrize(("parallel", "reason"), [({"pipeline": 2}, "call layers in an order of their own")])
def test_ranks_that_do_not_keep_a_layer_whole_are_refused_with_a_remedy_that_works(
    parallel: dict[str, int], reason: str
) -> None:
    def problems(**train: Any) -> list[str]:
        config = TrainConfig(parallel=ParallelConfig(**parallel), **train)
        return list(train_problems(config, LoraConfig(), 8, itself=False, critic=False))

    (problem,) = problems(compile=True)
    assert (
        problem.startswith("train.compile = true, and")
        and reason in problem
        and problem.endswith("remove train.compile")
    )
    assert (
        problems() == []
        and uncompiled(ParallelConfig(shard=2, replicate=2)) == uncompiled(ParallelConfig(shard=4, expert=4)) == ""
        and uncompiled(ParallelConfig(shard=1, tensor=2)) == ""
        and "with train.compile = true" in uncompiled(ParallelConfig(shard=1, tensor=2), asked=False)
    )


def test_numbers_that_are_not_finite_are_different_wherever_they_come() -> None:
    good, bad = torch.tensor([1.0, 2.0]).double(), torch.tensor([1.0, torch.nan]).double()
    assert difference([good, good], [good, good], 1e-4) == ""
    assert all(difference(found, [good, good], 1e-4) for found in ([good, bad], [bad, good], [good, good + 1e-3]))


def test_many_graphs_are_said_once_with_the_remedy(model_dir: Saved):  # noqa: F811
    made = trainer(model_dir("qwen3"), **SMALL)
    found = Compilation(made._forward.__class__(made._model, True, True, backend="eager"))
    found.counted = found.trial = -MANY - 1
    new, sentence = found.news()
    assert new > MANY and sentence.endswith("set train.compile = false") and found.news() == (0, "")


@pytest.mark.parametrize("settings", [{"path": "kernels"}, {"parity": "bitwise"}])
def test_what_excludes_compiled_layers_is_refused(settings: dict[str, Any]):
    with pytest.raises(ValueError, match=r"train\.compile = true.*remove one of the two"):
        TrainConfig(compile=True, **settings)


def test_on_a_cpu_layers_are_compiled_only_where_that_is_asked_for(model_dir: Saved):  # noqa: F811
    made = trainer(model_dir("qwen3"), **SMALL)
    assert "compiled" not in made.path and made.step(batch(0, 0)).notice == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "settings", "tolerance"),
    [
        ("llama", {}, 1e-5),
        ("gemma3", {}, 1e-5),
        ("gpt_neox", {}, 1e-5),
        ("qwen3", {"gradient_checkpointing": True}, 1e-5),
        ("qwen3", {"dtype": "bfloat16"}, 0.1),
    ],
)
def test_inductors_kernels_have_the_eager_gradients(
    model: str,
    settings: dict[str, Any],
    tolerance: float,
    model_dir: Saved,  # noqa: F811
):
    compare(trainer(model_dir(model), **{**SMALL, **settings}), "inductor", tolerance)


@pytest.mark.slow
def test_an_adapter_is_trained_beside_compiled_layers(model_dir: Saved):  # noqa: F811
    config = TrainConfig(device="cpu", dtype="float32", **SMALL)
    adapters = {"": Assignment(config, AlgoConfig(), LoraConfig(rank=2))}
    made = TorchTrainer(model_dir("qwen3"), config, AlgoConfig(), seed=0, adapters=adapters)
    made._activate("")
    compare(made, "inductor", 1e-5)
