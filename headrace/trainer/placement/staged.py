"""Ranks that form a pipeline: each holds some consecutive layers (`model_stages.py`), and microbatches pass from one to the next (`schedule.py`).

The first stage has the embedding, the last one the last norm, the head and the loss. A matrix that is embedding and head at once lies on
both: the last sends its gradient to the first, which updates the matrix and sends it back, so that the two copies have the same bits.
Numbers that follow from log-probs are known to the ranks of the last stage only; all others have NaN in their place, which `sum`,
`largest`, `join` and `of_head` replace.

There may be several such pipelines (`replicate`), each with its own microbatches. Adapters of a frozen model are small: every rank holds
them whole, and has gradients of those in its own stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from headrace.algo.loss.aggregate import AggregationFunction
from headrace.batches import Row
from headrace.packing import Pack, StepPlan, fill_up, split_ranks
from headrace.trainer.config import TrainConfig
from headrace.trainer.model.causal_lm import load_model
from headrace.trainer.model.low_memory import make_optimizer
from headrace.trainer.parallel import ParallelConfig
from headrace.trainer.placement.cutting import LOOPS, stages_of
from headrace.trainer.placement.model_stages import Chain, Stages
from headrace.trainer.placement.port import Body, Microbatch, Precision
from headrace.trainer.placement.schedule import run_schedule


class Staged:
    """Protocol `Placement`. The processes have met already (`meeting.py`)."""

    plain = False
    context = None

    def __init__(self, config: ParallelConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        assert dist.get_world_size() == config.ranks, f"{dist.get_world_size()} processes have met"
        sizes = (config.pipeline, config.replicate)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("pipeline", "replicate"))
        self._line, self._copies = mesh.get_group("pipeline"), mesh.get_group("replicate")
        self._place, self._copy = mesh.get_local_rank("pipeline"), mesh.get_local_rank("replicate")
        self._chain = Chain(self._line)
        self._stages: Stages | None = None
        """Those of the model that is trained; None until it is spread."""
        self._beside: set[torch.nn.Parameter] = set()
        """Parameters that every rank holds whole: adapters."""
        self._tied: list[torch.nn.Parameter] = []
        """Parameters that the first and the last stage share."""

    @property
    def leads(self) -> bool:
        return dist.get_rank() == 0

    @property
    def _last(self) -> bool:
        """Whether this rank has the head."""
        return self._place == self._config.pipeline - 1

    def load(self, directory: Path, device: torch.device) -> Any:
        """Loads into the host's memory: a device never holds more than its stages."""
        return load_model(directory, torch.device("cpu"))

    def spread(self, model: Any) -> None:
        config = self._config
        count = config.pipeline * LOOPS[config.schedule]
        stages = Stages(model, count, stages_of(self._place, config.pipeline, config.schedule), self._chain)
        trained = [p for p in model.parameters() if p.requires_grad]
        adapters = set(trained) if len(trained) < len(list(model.parameters())) else set()
        stages.hold(self._device, adapters)
        if self._stages is None:
            self._stages, self._beside = stages, adapters
            both = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
            if both[0] is both[1] and both[0].requires_grad and self._place in (0, config.pipeline - 1):
                self._tied = both[:1]

    def optimizer(
        self, parameters: Iterable[tuple[str, torch.nn.Parameter]], config: TrainConfig
    ) -> torch.optim.Optimizer:
        optimizer = make_optimizer(parameters, config)
        if self._tied:
            optimizer.register_step_post_hook(lambda one, args, kwargs: self._share_tied(one))
        return optimizer

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
        """The microbatches of this pipeline: at least two, and as many as its schedule can order."""
        plans = split_ranks(
            rows,
            aggregation,
            constant=constant,
            budget=budget,
            ranks=self._config.replicate,
            step=step,
            share=share,
        )
        multiple = 1 if LOOPS[self._config.schedule] == 1 else self._config.pipeline
        return fill_up(plans[self._copy], least=2, multiple=multiple)

    def accumulate(
        self,
        packs: Sequence[Pack],
        microbatch: Microbatch,
        *,
        parameters: Sequence[torch.nn.Parameter],
        precision: Precision,
        body: Body,
    ) -> None:
        assert self._stages is not None
        run_schedule(
            self._config.schedule,
            self._stages,
            [len(pack.tokens) for pack in packs],
            microbatch=microbatch,
            body=body,
            precision=precision,
            group=self._line,
            device=self._device,
        )
        for tied in self._tied:
            self._add_tied(tied)
        beside = [p for p in parameters if p in self._beside]
        _add_up(beside, dist.group.WORLD)
        if self._config.replicate > 1:
            _add_up([p for p in parameters if p not in self._beside and not p.is_meta], self._copies)

    def _add_tied(self, tied: torch.nn.Parameter) -> None:
        """Adds the last stage's gradient to the first's."""
        if self._last:
            gradient = torch.zeros_like(tied) if tied.grad is None else tied.grad
            dist.send(gradient, group=self._line, group_dst=0)
            tied.grad = None
            return
        received = torch.empty_like(tied)
        dist.recv(received, group=self._line, group_src=self._config.pipeline - 1)
        tied.grad = received if tied.grad is None else tied.grad.add_(received)

    def _share_tied(self, optimizer: torch.optim.Optimizer) -> None:
        """Sends the updated matrix from the first stage to the last, which keeps no optimizer's state of it."""
        for tied in self._tied:
            if self._last:
                dist.recv(tied.data, group=self._line, group_src=0)
                optimizer.state.pop(tied, None)  # a checkpoint may have restored it
            else:
                dist.send(tied.data, group=self._line, group_dst=self._config.pipeline - 1)

    def sum(self, values: Tensor) -> Tensor:
        total = values.clone() if self._last else torch.zeros_like(values)
        dist.all_reduce(total)
        return total

    def largest(self, values: Tensor) -> Tensor:
        most = values.clone() if self._last else torch.full_like(values, -torch.inf)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most

    def join(self, columns: Tensor) -> tuple[Tensor, slice]:
        everyone: list[Any] = [None] * self._config.replicate
        dist.all_gather_object(everyone, self.of_head(columns).cpu(), group=self._copies)
        start = sum(one.shape[1] for one in everyone[: self._copy])
        return torch.cat(everyone, 1).to(columns.device), slice(start, start + columns.shape[1])

    def of_head(self, values: Tensor) -> Tensor:
        known = values.contiguous()
        dist.broadcast(known, group=self._line, group_src=self._config.pipeline - 1)
        return known

    def each(self, values: Tensor) -> tuple[Tensor, int]:
        found = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(found, values)
        return torch.stack(found), dist.get_rank()

    def norm(self, parameters: Sequence[torch.nn.Parameter]) -> Tensor:
        squares = _square([p.grad for p in parameters if p.grad is not None and p not in self._beside])
        dist.all_reduce(squares, group=self._line)
        beside = _square([p.grad for p in parameters if p.grad is not None and p in self._beside])
        return (squares + beside).sqrt().to(self._device)

    def clip(self, parameters: Sequence[torch.nn.Parameter], norm: Tensor, most: float) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, most / (float(norm) + 1e-6))  # as torch.nn.utils.clip_grads_with_norm_

    def whole(self, tensor: Tensor) -> Tensor:
        """A copy from the first rank of the pipeline that has it."""
        have = torch.tensor(self._config.pipeline if tensor.is_meta else self._place)
        dist.all_reduce(have, dist.ReduceOp.MIN, group=self._line)
        found = torch.empty_like(tensor, device=self._device) if tensor.is_meta else tensor.detach().contiguous()
        dist.broadcast(found, group=self._line, group_src=int(have))
        return found

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        return torch.empty_like(whole, device="meta") if like.is_meta else whole

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The ranks of the first pipeline send them to its first, one by one."""
        held = {name: tensor.detach() for name, tensor in tensors.items() if not tensor.is_meta}
        known: list[Any] = [None] * self._config.pipeline
        mine = [(name, tensor.shape, tensor.dtype) for name, tensor in held.items()]
        dist.all_gather_object(known, mine, group=self._line)
        found: dict[str, Tensor] = {}
        for place, given in enumerate(known if self._copy == 0 else ()):
            for name, shape, dtype in given:
                if name in found:  # of a rank before
                    continue
                found[name] = held.get(name, torch.empty(0))
                if place and place == self._place:
                    dist.send(held[name].contiguous(), group=self._line, group_dst=0)
                elif place and self.leads:
                    received = torch.empty(shape, dtype=dtype, device=self._device)
                    dist.recv(received, group=self._line, group_src=place)
                    found[name] = received
        return {name: tensor.cpu() for name, tensor in found.items()} if self.leads else {}


def _add_up(parameters: Sequence[torch.nn.Parameter], group: Any) -> None:
    """Sums the gradients of parameters that every rank of the group holds."""
    if not parameters:
        return
    have = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float32, device=parameters[0].device)
    dist.all_reduce(have, dist.ReduceOp.MAX, group=group)
    for parameter, one in zip(parameters, have.tolist(), strict=True):
        if one:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad, group=group)


def _square(tensors: Sequence[Tensor | None]) -> Tensor:
    """The sum of squares, in float64."""
    there = [tensor for tensor in tensors if tensor is not None]
    if not there:
        return torch.zeros((), dtype=torch.float64)
    return torch.nn.utils.get_total_norm(there, foreach=True).double().square().cpu()
