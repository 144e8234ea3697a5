"""A process reward that is trained beside the policy (PRIME): two steps of both adapters against the formulas in float64, and what becomes of the second one in
updates, checkpoints, publishes and exports."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from headrace.algo.config import AlgoConfig
from headrace.core.batches import Batch, Group, Row
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.types import Prompt
from headrace.models.lora import LoraConfig
from headrace.trainer.config import TrainConfig
from headrace.trainer.step.learner import Assignment
from headrace.trainer.step.trainer import TorchTrainer
from support import plain_trainer, tiny_models

BETA, RATE, MODEL = 2.0, 0.02, "llama"
PREFIX = "base_model.model."


def made(rank: int = 2, budget: int = 16, algo: AlgoConfig | None = None, name: str = "", **train: Any) -> TorchTrainer:
    given = {"learning_rate": 5e-3, "microbatch_tokens": budget, "max_grad_norm": 0.5, **train}
    config = TrainConfig(device="cpu", dtype="float32", path="torch", **given)
    algo = algo or AlgoConfig("prime", process={"beta": BETA, "learning_rate": RATE})
    adapters = {name: Assignment(config, algo, LoraConfig(rank=rank))} if rank else None
    return TorchTrainer(tiny_models.saved(MODEL), config, algo, seed=0, adapters=adapters)


def batch(step: int) -> Batch:
    """Two groups of rollouts of one row each, right or wrong, all tokens in the loss."""
    rows = plain_trainer.rows(random.Random(step), ((5, 3), (3, 2)))
    count = len(rows)
    right = [float(number % 2 == step % 2) for number in range(count)]
    made = [
        replace(
            row,
            mask=(True,) * len(row.tokens),
            advantages=(0.0,) * (len(row.tokens) - 1) + (reward,),
            trajectories=(number if number < 3 else number - 3,),
            turns=(0,),
            versions=(step,) * len(row.tokens),
            teacher=None,
        )
        for number, (row, reward) in enumerate(zip(rows, right, strict=True))
    ]
    return Batch(step, (group(0, made[:3]), group(1, made[3:])))


def group(ticket: int, rows: list[Row]) -> Group:
    return Group(ticket, Prompt("p", "", (1,)), (), tuple(rows))


def merged(base: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """The base with the product of an adapter's two matrices added, as LoRA defines it."""
    found = dict(base)
    for name in (name for name in adapter if name.endswith("lora_A.weight")):
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        product = adapter[name.replace("lora_A", "lora_B")] @ adapter[name]
        found[f"{module}.weight"] = base[f"{module}.weight"] + LoraConfig(rank=rank).alpha / rank * product
    return found


class Written:
    """Two steps of PRIME, written down: policy and reward model are two adapters of one float64 model, each with an AdamW."""

    def __init__(self, trainer: TorchTrainer) -> None:
        self.model = plain_trainer.plain(plain_trainer.model_of(MODEL))
        self.base = {name: p.detach() for name, p in self.model.named_parameters()}
        assert trainer._adapters is not None
        names = ("", "process reward")
        self.policy, self.reward = (
            {k: t.double().clone().requires_grad_() for k, t in trainer._adapters.state(name).items()} for name in names
        )
        train = trainer._config
        self.clip = train.max_grad_norm
        betas = (train.beta1, train.beta2)
        self.optimizers = (
            torch.optim.AdamW(self.policy.values(), lr=train.learning_rate, betas=betas, weight_decay=0.0),
            torch.optim.AdamW(self.reward.values(), lr=RATE, weight_decay=0.0),
        )

    def logprobs(self, adapter: Mapping[str, torch.Tensor], rows: list[Row]) -> list[torch.Tensor]:
        weights = merged(self.base, adapter, 2) if adapter else self.base
        found = plain_trainer.logprobs(plain_trainer.logits(self.model, weights, rows), rows)
        return list(found.split([len(row.tokens) for row in rows]))

    def step(self, batch: Batch) -> tuple[float, float, float, float]:
        """(loss of the reward model, its accuracy, mean process reward, loss of the policy)"""
        rows = batch.rows
        right = torch.tensor([row.advantages[-1] for row in rows], dtype=torch.float64)
        base = [values.detach() for values in self.logprobs({}, rows)]
        q = [a - b for a, b in zip(self.logprobs(self.reward, rows), base, strict=True)]
        probability = torch.stack([(BETA * one.sum()).sigmoid() for one in q])
        loss = torch.nn.functional.binary_cross_entropy(probability, right)
        score = probability.detach() - 0.5
        agreed = torch.where(score.abs() < 1e-9, 0.5, ((score > 0) == (right > 0)).double()).mean().item()
        self._update(1, loss, self.reward)
        q = [a.detach() - b for a, b in zip(self.logprobs(self.reward, rows), base, strict=True)]
        advantage = torch.cat([*_of_group(q[:3], right[:3]), *_of_group(q[3:], right[3:])])
        advantage = (advantage - advantage.mean()) / (advantage.var() + 1e-8).sqrt()
        logprob = torch.cat(self.logprobs(self.policy, rows))
        sampled = torch.tensor([p for row in rows for p in row.logprobs], dtype=torch.float32).double()
        ratio = (logprob - sampled).exp()
        policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        self._update(0, policy, self.policy)
        return loss.item(), agreed, float(BETA * torch.cat(q).mean()), policy.item()

    def _update(self, which: int, loss: torch.Tensor, adapter: Mapping[str, torch.Tensor]) -> None:
        self.optimizers[which].zero_grad()
        loss.backward(inputs=list(adapter.values()))
        torch.nn.utils.clip_grad_norm_(list(adapter.values()), self.clip)
        self.optimizers[which].step()


