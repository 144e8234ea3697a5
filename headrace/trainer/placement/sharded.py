"""Ranks among which the weights are split by torch's FSDP2 (`fully_shard`, arXiv 2304.11277), copies of such a split (HSDP), and ranks
that split each layer's work by the model's plan (`tensor_parallel.py`). The latter, a tensor group, are neighbours and have the same microbatches.

A layer is gathered for its forward and for its backward pass; gradients are summed and split again once a step, or after every microbatch
where memory is dear (`parallel.sums_once`). The unit is a layer. All else (embedding, last norm, head) belongs to the root, and stays gathered from the root's forward to the end of the backward pass:
a matrix that is embedding and head at once is then summed once, when both gradients are there. transformers 5.23 places it in a unit with
the last norm, and weights of tied models then drift (docs/decisions/0008-trainer-placement.md).

Parameters that would not fit into a unit, because they are trained in another dtype or beside frozen weights (adapters), are small:
every rank holds them whole, and `accumulate` adds up their gradients.

A loss is computed by every rank of a tensor group, so sums over microbatches go over the others: those of the same place in their groups.
Or neighbouring ranks compute each microbatch together (`forward/context.py`). The model is then split among them like among others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from headrace.trainer.config import TrainConfig
from headrace.trainer.forward.context import Context
from headrace.trainer.model.causal_lm import layers_of
from headrace.trainer.model.low_memory import local, make_optimizer
from headrace.trainer.model.outline import Region, hollow, is_outline, outline_or_model
from headrace.trainer.packing import DealtRows, StepPlan, plan_of
from headrace.trainer.parallel import ParallelConfig, sums_once
from headrace.trainer.placement.filling import fill, part_of, piece_of
from headrace.trainer.placement.port import Microbatches, T, TensorPiece
from headrace.trainer.placement.rendezvous import of_leader
from headrace.trainer.placement.tensor_parallel import has_experts, split_by_plan, split_experts


class Sharded:
    """Protocol `Placement`. The processes have met already (`rendezvous.py`)."""

    plain = False

    def __init__(self, config: ParallelConfig, device: torch.device) -> None:
        self.parallel, self._device = config, device
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        assert self._ranks == config.ranks, f"{self._ranks} processes have met for {config.ranks} ranks"
        names = ("replicate", "shard") if config.replicate > 1 else ("shard",)
        sizes = (config.replicate, config.gathering)[-len(names) :]
        self._all = init_device_mesh(device.type, (*sizes, config.tensor), mesh_dim_names=(*names, "tensor"))
        self._mesh, self._tensor = self._all[names], self._all["tensor"]
        self._others = dist.group.WORLD if config.tensor == 1 else self._alike(names)
        """This rank, and those that have other microbatches, or other tokens of the same."""
        self.context = self._context() if config.context > 1 else None
        self._roots: list[FSDPModule] = []
        """The models that FSDP2 has split."""
        self._spread = False
        """Whether the policy has been spread, which comes first."""
        self._summed: set[torch.nn.Parameter] = set()
        """Parameters whose gradients cover this rank's heads only."""
        self._memory = least(torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0)

    def _alike(self, names: tuple[str, ...]) -> dist.ProcessGroup:
        """The ranks of the same place in their tensor groups."""
        return self._mesh.get_group() if len(names) == 1 else self._all[names]._flatten("alike").get_group()

    def _context(self) -> Context:
        names = ("batches", "context")
        mesh = init_device_mesh(self._device.type, (self.parallel.batches, self.parallel.context), mesh_dim_names=names)
        together = mesh["context"]
        return Context(together.get_group(), together.get_local_rank(), together.size(), self._device)

    @property
    def leads(self) -> bool:
        return self._rank == 0

    @property
    def _counts(self) -> bool:
        """Whether the microbatches of this rank count in sums: of those that compute them together, one does."""
        return self.context is None or self.context.rank == 0

    def load(self, directory: Path, device: torch.device, *, values: bool) -> Any:
        """Values are loaded into the host's memory: a device never holds more than its part and one layer."""
        return outline_or_model(directory, values=values)

    def of_leader(self, compute: Callable[[], T]) -> T:
        return of_leader(compute)

    def spread(self, model: Any) -> None:
        hollow(model)
        self._divide(model)
        if is_outline(model):
            fill(model, self._device)

    def _divide(self, model: Any) -> None:
        config, experts, summed = self.parallel, set[str](), list[str]()
        if config.expert > 1 and (has_experts(model) or not self._spread):  # a critic beside it may be dense
            experts = split_experts(model, self._all_experts(), self._tensor)
        if config.tensor > 1:
            summed = split_by_plan(model, self._tensor, without=experts)
        if config.gathering > 1:
            names = dict(model.named_parameters())
            self._split(model, {names[name] for name in experts if name in names})
        else:
            for tensor in (*model.parameters(), *model.buffers()):
                if not isinstance(tensor, DTensor):  # `model.to` would make others anew, without their hooks
                    tensor.data = tensor.data.to(self._device)
        self._summed |= {model.get_parameter(name) for name in summed}
        self._spread = True

    def _all_experts(self) -> DeviceMesh:
        """All ranks among which experts are split."""
        if self.parallel.tensor == 1:
            return self._all["shard"]
        return self._all["shard", "tensor"]._flatten("expert")

    def _split(self, model: Any, experts: set[torch.nn.Parameter]) -> None:
        beside = kept_whole(model) - experts
        for parameter in beside:
            parameter.data = parameter.data.to(self._device)
        split_layers(model, layers_of(model), self._mesh, self.parallel, without=beside | experts)
        self._roots.append(model)

    def optimizer(
        self, parameters: Iterable[tuple[str, torch.nn.Parameter]], config: TrainConfig
    ) -> torch.optim.Optimizer:
        return make_optimizer(parameters, config)

    @property
    def share(self) -> int:
        return self.parallel.share_of(self._rank)

    def plan(self, rows: DealtRows) -> StepPlan:
        return plan_of(rows)

    def accumulate(self, work: Microbatches) -> None:
        once = self._sums_once()
        for number in range(len(work.packs)):
            last = number == len(work.packs) - 1
            for root in self._roots:
                if once:
                    root.set_requires_gradient_sync(last)
                else:  # copies of the split add up their gradients once a step in any case
                    root.set_requires_all_reduce(last)
            with work.precision(), work.loss(number) as loss:
                loss.backward()
        self._add_up([p for p in work.parameters if p in self._summed], self._tensor.get_group())
        self._add_up([p for p in work.parameters if not isinstance(p, DTensor)], self._others)

    def _sums_once(self) -> bool:
        roots: list[Any] = self._roots
        split = {p for root in roots for p in root.parameters() if isinstance(p, DTensor) and p.requires_grad}
        return sums_once(self.parallel, sum(p.numel() for p in split), self._memory)

    def _add_up(self, parameters: Sequence[torch.nn.Parameter], group: Any) -> None:
        """Sums the gradients of these parameters over the ranks of a group, in one collective."""
        if not parameters or dist.get_world_size(group) == 1:
            return
        have = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float64)
        dist.all_reduce(have, dist.ReduceOp.MAX, group=group)
        wanted = [p for p, there in zip(parameters, have.tolist(), strict=True) if there]
        for parameter in wanted:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [local(p.grad) for p in wanted if p.grad is not None]
        if not gradients:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=group)
        for gradient, summed in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))

    def sum(self, values: Tensor) -> Tensor:
        total = values.clone() if self._counts else torch.zeros_like(values)
        dist.all_reduce(total, group=self._others)
        return total

    def largest(self, values: Tensor) -> Tensor:
        most = values.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._others)
        return most

    def join(self, columns: Tensor) -> tuple[Tensor, slice]:
        place = dist.get_rank(self._others)
        mine = torch.zeros(dist.get_world_size(self._others), dtype=torch.float64)
        mine[place] = columns.shape[1]
        counts = [int(count) for count in self.sum(mine).tolist()]
        padded = columns.new_zeros(columns.shape[0], max(counts))
        padded[:, : columns.shape[1]] = columns
        found = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(found, padded, group=self._others)
        start = sum(counts[: place - (self.context.rank if self.context else 0)])
        joined = torch.cat([tensor[:, :count] for tensor, count in zip(found, counts, strict=True)], 1)
        return joined, slice(start, start + columns.shape[1])

    def of_head(self, values: Tensor) -> Tensor:
        return values

    def each(self, values: Tensor) -> tuple[Tensor, int]:
        found = [torch.empty_like(values) for _ in range(self._ranks)]
        dist.all_gather(found, values)
        return torch.stack(found), self._rank

    def norm(self, parameters: Sequence[torch.nn.Parameter]) -> Tensor:
        parts = defaultdict(list)
        for parameter in parameters:
            if parameter.grad is not None:
                parts[_split_over(parameter)].append(local(parameter.grad))
        squares = torch.zeros(2, 2, dtype=torch.float64, device=self._device)  # split by shard or not, by tensor or not
        for (shard, tensor), gradients in parts.items():
            squares[int(shard), int(tensor)] = _square(gradients)
        dist.all_reduce(squares[1], group=self._all["shard"].get_group())
        over_tensor = squares[:, 1].contiguous()
        dist.all_reduce(over_tensor, group=self._tensor.get_group())
        return (squares[:, 0].sum() + over_tensor.sum()).sqrt()

    def clip(self, parameters: Sequence[torch.nn.Parameter], norm: Tensor, most: float) -> None:
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        torch._foreach_mul_(gradients, most / (float(norm) + 1e-6))  # as torch.nn.utils.clip_grads_with_norm_

    def whole(self, tensor: Tensor) -> Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()

    def pieces(self, tensors: Mapping[str, Tensor]) -> dict[str, TensorPiece]:
        """Rank 0 writes what is whole on every rank: it is small. The first rank of a tensor group writes what all of it have alike (norms)."""
        split = {
            name: piece_of(tensor) if self._writes(tensor) else None
            for name, tensor in tensors.items()
            if isinstance(tensor, DTensor)
        }
        mine = {name: TensorPiece(tensor) for name, tensor in tensors.items() if name not in split and self.leads}
        return {name: piece for name in tensors if (piece := split.get(name) or mine.get(name)) is not None}

    def _writes(self, tensor: DTensor) -> bool:
        over_tensor = {"tensor", "expert"} & {*(tensor.device_mesh.mesh_dim_names or ())}
        return bool(over_tensor) or self._tensor.get_local_rank() == 0

    def part(self, read: Callable[[Region | None], Tensor], like: Tensor) -> Tensor:
        return part_of(read, like) if isinstance(like, DTensor) else read(None)


