"""A critic with a model of its own in the trainer: its gradient against one in float64, and what becomes of it in updates and checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace.algo.config import AlgoConfig
from headrace.core.errors import CheckpointError
from headrace.models.lora import LoraConfig
from headrace.trainer.config import TrainConfig
from headrace.trainer.step.learner import Assignment
from headrace.trainer.step.trainer import TorchTrainer, export_weights
from headrace.trainer.step.value_head import CriticModel
from support import critic_reference, tiny_models
from support.critic_reference import batch


@pytest.fixture(scope="module", params=["qwen3", "gemma2"], ids=["packed trees", "row by row"])
def own_model(request: pytest.FixtureRequest) -> Path:
    """A model of another architecture than the policy's."""
    return tiny_models.saved_with_tokenizer(request.param)


def made(own: Path | None, rate: float = 1e-3, **train: Any) -> TorchTrainer:
    critic = {"model": str(own), "model_learning_rate": rate} if own else {}
    given = {"device": "cpu", "dtype": "float32", "path": "torch", "learning_rate": 1e-3, "microbatch_tokens": 16}
    algo = AlgoConfig("ppo", critic=critic)
    return TorchTrainer(tiny_models.saved("llama"), TrainConfig(**(given | train)), algo, seed=0)


def critic_of(trainer: TorchTrainer) -> CriticModel:
    critic = trainer._learners[""].critic
    assert isinstance(critic, CriticModel)
    return critic


