"""The trainer on a pretended CUDA device: no call mixes devices, and its numbers are those of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_cuda import OnDevice, PretendedCuda, pretended_cuda

from headrace.algo.config import AlgoConfig, KLConfig
from headrace.models.lora import LoraConfig
from headrace.trainer.config import TrainConfig
from headrace.trainer.step.learner import Assignment
from headrace.trainer.step.trainer import TorchTrainer
from support.few import few
from support.trainer_calls import MODELS, batch, model_dir  # noqa: F401

WAYS: dict[str, tuple[dict[str, Any], AlgoConfig, LoraConfig | None]] = {
    "checkpointed": ({"gradient_checkpointing": True}, AlgoConfig(), None),
    "offloaded": ({"offload_optimizer": True}, AlgoConfig(), None),
    "low": ({"dtype": "bfloat16", "weights": "bfloat16"}, AlgoConfig(), None),
    "reference": ({}, AlgoConfig(kl=KLConfig(coef=0.1)), None),
    "selecting": ({}, AlgoConfig(name="dapo"), None),
    "critic": ({"microbatch_tokens": 16}, AlgoConfig(name="vapo", critic={"trunk": 0.1, "alone_steps": 1}), None),
    "lora": ({}, AlgoConfig(kl=KLConfig(coef=0.1)), LoraConfig(rank=2)),
    "dora": ({}, AlgoConfig(), LoraConfig(rank=2, dora=True)),
}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedCuda]:
    yield from pretended_cuda(monkeypatch)


def trainer(
    directory: Path, device: str, settings: dict[str, Any], algo: AlgoConfig, lora: LoraConfig | None
) -> TorchTrainer:
    plain = {
        "dtype": "float32",
        "learning_rate": 1e-3,
        "path": "torch",
        "compile": False,
    }  # nothing here compiles for a GPU
    config = TrainConfig(**{**plain, "device": device, **settings})
    adapters = {"": Assignment(config, algo, lora)} if lora else None
    return TorchTrainer(directory, config, algo, seed=0, adapters=adapters)


def numbers(made: TorchTrainer, place: Path) -> list[Any]:
    """Two steps, with a checkpoint and a resume between them, and all that is read from the trainer."""
    first = made.step(batch(0, 0))
    made.save(place)
    made.restore(place)
    second = made.step(batch(1, 1))
    weights = [tensor.cpu().float() for _, tensor in made.parameters()]
    return [first.loss, first.grad_norm, first.kl, second.loss, second.grad_norm, *made.score([5, 9, 3, 7]), *weights]


def same(directory: Path, place: Path, cuda: PretendedCuda, *way: Any) -> None:
    on_cpu = trainer(directory, "cpu", *way)
    expected = numbers(on_cpu, place / "cpu")
    assert cuda.calls == 0
    made = trainer(directory, "cuda", *way)
    assert made.path == on_cpu.path  # a trainer that finds trees wrong goes row by row
    assert all(isinstance(parameter, OnDevice) for parameter in made._model.parameters())
    found = numbers(made, place / "cuda")
    assert cuda.calls > 100
    low = way[0].get("dtype") == "bfloat16"  # in which a CPU computes short attention in float32
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one, other, rtol=0.05 if low else 1e-5, atol=0.05 if low else 1e-6, check_device=False
        )


@pytest.mark.parametrize("name", few(MODELS, keep=2))
def test_steps_of_every_family_are_those_of_the_cpu(
    name: str,
    model_dir: Callable[[str], Path],  # noqa: F811
    tmp_path: Path,
    cuda: PretendedCuda,
):
    same(model_dir(name), tmp_path, cuda, {}, AlgoConfig(), None)


@pytest.mark.parametrize("way", few(WAYS, keep=3))
def test_every_way_of_training_is_that_of_the_cpu(
    way: str,
    model_dir: Callable[[str], Path],  # noqa: F811
    tmp_path: Path,
    cuda: PretendedCuda,
):
    same(model_dir("qwen3"), tmp_path, cuda, *WAYS[way])


def on_device(made: TorchTrainer) -> list[torch.Tensor]:
    """What lies on the device, of weights and of optimizer state."""
    states = [one.state for learner in made._learners.values() for one in learner.optimizers]
    kept = [value for state in states for of_one in state.values() for value in of_one.values()]
    models = [made._model, *([made._reference.forward.model] if made._reference else [])]
    models += [learner.critic for learner in made._learners.values() if learner.critic]
    kept += [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    return [tensor for tensor in kept if isinstance(tensor, OnDevice) and tensor.is_cuda]


@pytest.mark.parametrize("way", few(WAYS, keep=2))
def test_asleep_it_has_nothing_on_the_device_and_goes_on_as_if_it_had_not_slept(
    way: str,
    model_dir: Callable[[str], Path],  # noqa: F811
    tmp_path: Path,
    cuda: PretendedCuda,
):
    found = []
    for naps in (False, True):
        made = trainer(model_dir("qwen3"), "cuda", *WAYS[way])
        made.step(batch(0, 0))
        there = len(on_device(made))
        if naps:
            assert made.sleep().moved > 0 and not on_device(made)
            made.save(tmp_path)  # without a device
            assert made.wake().moved > 0
        assert len(on_device(made)) == there > 0
        torch.manual_seed(1)  # for stochastic rounding
        report = made.step(batch(1, 1))
        weights = [tensor.cpu().tolist() for _, tensor in made.parameters()]
        found.append((report.loss, report.grad_norm, made.score([5, 9, 3, 7]), weights))
    assert found[0] == found[1]


def test_a_mixture_of_devices_is_an_error_and_numpy_takes_no_tensor_of_the_device(cuda: PretendedCuda):
    here, there = torch.ones(3, device="cuda"), torch.ones(3)
    assert here.is_cuda and here.device == torch.device("cuda", 0) and not there.is_cuda
    for mixed in (
        lambda: here + there,
        lambda: torch.cat([here, there]),
        lambda: here.index_select(0, torch.tensor([0])),
    ):
        with pytest.raises(RuntimeError, match=r"is on the CPU, and others are on cuda:0"):
            mixed()
    with pytest.raises(TypeError, match="copy it to the CPU first"):
        here.numpy()
    assert (here * torch.tensor(2.0))[torch.tensor([0])].tolist() == [
        2.0
    ]  # a GPU takes a number and an index from the CPU
    assert here.copy_(there).is_cuda and not here.cpu().is_cuda and here.to(torch.float64).is_cuda
