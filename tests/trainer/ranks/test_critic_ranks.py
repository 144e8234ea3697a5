"""A critic's own model on several ranks lies, learns and is kept as on one device, beside a policy that is split in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comparisons import compare_steps, refused, resume, save_after_two, steps, third_step, weights
from rank_processes import RankProcesses
from sharded_case import GROUPS, Case, compare, trainer_of_rank
from torch import Tensor
from torch.distributed.tensor import DTensor

from headrace.core.errors import CheckpointError
from headrace.trainer.step.value_head import CriticModel
from support import critic_reference, tiny_models
from support.few import few

PPO: dict[str, Any] = {"name": "ppo", "lam": 0.9}
TENSOR = {"shard": 1, "tensor": 2}
TOGETHER: dict[str, Any] = {"parallel": {"shard": 1, "context": 2}, "train": {"microbatch_tokens": 6}}
CASES = {
    "FSDP2": Case(model="llama", critic="qwen3", algo=PPO),
    "its head is a matrix of its own": Case(model="qwen3", critic="llama", algo=PPO),
    "row by row": Case(model="llama", critic="gemma2", algo=PPO),
    "microbatches together": Case(model="llama", critic="qwen3", algo=PPO, **TOGETHER),
    "TP": Case(model="qwen3", critic="llama", algo=PPO, parallel=TENSOR),
    "TP, tied": Case(model="llama", critic="qwen3", algo=PPO, parallel=TENSOR),
    "beside an adapter": Case(model="llama", critic="qwen3", algo=PPO, lora={"rank": 4}),
    "TP beside an adapter": Case(model="llama", critic="qwen3", algo=PPO, lora={"rank": 4}, parallel=TENSOR),
    "once a step": Case(model="llama", critic="qwen3", algo=PPO, parallel={"reduce": "step"}),
    "checkpointed layers": Case(model="llama", critic="qwen3", algo=PPO, train={"gradient_checkpointing": True}),
    "a mixture": Case(model="llama", critic="qwen3_moe", algo=PPO),
    "whole experts": Case(model="mixtral", critic="qwen3_moe", algo=PPO, parallel={"expert": 2}),
    "TP, whole experts": Case(model="mixtral", critic="qwen3_moe", algo=PPO, parallel={**TENSOR, "expert": 2}),
    "dense beside whole experts": Case(model="qwen3_moe", critic="llama", algo=PPO, parallel={"expert": 2}),
    "TP, dense beside whole experts": Case(
        model="qwen3_moe", critic="llama", algo=PPO, parallel={**TENSOR, "expert": 2}
    ),
    "filled up": Case(model="llama", critic="qwen3", algo=PPO, groups=((5, 1), (30, 1), (4, 4))),
    "row by row, filled up": Case(model="llama", critic="gemma2", algo=PPO, groups=((5, 1), (30, 1), (4, 4))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_gradient_of_one_device(name: str, two: RankProcesses) -> None:
    compare(two, CASES[name], least=1 if "filled up" in name else 2)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"shard": 2, "replicate": 2}, {"shard": 2, "tensor": 2}])
def test_four_ranks_have_the_gradient_of_one_device(parallel: dict[str, int], four: RankProcesses) -> None:
    compare(four, Case(CASES["FSDP2"], groups=(*GROUPS, *GROUPS), parallel=parallel))


def in_float64(directory: Path, case: Case) -> tuple[dict[str, Tensor], float, Tensor, Tensor]:
    """The critic's gradients, the share of its model that this rank holds, and its head."""
    trainer, given = trainer_of_rank(directory, case), critic_reference.batch(0)
    critic = trainer._learners[""].critic
    assert isinstance(critic, CriticModel)
    critic_reference.begun(critic.weight, critic.bias)
    (plan,) = trainer._plans(given)
    trainer._gradient(1.0).fill(plan)
    whole, parameters = trainer._placement.whole, list(critic.trunk.parameters())
    found = {name: whole(p.grad).clone() for name, p in critic.named_parameters() if p.grad is not None}
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    return found, held / sum(p.numel() for p in parameters), critic.weight.detach(), critic.bias.detach()