def _of_group(q: list[torch.Tensor], right: torch.Tensor) -> list[torch.Tensor]:
    n = len(q)
    rewards = [torch.cat([BETA * one[:-1], one.new_zeros(1)]) for one in q]
    means = torch.stack([one.mean() for one in rewards])
    found = []
    for number, one in enumerate(rewards):
        given = one * n / (n - 1) - means.sum() / (n - 1)
        given[-1] += right[number] - (right.sum() - right[number]) / (n - 1)
        found.append(given.flip(0).cumsum(0).flip(0))
    return found


def reward_of(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    assert trainer._process is not None
    return trainer._process.copy()


@pytest.mark.parametrize("budget", [16, 1000], ids=["microbatches", "one microbatch"])
def test_two_steps_are_those_of_the_formulas_in_float64(budget):
    trainer = made(budget=budget)
    written = Written(trainer)
    for step in range(3):
        report, (loss, agreed, reward, policy) = trainer.step(batch(step)), written.step(batch(step))
        assert report.process is not None and (report.microbatches > 1) == (budget == 16)
        assert report.process.process_loss == pytest.approx(loss, rel=2e-4)
        assert report.process.process_accuracy == pytest.approx(agreed)
        assert report.process.process_reward == pytest.approx(reward, rel=2e-3, abs=1e-6)
        assert report.loss == pytest.approx(policy, rel=2e-3, abs=1e-5)
    assert trainer._adapters is not None
    for name, mine in trainer._adapters.state("process reward").items():
        np.testing.assert_allclose(mine, written.reward[name].detach(), atol=2e-4, err_msg=name)
    for name, mine in trainer._adapters.state("").items():
        np.testing.assert_allclose(mine, written.policy[name].detach(), atol=2e-4, err_msg=name)


def test_it_learns_what_is_right():
    trainer = made(learning_rate=1e-5)
    losses = [trainer.step(replace(batch(0), step=step)).process for step in range(12)]
    assert losses[0] is not None and losses[-1] is not None
    assert losses[0].process_loss == pytest.approx(np.log(2)) and losses[0].process_accuracy == 0.5
    assert losses[-1].process_loss < 0.3 and losses[-1].process_accuracy == 1


def test_a_resumed_run_goes_on_bit_for_bit_and_neither_export_nor_publish_knows_the_reward_model(tmp_path):
    one, plain = made(), made(algo=AlgoConfig("rloo"))
    for step in range(2):
        one.step(batch(step))
    one.save(tmp_path / "saved")
    one.export(tmp_path / "exported", "float32")
    other = made()
    other.restore(tmp_path / "saved")
    again, fresh = (trainer.step(batch(2)) for trainer in (one, other))
    assert (
        repr(again.process) == repr(fresh.process) and again.loss == fresh.loss and again.grad_norm == fresh.grad_norm
    )
    mine, theirs = reward_of(one), reward_of(other)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert {name for name, _ in one.parameters()} == {name for name, _ in plain.parameters()} and one.adapters() == []
    assert not [name for name in load_file(tmp_path / "exported" / "adapter_model.safetensors") if "process" in name]
    plain.restore(tmp_path / "saved")  # another algorithm, which has no use for it
    plain.step(batch(2))
    plain.save(tmp_path / "plain")
    begun = made()
    begun.restore(tmp_path / "plain")
    found = begun.step(batch(3)).process
    assert found is not None and found.process_loss == pytest.approx(np.log(2)), (
        "a checkpoint without one begins it anew"
    )
    with pytest.raises(CheckpointError, match="resume with the lora settings"):
        made(rank=4).restore(tmp_path / "saved")


def test_a_skipped_step_leaves_the_reward_model_as_it_was():
    trainer = made(algo=AlgoConfig("prime", correction={"mode": "mask", "low": 50.0, "high": 60.0}, old="trainer"))
    before = reward_of(trainer)
    report = trainer.step(batch(0))
    assert report.skipped == "all_rejected"
    after = reward_of(trainer)
    assert all(torch.equal(after[name], before[name]) for name in before) and not trainer._process.optimizer.state  # type: ignore[union-attr]


def test_several_updates_of_a_step_share_its_rewards():
    one = made(epochs=2)
    report = one.step(batch(0))
    other = made()
    expected = other.step(batch(0))
    assert report.updates == 2 and report.process == expected.process


def test_a_policy_that_is_served_as_an_adapter_of_its_own_learns_the_same():
    one, other = made().step(batch(0)), made(name="policy").step(replace(batch(0), adapter="policy"))
    assert one.process == other.process and (one.loss, one.grad_norm) == (other.loss, other.grad_norm)


def test_without_an_adapter_there_is_none_beside_it():
    with pytest.raises(ConfigError, match=r"set lora\.rank"):
        made(rank=0)
