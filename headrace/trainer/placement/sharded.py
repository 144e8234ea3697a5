"""Ranks among which the weights are split by torch's FSDP2 (`fully_shard`, arXiv 2304.11277), and copies of such a split (HSDP).

A layer is gathered for its forward and for its backward pass; gradients are summed and split again after every microbatch. The unit is
a layer. All else (embedding, last norm, head) belongs to the root, and stays gathered from the root's forward to the end of the backward pass:
a matrix that is embedding and head at once is then summed once, when both gradients are there. transformers 5.23 places it in a unit with
the last norm, and weights of tied models then drift (docs/design-notes.md).

Parameters that would not fit into a unit, because they are trained in another dtype or beside frozen weights (adapters), are small:
every rank holds them whole, and `accumulate` adds up their gradients.

Neighbouring ranks may compute each microbatch together (`forward/context.py`). The model is split among them like among others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from headrace.algo.loss.aggregate import AggregationFunction
from headrace.packing import Pack, StepPlan, split_ranks
from headrace.trainer.config import TrainConfig
from headrace.trainer.forward.context import Context
from headrace.trainer.model.causal_lm import load_model
from headrace.trainer.model.low_memory import local, make_optimizer
from headrace.trainer.parallel import ParallelConfig
from headrace.trainer.placement.port import Microbatch, Precision
from headrace.trainer.placement.whole_experts import split_experts
from headrace.types import Row


class Sharded:
    """Protocol `Placement`. The processes have met already (`meeting.py`)."""

    plain = False

    def __init__(self, config: ParallelConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        assert self._ranks == config.ranks, f"{self._ranks} processes have met for {config.ranks} ranks"
        names = ("replicate", "shard") if config.replicate > 1 else ("shard",)
        sizes = (config.replicate, config.split)[-len(names) :]
        self._all = init_device_mesh(device.type, (*sizes, 1), mesh_dim_names=(*names, "alone"))
        self._mesh = self._all[names]
        self.context = self._context() if config.context > 1 else None
        self._roots: list[FSDPModule] = []
        """The models that were spread."""

    def _context(self) -> Context:
        names = ("batches", "context")
        mesh = init_device_mesh(self._device.type, (self._config.batches, self._config.context), mesh_dim_names=names)
        together = mesh["context"]
        return Context(together.get_group(), together.get_local_rank(), together.size(), self._device)

    @property
    def leads(self) -> bool:
        return self._rank == 0

    @property
    def _counts(self) -> bool:
        """Whether the microbatches of this rank count in sums: of those that compute them together, one does."""
        return self.context is None or self.context.rank == 0

    def load(self, directory: Path, device: torch.device) -> Any:
        """Loads into the host's memory: a device never holds more than its part and one layer."""
        return load_model(directory, torch.device("cpu"))

    def spread(self, model: Any) -> None:
        experts = split_experts(model, self._all["shard"], self._all["alone"]) if self._config.expert > 1 else set()
        beside = _beside(model) - experts
        for parameter in beside:
            parameter.data = parameter.data.to(self._device)
        beside |= experts
        low = self._config.gather == "bfloat16"
        rounded = low or any(p.dtype == torch.bfloat16 for p in model.parameters())
        reduced = torch.float32 if rounded else None
        policy = MixedPrecisionPolicy(torch.bfloat16 if low else None, reduced, cast_forward_inputs=False)
        for layer in layers_of(model):
            fully_shard(
                layer,
                mesh=self._mesh,
                reshard_after_forward=self._config.reshard,
                mp_policy=policy,
                ignored_params=beside,
            )
        whole = MixedPrecisionPolicy(None, reduced, cast_forward_inputs=False)
        fully_shard(model, mesh=self._mesh, reshard_after_forward=False, mp_policy=whole, ignored_params=beside)
        for module in _units(model):
            # Sums, not means (C9). Another factor than the group's size would use an operation that gloo does not have.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        # an expert that no token of this rank chose has a gradient on another
        model.set_reduce_scatter_unused_params(True)
        self._roots.append(model)
        model.register_forward_hook(_free)

    def optimizer(
        self, parameters: Iterable[tuple[str, torch.nn.Parameter]], config: TrainConfig
    ) -> torch.optim.Optimizer:
        return make_optimizer(parameters, config)

    def plan(
        self,
        rows: Sequence[Row],
        aggregation: AggregationFunction,
        *,
        constant: int,
        budget: int,
        step: int,
        share: bool,
    ) -> StepPlan:
        context = self._config.context
        plans = split_ranks(
            rows,
            aggregation,
            constant=constant,
            budget=budget * context,
            ranks=self._config.batches,
            step=step,
            share=share,
        )
        return plans[self._rank // context]

    def accumulate(
        self,
        packs: Sequence[Pack],
        microbatch: Microbatch,
        *,
        parameters: Sequence[torch.nn.Parameter],
        precision: Precision,
    ) -> None:
        for number in range(len(packs)):
            for root in self._roots:  # copies of the split add up their gradients once a step
                root.set_requires_all_reduce(number == len(packs) - 1)
            with precision(), microbatch(number) as loss:
                loss.backward()
        self._add_up([p for p in parameters if not isinstance(p, DTensor)])

    def _add_up(self, beside: Sequence[torch.nn.Parameter]) -> None:
        """Sums the gradients of parameters that every rank holds whole, in one collective."""
        if not beside:
            return
        have = self.largest(torch.tensor([p.grad is not None for p in beside], dtype=torch.float64))
        wanted = [p for p, one in zip(beside, have.tolist(), strict=True) if one]
        if not wanted:
            return
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in wanted])
        dist.all_reduce(flat)
        for parameter, summed in zip(wanted, flat.split([p.numel() for p in wanted]), strict=True):
            parameter.grad = summed.view_as(parameter)

    def sum(self, values: Tensor) -> Tensor:
        total = values.clone() if self._counts else torch.zeros_like(values)
        dist.all_reduce(total)
        return total

    def largest(self, values: Tensor) -> Tensor:
        most = values.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most

    def join(self, columns: Tensor) -> tuple[Tensor, slice]:
        mine = torch.zeros(self._ranks, dtype=torch.float64)
        mine[self._rank] = columns.shape[1]
        counts = [int(count) for count in self.sum(mine).tolist()]
        padded = columns.new_zeros(columns.shape[0], max(counts))
        padded[:, : columns.shape[1]] = columns
        found = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(found, padded)
        start = sum(counts[: self._rank - (self.context.rank if self.context else 0)])
        joined = torch.cat([one[:, :count] for one, count in zip(found, counts, strict=True)], 1)
        return joined, slice(start, start + columns.shape[1])

    def norm(self, parameters: Sequence[torch.nn.Parameter]) -> Tensor:
        gradients = [p.grad for p in parameters if p.grad is not None]
        split = [g.to_local() for g in gradients if isinstance(g, DTensor)]
        beside = [g for g in gradients if not isinstance(g, DTensor)]
        squares = _square(split).to(self._device)
        dist.all_reduce(squares, group=self._mesh.get_group("shard"))
        return (squares + _square(beside).to(self._device)).sqrt()

    def clip(self, parameters: Sequence[torch.nn.Parameter], norm: Tensor, most: float) -> None:
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        torch._foreach_mul_(gradients, most / (float(norm) + 1e-6))  # as torch.nn.utils.clip_grads_with_norm_

    def whole(self, tensor: Tensor) -> Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return whole
        # every rank has the whole: nothing is sent
        return distribute_tensor(whole.to(self._device), like.device_mesh, like.placements, src_data_rank=None)


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of a model: the list of modules that holds most of its parameters. None, if it has no list."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    size = lambda module: sum(p.numel() for p in module.parameters())  # noqa: E731
    return list(max(lists, key=size, default=()))


def _beside(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """The parameters that are not split. A unit has one dtype of trained weights."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if len(trained) < len(list(model.parameters())):
        return set(trained)
    sizes: Counter[torch.dtype] = Counter()
    for parameter in trained:
        sizes[parameter.dtype] += parameter.numel()
    ((main, _),) = sizes.most_common(1)
    return {p for p in trained if p.dtype != main}


def _units(model: torch.nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _free(module: Any, args: Any, output: Any) -> None:
    """Forward hook of the root: without a backward pass nothing else would free what was gathered, and the next update would leave it
    stale."""
    if not torch.is_grad_enabled():
        for unit in _units(module):
            unit.reshard()


def _square(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares, in float64."""
    return (
        torch.nn.utils.get_total_norm(tensors, foreach=True).double().square()
        if tensors
        else torch.zeros((), dtype=torch.float64)
    )