def kept(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    """All parameters of the critic and of the policy."""
    found = dict(critic_of(trainer).named_parameters()) | dict(trainer.parameters())
    return {name: tensor.detach().clone() for name, tensor in found.items()}


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_gradient_is_that_of_the_value_loss_in_float64_and_the_policys_is_its_own_alone(
    own_model: Path, checkpointed: bool
) -> None:
    """No states are carried in a model that is checkpointed, and what the policy could share in trees is then computed row by row."""
    trainer, given = made(own_model, gradient_checkpointing=checkpointed), batch(0)
    critic = critic_of(trainer)
    critic_reference.begun(critic.weight, critic.bias)
    (plan,) = trainer._plans(given)
    assert len(plan.packs) > 1
    trainer._gradient(1.0).fill(plan)

    expected = critic_reference.gradients(own_model, given, critic.weight, critic.bias)
    found = {name: tensor.grad for name, tensor in critic.named_parameters()}
    assert found.keys() == expected.keys() and len(found) > 10, "the output head is no part of it"
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-6, name
        np.testing.assert_allclose(found[name], gradient, rtol=2e-4, atol=2e-6, err_msg=name)

    critic.bias.data += 3  # all values wrong by as much: a loss of another size, and the same whitened advantages
    before = {
        name: tensor.grad.clone() for name, tensor in trainer._model.named_parameters() if tensor.grad is not None
    }
    trainer._learners[""].forget()
    trainer._gradient(1.0).fill(plan)
    for name, gradient in before.items():
        np.testing.assert_allclose(trainer._model.get_parameter(name).grad, gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "train",
    [
        {"gradient_checkpointing": True, "epochs": 2},
        {"weights": "bfloat16", "dtype": "bfloat16"},
        pytest.param({"offload_optimizer": True}, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_critic_goes_on_bit_for_bit_and_neither_export_nor_publish_knows_it(
    own_model: Path, tmp_path: Path, train: dict[str, Any]
) -> None:
    one = made(own_model, **train)
    first = kept(one)
    reports = [one.step(batch(step)) for step in range(2)]
    assert reports[0].critic.value_mean == 0 and reports[1].critic.value_mean != 0
    changed = {name for name, tensor in kept(one).items() if not torch.equal(tensor, first[name])}
    assert {name.partition(".")[0] for name in changed} == {"weight", "bias", "trunk", "model", "lm_head"}
    assert {tensor.dtype for tensor in critic_of(one).parameters()} == {torch.float32}
    one.save(tmp_path / "saved")
    one.export(tmp_path / "exported", "float32")
    one.sleep()
    one.wake()
    other = made(own_model, **train)
    other.restore(tmp_path / "saved")
    reports = []
    for trainer in (one, other):
        torch.manual_seed(0)  # of one process: weights in bfloat16 are rounded by chance
        reports.append(trainer.step(batch(2)))
    again, fresh = reports
    assert repr(again.critic) == repr(fresh.critic) and again.loss == fresh.loss and again.grad_norm == fresh.grad_norm
    for name, tensor in kept(one).items():
        assert torch.equal(tensor, kept(other)[name]), name
    names = load_file(tmp_path / "exported" / "model.safetensors").keys() | dict(one.parameters()).keys()
    assert not [name for name in names if "trunk" in name or "critic" in name]


def test_a_checkpoint_without_a_critic_begins_one_anew_and_one_of_another_kind_is_refused(
    own_model: Path, tmp_path: Path
) -> None:
    plain = TorchTrainer(
        tiny_models.saved("llama"), TrainConfig(device="cpu", dtype="float32"), AlgoConfig("reinforce"), 0
    )
    plain.save(tmp_path / "plain")
    trainer, head = made(own_model), made(None)
    first = kept(trainer)
    for step in range(2):
        trainer.step(batch(step))
    trainer.save(tmp_path / "model")
    head.save(tmp_path / "head")
    before = kept(trainer)
    with pytest.raises(CheckpointError, match="is a head on the policy, and this one is a model of its own"):
        trainer.restore(tmp_path / "head")
    with pytest.raises(CheckpointError, match="resume with the algo.critic.model it was written with"):
        head.restore(tmp_path / "model")
    assert all(torch.equal(tensor, kept(trainer)[name]) for name, tensor in before.items())
    trainer.restore(tmp_path / "plain")
    assert all(torch.equal(tensor, kept(trainer)[name]) for name, tensor in first.items())
    assert trainer.step(batch(0)).critic.value_mean == 0


def test_an_adapter_beside_it_is_exported_where_its_model_is_gone(tmp_path: Path) -> None:
    own = shutil.copytree(tiny_models.saved_with_tokenizer("qwen3"), tmp_path / "own")
    train, algo = TrainConfig(device="cpu", dtype="float32"), AlgoConfig("ppo", critic={"model": str(own)})
    trained = Assignment(train, algo, LoraConfig(rank=2))
    policy = tiny_models.saved("llama")
    trainer = TorchTrainer(policy, train, algo, 0, adapters={"": trained})
    trainer.step(batch(0))
    trainer.save(tmp_path / "saved")
    shutil.rmtree(own)
    export_weights(
        policy, trained, seed=0, checkpoint=tmp_path / "saved", to=tmp_path / "to", dtype="float32", merge=True
    )
    merged = load_file(tmp_path / "to" / "model.safetensors")
    assert all(torch.equal(tensor, merged[name]) for name, tensor in trainer.parameters())


def test_its_gradient_is_bounded_by_itself_and_one_that_is_not_finite_updates_nothing(own_model: Path) -> None:
    trainer = made(own_model, max_grad_norm=1e-3)
    critic = critic_of(trainer)
    trainer.step(batch(0))  # after which the head is not 0
    norms = []
    critic.optimizer.register_step_pre_hook(
        lambda *_: norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in critic.trunk.parameters()])))
    )
    trainer.step(batch(1))
    assert norms == pytest.approx([1e-3], rel=1e-3)
    before = kept(trainer)
    parameter = next(critic.trunk.parameters())
    parameter.register_hook(lambda gradient: gradient * float("inf"))
    report = trainer.step(batch(2))
    assert report.skipped and len(norms) == 1
    assert all(torch.equal(tensor, kept(trainer)[name]) for name, tensor in before.items())
