"""What is trained by ranks in processes of their own, and by one device, and the comparison of both."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import RankProcesses
from torch import Tensor

from headrace.algo.config import AlgoConfig
from headrace.core.batches import Batch, Group, Row
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.models.lora import LoraConfig
from headrace.trainer.config import TrainConfig
from headrace.trainer.dealing.share import head_of
from headrace.trainer.parallel import ParallelConfig
from headrace.trainer.placement.port import Placement
from headrace.trainer.placement.staged import placement_of
from headrace.trainer.step.learner import Assignment
from headrace.trainer.step.trainer import TorchTrainer
from headrace.trainer.step.whole_step import pairs_of
from support import plain_trainer, tiny_models

CPU = torch.device("cpu")
GROUPS = ((5, 3), (3, 2), (4, 3), (6, 2))
"""Prompts and completions of a step: with `BUDGET`, at least three microbatches for each of two ranks."""
BUDGET = 12
PLAIN = {"dtype": "float32", "path": "torch", "device": "cpu", "learning_rate": 1e-3, "microbatch_tokens": BUDGET}


class Case(dict[str, Any]):
    """What is trained: `model`, and further `algo`, `lora`, `train`, `parallel` (settings), `masks`, `routing`, `top`, `groups`, `pairs`,
    `critic` (the model that the critic has of its own), `teacher` (the model that the trainer holds)."""

    @property
    def settings(self) -> dict[str, Any]:
        return {**PLAIN, **self.get("train", {})}

    @property
    def ranks(self) -> ParallelConfig:
        return ParallelConfig(**{"shard": 2, **self.get("parallel", {})})

    @property
    def saved(self) -> Case:
        """The case with the directories of other models in the place of their names: ranks save none."""
        own = {
            name: str(tiny_models.saved_with_tokenizer(self[name])) for name in ("critic", "teacher") if name in self
        }
        return type(self)(self, **own)

    def batch(self, step: int) -> Batch:
        experts = plain_trainer.experts_of(tiny_models.make(self["model"])) if self.get("routing") else None
        groups, masks, top = self.get("groups", GROUPS), self.get("masks", False), self.get("top", 0)
        rows = plain_trainer.rows(random.Random(step), groups, masks=masks, experts=experts, top=top)
        scored = tuple(map(_scored, rows)) if "pairs" in self else ()
        return Batch(step, (Group(0, Prompt("p", "", (1,)), scored, tuple(rows), pairs=self.get("pairs", ())),))

    def trainer(self, directory: Path, placement: Placement | None = None) -> TorchTrainer:
        train, given = TrainConfig(**self.settings), self.get("algo", {})
        if "critic" in self:
            own = {"model": self["critic"], "model_learning_rate": 1e-3}
            given = {**given, "critic": {**given.get("critic", {}), **own}}
        if "teacher" in self:
            given = {**given, "distill": {**given.get("distill", {}), "model": self["teacher"]}}
        algo = AlgoConfig(**given)
        adapters = {"": Assignment(train, algo, LoraConfig(**self["lora"]))} if "lora" in self else None
        return TorchTrainer(
            directory,
            train,
            algo,
            seed=0,
            keep_routing=bool(self.get("routing")),
            adapters=adapters,
            placement=placement,
        )


class Piped(Case):
    """A case on two stages, unless `parallel` says otherwise."""

    @property
    def ranks(self) -> ParallelConfig:
        return ParallelConfig(**{"pipeline": 2, **self.get("parallel", {})})


def trainer_of_rank(directory: Path, case: Case) -> TorchTrainer:
    return case.trainer(directory, placement_of(case.ranks, CPU))


def shifted(adapter: Iterable[Tensor]) -> None:
    """Moves an adapter from where it begins: B is zero there, and A has no gradient."""
    generator = torch.Generator().manual_seed(0)
    for parameter in adapter:
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


Gradients = tuple[float, float, dict[str, Tensor], int]


def gradients(trainer: TorchTrainer, case: Case) -> Gradients:
    given = case.batch(0)
    if "lora" in case:
        shifted(trainer._learners[""].parameters.values())
    if critic := trainer._learners[""].critic:
        shifted((critic.weight, critic.bias))
    plan = trainer._plans(given)[0]
    pairs = pairs_of(head_of(given)) if "pairs" in case else None
    sums = trainer._gradient(given.temperature, pairs=pairs).fill(plan)
    parameters = trainer._learners[""].parameters
    found = {name: trainer._placement.whole(p.grad) for name, p in parameters.items() if p.grad is not None}
    found |= {
        f"critic.{name}": trainer._placement.whole(p.grad).clone()
        for name, p in (critic.named_parameters() if critic else [])
        if p.grad is not None
    }
    norm = trainer._placement.norm([p for p in parameters.values() if p.grad is not None])
    trainer._learners[""].forget()
    return sums.loss, float(norm), found, len(plan.packs)


def gradients_of_rank(directory: Path, case: Case) -> Gradients:
    return gradients(trainer_of_rank(directory, case), case)


def distance(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a tensor, relative to its largest value."""
    assert actual.keys() == expected.keys()
    return max(
        float((actual[name].double() - one.double()).abs().max() / one.double().abs().max().clamp(min=1e-30))
        for name, one in expected.items()
    )


def compare(ranks: RankProcesses, case: Case, tolerance: float = 1e-5, least: int = 3) -> None:
    directory, case = tiny_models.saved(case["model"]), case.saved
    one = case.trainer(directory)
    loss, norm, expected, _ = gradients(one, case)
    for found_loss, found_norm, found, packs in ranks.run(gradients_of_rank, directory, case):
        assert packs >= least
        assert (found_loss, found_norm) == pytest.approx((loss, norm), rel=max(tolerance, 3e-6))
        assert distance(found, expected) <= tolerance


def _scored(row: Row) -> Scored:
    completion = Completion(row.tokens, row.logprobs, (VersionSpan(0, 0, 0),), "stop")
    return Scored(Episode((Turn(row.prompt, completion),)), 0.0, {})