def least(memory: int) -> int:
    """The least of what ranks give, which all call this at the same time. Ranks with different GPUs must sum gradients equally often: they would wait for
    each other for ever."""
    found = torch.tensor(memory)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found)


def split_layers(
    model: Any,
    layers: Sequence[torch.nn.Module],
    mesh: DeviceMesh,
    config: ParallelConfig,
    *,
    without: set[torch.nn.Parameter],
) -> None:
    """Splits these layers, and what lies beside the layers, over the mesh, except for the parameters `without`."""
    low = config.gather == "bfloat16"
    rounded = low or any(p.dtype == torch.bfloat16 for p in model.parameters())
    reduced = torch.float32 if rounded else None
    policy = MixedPrecisionPolicy(torch.bfloat16 if low else None, reduced, cast_forward_inputs=False)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=config.reshard, mp_policy=policy, ignored_params=without)
    whole = MixedPrecisionPolicy(None, reduced, cast_forward_inputs=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=whole, ignored_params=without)
    for module in _units(model):
        # Sums, not means (C9). Another factor than the group's size would use an operation that gloo does not have.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    # an expert that no token of this rank chose has a gradient on another
    model.set_reduce_scatter_unused_params(True)
    model.register_forward_hook(_free)


def kept_whole(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """The parameters that are not split. A unit has one dtype of trained weights."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if len(trained) < len(list(model.parameters())):
        return set(trained)
    sizes: Counter[torch.dtype] = Counter()
    for parameter in trained:
        sizes[parameter.dtype] += parameter.numel()
    ((main, _),) = sizes.most_common(1)
    return {p for p in trained if p.dtype != main}


def _split_over(parameter: Tensor) -> tuple[bool, bool]:
    """Whether the parameter is split over the ranks of `shard`, and over those of `tensor`. Experts are split over one mesh of all of these."""
    if not isinstance(parameter, DTensor):
        return False, False
    axes = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
    split = {name for name, placement in axes if not placement.is_replicate()}
    return bool(split & {"shard", "expert"}), bool(split & {"tensor", "expert"})


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