@pytest.mark.parametrize("name", few(["FSDP2", "row by row", "microbatches together", "TP"], keep=1))
def test_two_ranks_have_the_gradient_of_the_value_loss_in_float64(name: str, two: RankProcesses) -> None:
    case = Case(CASES[name], algo={"name": "ppo"}).saved
    own, expected = Path(case["critic"]), None
    for found, held, weight, bias in two.run(in_float64, tiny_models.saved(case["model"]), case):
        expected = expected or critic_reference.gradients(own, critic_reference.batch(0), weight, bias)
        assert found.keys() == expected.keys() and held == pytest.approx(0.5, abs=0.02)
        for key, gradient in expected.items():
            assert gradient.abs().max() > 1e-6, key
            np.testing.assert_allclose(found[key], gradient, rtol=2e-4, atol=2e-6, err_msg=key)


# -- steps, checkpoints ------------------------------------------------------------------------------------------------------


STEPS = {
    "FSDP2": Case(
        CASES["FSDP2"],
        algo={**PPO, "critic": {"alone_steps": 1}},
        train={"max_grad_norm": 0.1, "epochs": 2, "minibatches": 1},
    ),
    **{name: CASES[name] for name in ("microbatches together", "TP, tied", "beside an adapter", "TP, whole experts")},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_three_steps_end_at_the_weights_of_one_device(name: str, two: RankProcesses) -> None:
    compare_steps(two, STEPS[name], share=0.5)


RESUMED = [
    "FSDP2",
    "TP, tied",
    "microbatches together",
    "beside an adapter",
    "whole experts",
    "dense beside whole experts",
    "row by row",
]


@pytest.mark.parametrize("name", few(RESUMED, keep=1))
def test_a_checkpoint_goes_on_bit_for_bit_on_its_mesh_and_equally_on_another(
    name: str, two: RankProcesses, tmp_path: Path
) -> None:
    case = CASES[name]
    resume(two, case, tmp_path, also=[Case(case, parallel={"shard": 2})] if name == "TP, tied" else [])


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_on_four(two: RankProcesses, four: RankProcesses, tmp_path: Path) -> None:
    case = Case(CASES["FSDP2"], groups=(*GROUPS, *GROUPS)).saved
    directory = tiny_models.saved(case["model"])
    two.run(save_after_two, directory, case, tmp_path)
    one = case.trainer(directory)
    one.restore(tmp_path / "checkpoint")
    steps(one, case, 3)
    expected = weights(one)
    for parallel in ({"shard": 4}, {"shard": 2, "replicate": 2}, {"shard": 2, "tensor": 2}):
        for found, _ in four.run(third_step, directory, Case(case, parallel=parallel), tmp_path / "checkpoint"):
            for key, tensor in expected.items():
                assert (tensor - found[key]).abs().max() <= 3e-5, key


def begun_anew(
    directory: Path, case: Case, plain: Path, head: Path
) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """What is said of a checkpoint of another kind of critic; and the weights before two steps, and after a checkpoint without one was restored."""
    one = trainer_of_rank(directory, case)
    first = weights(one)
    steps(one, case, 2)
    with pytest.raises(CheckpointError) as caught:
        one.restore(head)
    one.restore(plain)
    return str(caught.value), first, weights(one)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"shard": 2}, TENSOR])
def test_ranks_begin_a_critic_anew_and_refuse_one_of_another_kind(
    parallel: dict[str, int], two: RankProcesses, tmp_path: Path
) -> None:
    case, directory = Case(CASES["FSDP2"], parallel=parallel).saved, tiny_models.saved("llama")
    Case(model="llama").trainer(directory).save(tmp_path / "plain")
    Case(model="llama", algo=PPO).trainer(directory).save(tmp_path / "head")
    for said, first, again in two.run(begun_anew, directory, case, tmp_path / "plain", tmp_path / "head"):
        assert "is a head on the policy, and this one is a model of its own" in said
        assert first.keys() == again.keys() and all(torch.equal(tensor, again[key]) for key, tensor in first.items())


@pytest.mark.slow
def test_a_model_that_cannot_lie_on_the_ranks_is_refused_by_its_setting(two: RankProcesses) -> None:
    cases = {
        "does not divide the model's num_attention_heads = 9": Case(
            model="llama", critic="nine-heads", algo=PPO, parallel=TENSOR
        ),
        "spreads packed trees over ranks, and Gemma2ForCausalLM": Case(
            model="llama", critic="gemma2", algo=PPO, **TOGETHER
        ),
    }
    for message, case in cases.items():
        for said in two.run(refused, tiny_models.saved("llama"), case.saved):
            assert said.startswith("algo.critic.model = ") and message in said
